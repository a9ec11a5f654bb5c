"""The tenants and training runs of a server of training loops, as `headway status` and `headway doctor` show them."""

from headway.columns import in_columns
from protocol.tenants import TenantRunStatus, TenantsStatus, TenantStatus
from services.durations import clock_text

_MOST = 10
_MAX_WAIT = 60
_TENANT_HEAD = ("tenant", "runs", "operations wait", "completions", "refused in a minute", "rows/s")
_RUN_HEAD = ("run", "rank", "steps", "wait", "rows/s", "loss a row", "is in", "waits for")


def tenant_lines(tenants: TenantsStatus) -> list[str]:
    """A row for each tenant that has something, and for each run with the most to do, ten of each at most."""
    there = [each for each in tenants.tenants if each.runs or each.queued or each.completions or each.refused]
    lines = [
        f"{tenants.base_model}: {tenants.tenant_count:,} tenants, {tenants.clients:,} clients there, "
        f"{tenants.run_count:,} runs, {tenants.resident:,} of them in memory"
    ]
    if there:
        lines += ["", *in_columns([_TENANT_HEAD, *map(_tenant, there[:_MOST])]), *_more(len(there) - _MOST, "tenants")]
    if tenants.runs:
        rest = tenants.run_count - len(tenants.runs[:_MOST])
        lines += ["", *in_columns([_RUN_HEAD, *map(_run, tenants.runs[:_MOST])]), *_more(rest, "runs")]
    return lines


def _tenant(tenant: TenantStatus) -> tuple[str, ...]:
    return (
        tenant.name,
        f"{tenant.runs:,}",
        f"{tenant.queued:,} of {tenant.queue_limit:,}",
        f"{tenant.completions:,} of {tenant.completion_limit:,}",
        f"{tenant.refused:,}",
        f"{tenant.rows_per_s:.1f}",
    )


def _run(run: TenantRunStatus) -> tuple[str, ...]:
    waits = run.waits_for if len(run.waits_for) <= _MAX_WAIT else f"{run.waits_for[: _MAX_WAIT - 1]}…"
    since = f"{run.since_s:.0f} s" if run.since_s < 120 else clock_text(run.since_s)
    return (
        run.name,
        f"{run.rank}",
        f"{run.steps:,}",
        f"{run.queued:,}",
        f"{run.rows_per_s:.1f}",
        "" if run.loss is None else f"{run.loss:.4g}",
        run.place,
        f"{waits} ({since})",
    )


def _more(count: int, what: str) -> list[str]:
    return [f"and {count:,} more {what}"] if count > 0 else []
