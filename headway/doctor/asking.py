"""Asks processes how they are, all at once with a short deadline each, and finds those of this machine in /proc."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from pydantic import SecretStr

from protocol.status import Kind
from services.config.models import ConfigModel, HttpConfig, ProcessConfig
from services.diagnosis.asked import AskedProcess, Target, place_of
from services.diagnosis.asking import ask
from services.http.tls import TlsFiles

DEADLINE_S = 3.0
_CONNECT_S = 2.0


def targets_of(configs: Mapping[str, ProcessConfig]) -> list[Target]:
    """The processes that a config file has tables for, at the addresses that they listen on."""
    targets = []
    for name, config in configs.items():
        http = getattr(config, "http", None)
        if isinstance(http, HttpConfig) and http.port:
            host = "127.0.0.1" if http.host in ("0.0.0.0", "::") else http.host
            scheme = "http" if http.tls_cert_file is None else "https"
            url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{http.port}"
            targets.append(Target(kind=_kind(name), url=url, token=http.token, tls=http.tls))
    return targets


def tokens_of(configs: Mapping[str, ProcessConfig]) -> dict[str, SecretStr]:
    """By place, the tokens of addresses that have one of their own, such as those of [[env-service.rewards]]."""
    found: dict[str, SecretStr] = {}
    groups: list[object] = list(configs.values())
    while groups:
        match groups.pop():
            case ConfigModel() as group:
                url, token = getattr(group, "url", None), getattr(group, "token", None)
                if isinstance(url, str) and isinstance(token, SecretStr):
                    found[place_of(url)] = token
                groups.extend(getattr(group, name) for name in type(group).model_fields)
            case tuple() as several:
                groups.extend(several)
    return found


async def ask_all(targets: Iterable[Target], *, tokens: Mapping[str, SecretStr] | None = None) -> list[AskedProcess]:
    """Asks all targets, and then those that they speak of and that were not asked yet, with the `tokens` of places."""
    asked = _distinct(targets, known=())
    procs = await _ask_side_by_side(asked)
    spoken_of = _distinct(_spoken_of(procs, asked, tokens or {}), known=asked)
    return _once_each([*procs, *await _ask_side_by_side(spoken_of)])


async def _ask_side_by_side(targets: Sequence[Target]) -> list[AskedProcess]:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(target)) for target in targets]
    return [task.result() for task in asked]


def _spoken_of(procs: Iterable[AskedProcess], asked: Sequence[Target], tokens: Mapping[str, SecretStr]) -> list[Target]:
    """Generators and reward services by the addresses that others have of them, with the token of place or kind."""
    of_kinds = {target.kind: target.token for target in asked}
    trust = next((target.tls for target in asked if target.tls.ca is not None), TlsFiles())
    statuses = [proc.status for proc in procs if proc.status is not None]
    return [
        Target(
            kind=peer.kind,
            url=peer.url.rstrip("/"),
            token=tokens.get(place_of(peer.url), of_kinds.get(peer.kind)),
            tls=trust,
        )
        for status in statuses
        for peer in status.peers
        if peer.url is not None
    ]


def _distinct(targets: Iterable[Target], *, known: Iterable[Target]) -> list[Target]:
    places = {target.place for target in known}
    found: dict[str, Target] = {}
    for target in targets:
        if target.place not in places:
            found.setdefault(target.place, target)
    return list(found.values())


def _once_each(procs: Sequence[AskedProcess]) -> list[AskedProcess]:
    """A process that was reached by two addresses is one."""
    found: dict[tuple[str, int] | str, AskedProcess] = {}
    for proc in procs:
        status = proc.status
        found.setdefault(proc.target.place if status is None else (status.host, status.pid), proc)
    return list(found.values())


def _kind(name: str) -> Kind:
    match name:
        case "learner" | "generator" | "reward-service" | "env-service":
            return name
    raise ValueError(f"{name} is no process")
