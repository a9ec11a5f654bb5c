"""Makes the dashboards from the table below: `python deploy/grafana/make_dashboards.py`, and commit what it writes.

A panel is a title, Grafana's name of the unit, and (expression, legend) of each curve; numbers of the newest step are
called as on the run's page.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.reports.history import CURVES, words_of

FOLDER = Path(__file__).parent / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3

Panel = tuple[str, str, Sequence[tuple[str, str]]]

L, G, R, E = (f"headway_{name}_" for name in ("learner", "generator", "reward_service", "env_service"))
_MEAN_REWARD = (
    f"(sum by (environment, verifier) (rate({E}verifier_positive_reward_total[5m]))"
    f" - sum by (environment, verifier) (rate({E}verifier_negative_reward_total[5m])))"
    f" / sum by (environment, verifier) (rate({E}verifier_reward_count[5m]))"
)


def quantiles(name: str, by: str = "") -> list[tuple[str, str]]:
    """The median and the 95th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return [
        (f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket[5m])))", f"{legend}{says}")
        for q, says in ((0.5, "median"), (0.95, "95 %"))
    ]


def newest(*names: str) -> list[tuple[str, str]]:
    """Numbers of the newest step, by their names in metrics.jsonl."""
    known = {curve.name: curve for curve in CURVES if curve.gauge}
    return [(f"{L}{known[name].gauge}", words_of(known[name])) for name in names]


def mean(name: str, window: str = "5m") -> str:
    """The mean of a histogram's values."""
    return f"rate({name}_sum[{window}]) / rate({name}_count[{window}])"


RUN: Sequence[Panel] = (
    ("Mean reward", "none", [
        *newest("reward_mean"), (f"avg_over_time({L}reward_mean[5m])", "5 minutes")]),
    ("Steps per minute", "none", [(f"60 * rate({L}steps_total[2m])", "steps"),
                                  (f"60 * rate({L}replayed_steps_total[2m])", "replayed")]),
    ("Tokens per second", "none", [
        (f"sum by (instance) (rate({G}generated_tokens_total[1m]))", "sampled by {{instance}}"),
        (f"sum(rate({L}trained_tokens_total[1m]))", "trained")]),
    ("Lag of trained trajectories", "none", [
        *quantiles(f"{L}trained_trajectory_lag_versions"), *newest("lag_max"),
        (f"{L}lag_bound_versions", "the bound")]),
    ("Where a step's time goes (share)", "percentunit", [
        (f"rate({L}train_seconds_total[2m])", "training"), (f"rate({L}batch_wait_seconds_total[2m])", "waiting"),
        (f"rate({L}copy_seconds_total[2m])", "copying weights")]),
    ("Who is waited for (share of the time)", "percentunit", [
        (f"sum by (whom) (rate({L}waited_seconds_total[2m]))", "{{whom}}")]),
    ("Step", "s", quantiles(f"{L}step_seconds")),
    ("Mismatch and drift", "none", newest("mismatch_kl", "behavior_kl")),
    ("Importance ratios and entropy", "none", newest("importance_ratio_max", "effective_sample_share", "entropy")),
    ("Leases", "none", [(f"{L}leases", "{{state}}")]),
    ("Left out per minute", "none", [
        (f"60 * sum by (reason) (rate({L}left_out_groups_total[5m]))", "{{reason}}"),
        (f'60 * rate({L}ended_leases_total{{state="dead_lettered"}}[5m])', "dead letters"),
        (f"60 * rate({L}skipped_updates_total[5m])", "skipped updates")]),
    ("Disk and journal", "bytes", [
        (f"{L}disk_free_bytes", "free on the run's disk"), (f"{L}journal_bytes", "journal")]),
    ("Journal's syncs", "s", quantiles(f"{L}journal_sync_seconds")),
    ("What was not kept, per minute", "none", [
        (f"60 * sum by (what) (rate({L}failed_writes_total[5m]))", "not written: {{what}}"),
        (f"60 * sum by (tracker) (rate({L}tracker_drops_total[5m]))", "dropped by {{tracker}}"),
        (f"60 * rate({L}samples_left_out_total[5m])", "trajectories not kept for the page")]),
    ("Guard and curriculum", "none", [
        (f"60 * sum by (change) (rate({L}guard_changes_total[10m]))", "guard: {{change}} per minute"),
        (f"{L}curriculum_level", "level")]),
)  # fmt: skip

FLEET: Sequence[Panel] = (
    ("Generators", "none", [(f"{L}generators", "{{state}}"), (f"{L}env_services", "env-services")]),
    ("Policy version", "none", [(f"{L}policy_version", "learner"), (f"{G}policy_version", "{{instance}}")]),
    ("Requests at generators", "none", [
        (f"{G}running_requests", "running at {{instance}}"), (f"{G}waiting_requests", "waiting at {{instance}}")]),
    ("Tokens per second of each generator", "none", [(f"rate({G}generated_tokens_total[1m])", "{{instance}}")]),
    ("Idle (share of the time)", "percentunit", [(f"rate({G}idle_seconds_total[2m])", "{{instance}}")]),
    ("Prefix cache: share of prompt tokens it held", "percentunit", [
        (f"rate({G}prefix_cache_hits_total[5m]) / rate({G}prefix_cache_queries_total[5m])", "{{instance}}")]),
    ("Publishes", "s", [
        (mean(f"{L}publish_seconds"), "all of it"), (mean(f"{L}publish_prepare_seconds"), "staging"),
        (mean(f"{L}publish_commit_seconds"), "commit"), (mean(f"{L}publish_pause_seconds"), "longest pause")]),
    ("Commits at generators", "s", [
        (mean(f"{G}commit_pause_seconds"), "pause at {{instance}}"),
        (mean(f"{G}commit_load_seconds"), "load at {{instance}}")]),
    ("Weight syncs and expulsions per hour", "none", [
        (f"3600 * sum by (step) (rate({G}sync_failures_total[10m]))", "failed at {{step}}"),
        (f"3600 * rate({L}expelled_generators_total[10m])", "expelled"),
        (f"3600 * rate({L}joins_total[10m])", "caught up by a download")]),
    ("Groups in progress", "none", [
        (f"{E}running_leases", "at {{instance}}"), (f"{E}unacknowledged_outcomes", "not confirmed at {{instance}}")]),
    ("Rollouts", "s", quantiles(f"{E}rollout_seconds")),
    ("Failures per minute", "none", [
        (f"60 * sum by (kind) (rate({E}failed_leases_total[5m]))", "leases: {{kind}}"),
        (f"60 * sum by (generator_id) (rate({E}generator_failures_total[5m]))", "requests to {{generator_id}}")]),
    ("Memory", "bytes", [("process_resident_memory_bytes", "{{job}} {{instance}}")]),
    ("CPU (cores)", "none", [("rate(process_cpu_seconds_total[2m])", "{{job}} {{instance}}")]),
    ("Open files", "none", [("process_open_fds", "{{job}} {{instance}}")]),
)  # fmt: skip


REWARDS: Sequence[Panel] = (
    ("Mean reward by verifier", "none", [(_MEAN_REWARD, "{{environment}}: {{verifier}}")]),
    ("Rewards: a tenth is below, half is below", "none", [
        (f"histogram_quantile({q}, sum by (le, verifier) (rate({E}verifier_reward_bucket[10m])))",
         f"{{{{verifier}}}} {says}") for q, says in ((0.1, "10 %"), (0.5, "median"))]),
    ("Time to score, 95 %", "s", quantiles(f"{R}score_seconds", "verifier")[1:]),
    ("Items per second", "none", [
        (f"sum by (verifier) (rate({R}score_seconds_count[1m]))", "{{verifier}}"),
        (f"sum by (verifier) (rate({R}cached_items_total[1m]))", "{{verifier}}, known before")]),
    ("Items that wait", "none", [
        (f"sum by (verifier) ({R}waiting_items)", "{{verifier}}"), (f"sum({R}pending_items)", "all")]),
    ("Errors per minute", "none", [
        (f"60 * sum by (verifier, kind) (rate({R}errors_total[5m]))", "{{verifier}}: {{kind}}"),
        (f"60 * sum(rate({E}unscored_trajectories_total[5m]))", "trajectories without a reward")]),
    ("Requests of env-services that fail, per minute", "none", [
        (f"60 * sum by (endpoint) (rate({E}reward_service_failures_total[5m]))", "failed: {{endpoint}}"),
        (f"60 * sum by (endpoint) (rate({E}reward_service_busy_total[5m]))", "busy: {{endpoint}}")]),
    ("Judges and services asked", "none", [
        (f"60 * sum by (verifier, outcome) (rate({R}asked_requests_total[5m]))", "{{verifier}}: {{outcome}}, a minute"),
        (f"sum by (verifier) (rate({R}asked_tokens_total[5m]))", "{{verifier}}: tokens a second")]),
    ("Scoring of a group, seen by env-services", "s", quantiles(f"{E}scoring_seconds")),
)  # fmt: skip

SANDBOX: Sequence[Panel] = (
    ("Workers killed or lost, per minute", "none", [
        (f"60 * sum by (verifier) (rate({R}killed_workers_total[5m]))", "{{verifier}}")]),
    ("Time to score, by verifier", "s", quantiles(f"{R}score_seconds", "verifier")),
    ("Items without a reward, per minute", "none", [
        (f"60 * sum by (verifier, kind) (rate({R}errors_total[5m]))", "{{verifier}}: {{kind}}")]),
    ("Items that wait", "none", [(f"sum by (verifier) ({R}waiting_items)", "{{verifier}}")]),
    ("Turned away, per minute", "none", [
        (f"60 * sum by (reason) (rate({R}refused_requests_total[5m]))", "{{reason}}")]),
    ("Environments' faults, per minute", "none", [
        (f"60 * sum by (environment, kind) (rate({E}environment_faults_total[5m]))", "{{environment}}: {{kind}}")]),
    ("Memory of the services", "bytes", [
        ('process_resident_memory_bytes{job=~"reward-service|env-service"}', "{{job}} {{instance}}")]),
    ("CPU of the services (cores)", "none", [
        ('rate(process_cpu_seconds_total{job=~"reward-service|env-service"}[2m])', "{{job}} {{instance}}")]),
    ("Open files of the services", "none", [
        ('process_open_fds{job=~"reward-service|env-service"}', "{{job}} {{instance}}")]),
)  # fmt: skip

DASHBOARDS: Mapping[str, tuple[str, Sequence[Panel]]] = {
    "headway": ("Headway: the run", RUN),
    "headway-fleet": ("Headway: the fleet", FLEET),
    "headway-rewards": ("Headway: rewards", REWARDS),
    "headway-sandbox": ("Headway: verifiers' processes and sandboxes", SANDBOX),
}


def dashboard(uid: str, title: str, panels: Sequence[Panel]) -> dict[str, object]:
    """As Grafana takes it."""
    return {
        "uid": uid,
        "title": title,
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "tags": ["headway"],
        "links": [{"title": "Headway", "type": "dashboards", "tags": ["headway"], "asDropdown": True}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, object]:
    title, unit, curves = panel
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(curves)
        ],
    }


def texts() -> dict[str, str]:
    """By file name, what is to be committed."""
    return {
        f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1, ensure_ascii=False) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
