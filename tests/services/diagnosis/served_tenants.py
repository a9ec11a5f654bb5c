"""Standings of servers of training loops, as tests need them."""

from typing import Any

from protocol.tenants import CallAtWork, TenantRunStatus, TenantsStatus, TenantStatus


def tenant(name: str, **more: Any) -> TenantStatus:
    """A tenant with nothing under way, and bounds of a hundred."""
    usual = {
        "runs": 1, "queued": 0, "queue_limit": 100, "queued_bytes": 0, "bytes_limit": 1 << 20, "completions": 0,
        "completion_limit": 100, "refused": 0, "waits_s": 0.0, "rows_per_s": 0.0,
    }  # fmt: skip
    return TenantStatus(name=name, **{**usual, **more})


def run(name: str, **more: Any) -> TenantRunStatus:
    """A run that waits for its client; the tenant is the part of its name before the slash."""
    usual = {
        "rank": 8, "steps": 0, "queued": 0, "completions": 0, "waits_for": "its client", "since_s": 5.0,
        "place": "memory", "rows_per_s": 0.0, "tokens_per_s": 0.0,
    }  # fmt: skip
    return TenantRunStatus(name=name, tenant=name.partition("/")[0], **{**usual, **more})


def call(tenant: str, **more: Any) -> CallAtWork:
    """A call of 64 rows in hand, alone."""
    usual = {
        "run": f"{tenant}/1", "kind": "forward_backward", "rows": 64, "tokens": 65536, "sharing": 1, "since_s": 42.0,
    }  # fmt: skip
    return CallAtWork(tenant=tenant, **{**usual, **more})


def standing(
    *tenants: TenantStatus, runs: tuple[TenantRunStatus, ...] = (), clients: int = 1, **more: Any
) -> TenantsStatus:
    """Its counts are those of the tenants and runs that are given."""
    counts = {
        "tenant_count": len(tenants), "run_count": len(runs), "resident": len(runs), "generators": 1,
        "queued": sum(each.queued for each in tenants), "completions": sum(each.completions for each in tenants),
        "tokens_per_s": sum(each.tokens_per_s for each in runs),
    }  # fmt: skip
    return TenantsStatus(base_model="tiny/model", tenants=tenants, runs=runs, clients=clients, **{**counts, **more})
