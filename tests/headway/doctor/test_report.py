"""The text and the JSON of what was found."""

import json
import os
import socket
from pathlib import Path

from headway.doctor.before import bad, good
from headway.doctor.written import as_json, findings_json, findings_text, table, verdict
from headway.doctor_command import whose
from protocol.status import PeerStatus, QueueStatus
from services.config.models import ProcessConfig, RunConfig
from services.diagnosis.asked import Condition
from services.diagnosis.culprits import diagnose
from services.run_lock import RunLock
from tests.services.diagnosis.statuses import ill, status, well

LEARNER = status(
    "learner",
    version="1.9",
    waits=(("groups: 3 of 8 are there", 3.0, False), ("a generator that serves version 9", 2.0)),
    peers=(PeerStatus(name="the-env-service", kind="env-service", last_heard_s=0.52, state="3 of 8 groups"),),
    queues=(QueueStatus(name="running leases", depth=3), QueueStatus(name="buffered groups", depth=1, limit=8)),
)
PROCESSES = [well(LEARNER), ill("generator", Condition.DEAD), well(status("env-service"))]


def test_the_table_has_a_line_for_each_process_and_each_wait() -> None:
    heading, first, second, dead, env = table(PROCESSES).splitlines()
    assert heading.split() == ["process", "state", "waits", "for", "since", "heard", "version", "queues"]
    assert first.startswith("learner localhost:7300")
    assert first.endswith("1.9      running leases 3, buffered groups 1/8")
    assert second.split() == ["a", "generator", "that", "serves", "version", "9", "2", "s"]
    assert dead.split() == ["generator", "localhost:7310", "dead", "?"]
    assert env.split() == ["env-service", "localhost:7330", "ready", "nobody", "0.5", "s"]


def test_the_verdict_names_culprit_evidence_and_remedy() -> None:
    assert verdict(diagnose(PROCESSES)).splitlines() == [
        "culprit: generator localhost:7310",
        "    dead: does not do well",
        "    evidence: learner localhost:7300 waits for a generator that serves version 9 since 2 s",
        "    what to do: start it: generator --config RUN.toml; headway up starts it again by itself",
    ]


def test_of_a_run_in_which_nobody_is_to_blame_remarks_are_left() -> None:
    healthy = [well(status("learner"))]
    starting = [*healthy, well(status("generator", waits=(("its own start", 5.0),)))]
    assert verdict(diagnose(healthy)) == ""
    assert verdict(diagnose(starting)) == "note: generator localhost:7310 is starting since 5 s\n"


def test_json_holds_the_same() -> None:
    found = json.loads(as_json(procs=PROCESSES, diagnosis=diagnose(PROCESSES)))
    assert (found["mode"], found["healthy"]) == ("running", False)
    assert (found["verdict"]["state"], found["verdict"]["who"]) == ("sick", "generator localhost:7310")
    assert [culprit["who"] for culprit in found["culprits"]] == ["generator localhost:7310"]
    assert [one["condition"] for one in found["processes"]] == ["answers", "dead", "answers"]
    assert found["processes"][0]["status"]["policy_version"] == "1.9"
    assert found["processes"][1]["status"] is None


def test_findings_have_their_remedies_below_them() -> None:
    findings = [good("Python", "3.11.7"), bad("memory", "none left", "buy some")]
    assert findings_text(findings).splitlines() == [
        "ok     Python  3.11.7",
        "error  memory  none left",
        "         what to do: buy some",
    ]
    assert json.loads(findings_json(findings))["healthy"] is False
    assert json.loads(findings_json(findings[:1]))["healthy"] is True


async def test_where_no_learner_answers_it_is_said_whose_the_others_are(tmp_path: Path) -> None:
    config = ProcessConfig(run=RunConfig(name="mine", directory=tmp_path))
    here = well(status("env-service").model_copy(update={"host": socket.gethostname(), "pid": os.getpid()}))
    elsewhere = well(status("reward-service").model_copy(update={"host": "elsewhere", "pid": 1}))

    said = whose({"learner": config}, [here, elsewhere, ill("learner", Condition.DEAD)])
    assert said.startswith(f"No learner has the run in {tmp_path / 'mine'} yet")
    assert f"    env-service: process {os.getpid()} (" in said
    assert "reward-service" not in said
    with await RunLock.held(tmp_path / "mine"):
        assert whose({"learner": config}, [here]) == ""
    assert whose({"learner": config}, [elsewhere]) == ""


async def test_a_learner_of_another_run_is_said_with_its_process(tmp_path: Path) -> None:
    config = ProcessConfig(run=RunConfig(name="mine", directory=tmp_path))
    ours = well(status("learner").model_copy(update={"host": socket.gethostname(), "pid": os.getpid()}))

    said = whose({"learner": config}, [ours])
    assert f"process {os.getpid()} (" in said
    assert f"not of the run in {tmp_path / 'mine'}, which does not run" in said
    with await RunLock.held(tmp_path / "mine"):
        assert whose({"learner": config}, [ours]) == ""
        other = well(status("learner").model_copy(update={"host": socket.gethostname(), "pid": 1}))
        assert f"which is that of process {os.getpid()} on " in whose({"learner": config}, [other])
