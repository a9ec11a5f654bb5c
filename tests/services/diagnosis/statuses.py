"""Statuses and procs as tests need them."""

from protocol.status import (
    EventStatus,
    FailureStatus,
    Kind,
    LoadStatus,
    PeerStatus,
    ProgressStatus,
    QueueStatus,
    Status,
    UsageStatus,
    WaitingItems,
    WaitStatus,
)
from services.diagnosis.asked import AskedProcess, Condition, Target

PORTS: dict[Kind, int] = {"learner": 7300, "generator": 7310, "reward-service": 7320, "env-service": 7330}


def target(kind: Kind) -> Target:
    return Target(kind=kind, url=f"http://127.0.0.1:{PORTS[kind]}")


def status(
    kind: Kind,
    *,
    waits: tuple[tuple[str, float] | tuple[str, float, bool], ...] = (),
    peers: tuple[PeerStatus, ...] = (),
    queues: tuple[QueueStatus, ...] = (),
    events: tuple[EventStatus, ...] = (),
    failures: tuple[str, ...] = (),
    problems: tuple[str, ...] = (),
    version: str | None = None,
    protocol_version: int = 1,
    name: str = "",
    load: LoadStatus | None = None,
    progress: ProgressStatus | None = None,
    usage: UsageStatus | None = None,
    host: str = "here",
) -> Status:
    """Waits are whom, seconds, and whether they block readiness, which they do if that is left out."""
    return Status(
        id=name or f"the-{kind}",
        load=load,
        progress=progress,
        service=kind,
        version="0.1.0",
        protocol_version=protocol_version,
        pid=PORTS[kind],
        host=host,
        usage=usage,
        uptime_s=100.0,
        stopping=False,
        waits=tuple(WaitStatus(whom=w[0], since_s=w[1], blocks_readiness=w[2] if len(w) > 2 else True) for w in waits),
        peers=peers,
        queues=queues,
        events=events,
        failures=tuple(FailureStatus(text=text, age_s=1.0) for text in failures),
        problems=problems,
        policy_version=version,
    )


def load(
    *, busy: float = 1.0, per_s: float = 1.0, running: float = 1.0, limit: int | None = None, **waits: float
) -> LoadStatus:
    """Of a time that is as the minute before; `waits` are items by whom they wait for."""
    waiting = tuple(WaitingItems(whom=whom, running=count) for whom, count in waits.items())
    return LoadStatus(
        over_s=10.0, busy_share=busy, per_s=per_s, running=running, limit=limit, waits=waiting, long_busy_share=busy
    )


def well(found: Status) -> AskedProcess:
    return AskedProcess(target=target(found.service), condition=Condition.ANSWERS, status=found)


def ill(kind: Kind, condition: Condition) -> AskedProcess:
    return AskedProcess(target=target(kind), condition=condition, complaint="does not do well")
