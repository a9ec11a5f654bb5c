"""The tables of tenants and runs in `headway status` and `headway doctor`."""

from headway.doctor_command import _tenants_of
from headway.status_command import status_json, status_text
from headway.tenants_table import tenant_lines
from tests.services.diagnosis.served_tenants import run, standing, tenant
from tests.services.diagnosis.statuses import status, well

BUSY = run(
    "alice/1f3a90c2",
    queued=2,
    steps=1200,
    loss=0.51234,
    rows_per_s=8.0,
    waits_for="its turn, behind bob",
    since_s=130.0,
)


def test_a_row_for_each_tenant_with_something_and_for_each_run() -> None:
    lines = tenant_lines(standing(tenant("alice", queued=2, rows_per_s=8.0), tenant("idle", runs=0), runs=(BUSY,)))

    assert lines[0] == "tiny/model: 2 tenants, 1 clients there, 1 runs, 1 of them in memory"
    assert [line.split() for line in lines[2:4]] == [
        ["tenant", "runs", "operations", "wait", "completions", "refused", "in", "a", "minute", "rows/s"],
        ["alice", "1", "2", "of", "100", "0", "of", "100", "0", "8.0"],
    ]
    assert " ".join(lines[-1].split()) == "alice/1f3a90c2 8 1,200 2 8.0 0.5123 memory its turn, behind bob (2m10s)"
    assert not any("idle" in line for line in lines)


def test_hundreds_of_tenants_are_ten_rows_and_a_count() -> None:
    many = [tenant(f"t{number}", queued=1) for number in range(60)]
    lines = tenant_lines(standing(*many, runs=tuple(run(f"t{number}/1") for number in range(60)), run_count=500))

    assert "and 50 more tenants" in lines
    assert lines[-1] == "and 490 more runs"
    assert len(lines) == 1 + 2 * (1 + 1 + 10 + 1)


def test_status_and_doctor_show_them_below_the_processes() -> None:
    learner = status("learner").model_copy(update={"tenants": standing(tenant("alice"), runs=(BUSY,))})
    procs = [well(learner), well(status("generator"))]

    text = status_text(procs, {})
    assert text.startswith("Healthy: 1 run of 1 tenant is at work\n")
    assert "alice/1f3a90c2" in text
    assert any("alice/1f3a90c2" in line for line in _tenants_of(procs))
    assert '"sentence": "Healthy: 1 run of 1 tenant is at work"' in status_json(procs, {})
    assert "tenants" not in status("learner").model_dump(), "nothing of it in a run's status"
