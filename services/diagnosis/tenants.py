"""The judgement on a server of training loops, in a sentence: what holds its tenants up, if anything does.

    completions wait, and no generator says a word ─▶ sick, the generators
    one call is in hand for very long ──────────────▶ sick, the trainer
    one call is in hand for long, others wait ──────▶ bounded, that call's tenant
    a tenant has as much under way as it may have ──▶ bounded, that tenant floods
    a client has not sent what others wait behind ──▶ bounded, that client
    nobody has anything under way ──────────────────▶ healthy

A server that nobody uses is as well as one that many use: only what waits for something that does not come is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.tenants import CallAtWork, TenantRunStatus, TenantsStatus, TenantStatus

_SILENT_S = 15.0
_LONG_S = 15.0
_STUCK_S = 600.0
_MISSING_S = 60.0
_FLOODS = 0.5
_MISSING = "operation "


@dataclass(frozen=True)
class TenantsJudgement:
    """The state of the server: `cause` in a word or two, `who` it is about, a sentence, and what to do."""

    state: Literal["healthy", "bounded", "sick"]
    sentence: str
    remedy: str = ""
    cause: str = ""
    who: str = ""


def judge_tenants(tenants: TenantsStatus) -> TenantsJudgement:
    """The judgement by what the server says of itself."""
    for found in (_generators(tenants), _stuck(tenants), _long_call(tenants), _flood(tenants), _missing(tenants)):
        if found is not None:
            return found
    return TenantsJudgement("healthy", _healthy(tenants))


def _generators(tenants: TenantsStatus) -> TenantsJudgement | None:
    silent_s = tenants.generator_silent_s
    if silent_s is None or silent_s < _SILENT_S:
        return None
    return TenantsJudgement(
        "sick",
        f"No generator has answered for {silent_s:.0f} s, and {_count(tenants.completions, 'completion')} "
        f"{_verb(tenants.completions, 'waits', 'wait')} for one",
        remedy="see whether the generator lives, and its log; what waits goes on when one answers",
        cause="generators",
        who="generator",
    )


def _stuck(tenants: TenantsStatus) -> TenantsJudgement | None:
    call = tenants.at_work
    if call is None or call.since_s < _STUCK_S:
        return None
    return TenantsJudgement(
        "sick",
        f"The trainer has had {_told(call)} in hand for {call.since_s:.0f} s",
        remedy="see with py-spy whether it computes; if not, restart the learner: what was accepted is on its disk",
        cause="stuck call",
        who=call.tenant,
    )


def _long_call(tenants: TenantsStatus) -> TenantsJudgement | None:
    call = tenants.at_work
    if call is None or call.since_s < _LONG_S:
        return None
    behind = [each for each in tenants.tenants if each.queued and each.name != call.tenant]
    queued = sum(each.queued for each in behind)
    if not behind:
        return None
    return TenantsJudgement(
        "bounded",
        f"All wait for one call: {_told(call)} is in hand since {call.since_s:.0f} s, and {_names(behind)} "
        f"{_verb(len(behind), 'waits', 'wait')} behind it with {_count(queued, 'operation')}",
        remedy=f"let {call.tenant}'s client send fewer and shorter sequences in a call: one is never divided",
        cause="long call",
        who=call.tenant,
    )


def _flood(tenants: TenantsStatus) -> TenantsJudgement | None:
    found = [each for each in tenants.tenants if each.refused or _share(each) >= _FLOODS]
    if not found:
        return None
    tenant = max(found, key=lambda each: (each.refused, _share(each)))
    under_way = [
        f"{tenant.queued:,} of {tenant.queue_limit:,} operations" if tenant.queued else "",
        f"{tenant.completions:,} of {tenant.completion_limit:,} completions" if tenant.completions else "",
    ]
    has = " and ".join(filter(None, under_way)) or "nothing any more"
    refused = (
        f", and {_count(tenant.refused, 'call')} of its were turned away in the last minute" if tenant.refused else ""
    )
    return TenantsJudgement(
        "bounded",
        f"{tenant.name} floods: it has {has} under way{refused}; others have their turns meanwhile",
        remedy=f"let its client wait for results before it sends more, or change {tenant.name}'s bounds (keys file)",
        cause="flood",
        who=tenant.name,
    )


def _missing(tenants: TenantsStatus) -> TenantsJudgement | None:
    waiting = (each for each in tenants.runs if each.waits_for.startswith(_MISSING) and each.since_s >= _MISSING_S)
    run: TenantRunStatus | None = next(waiting, None)
    if run is None:
        return None
    return TenantsJudgement(
        "bounded",
        f"{run.name} waits for {run.waits_for} for {run.since_s:.0f} s, with {_count(run.queued, 'operation')} "
        "behind it",
        remedy=f"look into the log of {run.tenant}'s client: it has lost a request, or has stopped in the middle",
        cause="missing operation",
        who=run.name,
    )


def _healthy(tenants: TenantsStatus) -> str:
    at_work = [each for each in tenants.runs if each.tokens_per_s or each.queued or each.completions]
    if not (at_work or tenants.queued or tenants.completions):
        if not tenants.clients:
            runs = tenants.run_count
            kept = f"; {_count(runs, 'run')} of clients that left {_verb(runs, 'is', 'are')} kept" if runs else ""
            return f"Healthy: nobody is there{kept}"
        there = _count(tenants.clients, "client")
        return f"Healthy: {there} {_verb(tenants.clients, 'is', 'are')} there, with nothing under way"
    owners = len({each.tenant for each in at_work})
    parts = [
        f"{_count(len(at_work), 'run')} of {_count(owners, 'tenant')} {_verb(len(at_work), 'is', 'are')} at work",
        f"{tenants.tokens_per_s:,.0f} tokens/s are trained" if tenants.tokens_per_s >= 1 else "",
        f"{tenants.completions:,} completions are under way" if tenants.completions else "",
    ]
    return "Healthy: " + ", ".join(filter(None, parts))


def _told(call: CallAtWork) -> str:
    size = f" of {_count(call.tokens, 'token')} in {_count(call.rows, 'row')}" if call.tokens else ""
    shared = f", with {call.sharing - 1} more in the same turn" if call.sharing > 1 else ""
    return f"{call.tenant}'s {call.kind or 'call'}{size}{shared}"


def _share(tenant: TenantStatus) -> float:
    """The part of what the tenant may have under way that it has."""
    return max(
        tenant.queued / tenant.queue_limit,
        tenant.queued_bytes / tenant.bytes_limit,
        tenant.completions / tenant.completion_limit,
    )


def _names(tenants: Sequence[TenantStatus]) -> str:
    return tenants[0].name if len(tenants) == 1 else f"{len(tenants)} tenants"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _verb(number: int, one: str, several: str) -> str:
    return one if number == 1 else several
