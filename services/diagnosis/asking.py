"""Asks a process how it is, with a short deadline, and finds one of this machine in /proc if it does not answer."""

from protocol.status import Status
from services.diagnosis.asked import AskedProcess, Condition, Target
from services.http.client import (
    HttpClient,
    ServiceError,
    ServiceMistrusted,
    ServiceRefused,
    ServiceTimeout,
    ServiceUnreachable,
)
from services.http.tls import TlsFileError, client_tls
from services.local_processes import process_behind

DEADLINE_S = 3.0
_CONNECT_S = 2.0


async def ask(target: Target, *, deadline_s: float = DEADLINE_S) -> AskedProcess:
    """Asks one process. Never raises for what a counterpart does."""
    try:
        trust = client_tls(target.tls)
    except TlsFileError as error:
        return AskedProcess(target=target, condition=Condition.STRANGE, complaint=str(error))
    async with HttpClient(token=target.token, connect_timeout_s=_CONNECT_S, tls=trust) as client:
        try:
            status = await client.get(f"{target.url}/v1/status", Status, deadline_s=deadline_s)
        except ServiceError as error:
            condition, complaint = _failure(error, deadline_s)
            process = None if condition is Condition.DEAD else process_behind(target.url)
            return AskedProcess(target=target, condition=condition, complaint=complaint, process=process)
    if status.service != target.kind:
        complaint = f"a {status.service} answers there, expected the {target.kind}: correct the address"
        return AskedProcess(target=target, condition=Condition.STRANGE, complaint=complaint)
    return AskedProcess(target=target, condition=Condition.ANSWERS, status=status)


def _failure(error: ServiceError, deadline_s: float) -> tuple[Condition, str]:
    match error:
        case ServiceMistrusted():
            return Condition.STRANGE, str(error)
        case ServiceUnreachable(sent=False):
            return Condition.DEAD, "accepts no connection"
        case ServiceTimeout():
            return Condition.HANGS, f"accepts connections, and does not answer within {deadline_s:g} s"
        case ServiceRefused(status=401):
            return Condition.STRANGE, "wants another token than http.token of its table in the config file"
        case ServiceRefused(status=404):
            return Condition.STRANGE, "has no /v1/status: it is of another release, or another program"
    return Condition.STRANGE, str(error)
