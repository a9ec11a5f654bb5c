"""Diagnosis of a run: the culprit that is found from the processes' answers."""

import pytest

from protocol.status import EventStatus, PeerStatus, QueueStatus
from services.diagnosis.asked import AskedProcess, Condition
from services.diagnosis.culprits import Diagnosis, diagnose, kind_waited_for
from tests.services.diagnosis.statuses import ill, status, well

GROUPS = ("groups: 3 of 8 are there", 500.0, False)


def all_well(**others: AskedProcess) -> list[AskedProcess]:
    procs = {
        "learner": well(status("learner")),
        "generator": well(status("generator")),
        "reward": well(status("reward-service")),
        "env": well(status("env-service")),
    }
    return list({**procs, **others}.values())


def culprits(found: Diagnosis) -> list[str]:
    return [culprit.who for culprit in found.culprits]


@pytest.mark.parametrize(
    ("whom", "kind"),
    [
        ("its own start", None),
        ("its last requests to end", None),
        ("the learner at http://generator-host:7300", "learner"),
        ("weights of the learner", "learner"),
        ("the reward service at http://learner-host:7320 or http://b:7320", "reward-service"),
        ("a generator that serves", "generator"),
        ("a generator that serves version 3", "generator"),
        ("an env_service", "env-service"),
        ("groups: 3 of 8 are there", "env-service"),
        ("lease 12 at env_service host-7, which the next step would make too old", "env-service"),
        ("the host of environment maze (3 groups, one for 40 s): the environment's host: cannot connect", None),
        ("the environment maze (3 groups, one for 40 s): its code is slow or hangs", None),
        ("a miracle", None),
    ],
)
def test_the_text_of_a_wait_names_a_kind_of_process(whom: str, kind: str | None) -> None:
    assert kind_waited_for(whom) == kind


def test_processes_that_answer_and_hardly_wait_are_healthy() -> None:
    learner = well(status("learner", waits=(("groups: 3 of 8 are there", 30.0, False),)))
    env = well(status("env-service", waits=(("a generator that serves", 2.0),)))
    assert diagnose(all_well(learner=learner, env=env)) == Diagnosis()


@pytest.mark.parametrize("condition", [Condition.DEAD, Condition.HANGS, Condition.STRANGE])
def test_whoever_does_not_answer_is_the_culprit_and_those_who_wait_are_the_evidence(condition: Condition) -> None:
    env = well(status("env-service", waits=(("a generator that serves", 40.0),)))
    found = diagnose(all_well(generator=ill("generator", condition), env=env))
    (culprit,) = found.culprits
    assert culprit.who == "generator localhost:7310"
    assert culprit.what.startswith(f"{condition.value}: does not do well")
    assert culprit.because == ("env-service localhost:7330 waits for a generator that serves since 40 s",)


def test_a_problem_that_a_process_knows_of_is_told_in_its_words() -> None:
    learner = well(status("learner", problems=("the disk is full",), waits=(GROUPS,), failures=("cannot write",)))
    (culprit,) = diagnose(all_well(learner=learner)).culprits
    assert (culprit.who, culprit.what) == ("learner localhost:7300", "the disk is full")
    assert culprit.because == ("its newest warning, 1 s ago: cannot write",)


def test_a_chain_of_waits_is_followed_to_its_end() -> None:
    learner = well(status("learner", waits=(GROUPS,)))
    env = well(status("env-service", waits=(("the reward service at http://127.0.0.1:7320", 480.0),)))
    found = diagnose(all_well(learner=learner, env=env))
    assert culprits(found) == ["reward-service localhost:7320"]
    assert found.by_waiting
    assert found.culprits[0].because == (
        "learner localhost:7300 waits for groups: 3 of 8 are there since 500 s",
        "env-service localhost:7330 waits for the reward service at http://127.0.0.1:7320 since 480 s",
    )


def test_a_host_that_is_away_is_the_culprit_and_no_restart_is_advised() -> None:
    learner = well(status("learner", waits=(GROUPS,)))
    whom = "the host of environment maze (3 groups, one for 480 s): cannot connect to http://b:7340"
    env = well(status("env-service", waits=((whom, 480.0, False),)))
    (culprit,) = diagnose(all_well(learner=learner, env=env)).culprits
    assert culprit.who == "the host of environment maze"
    assert "start it where it runs" in culprit.remedy
    assert "http://b:7340" in culprit.because[-1]


def test_leases_in_progress_lead_to_the_generator_that_has_their_requests() -> None:
    learner = well(status("learner", waits=(GROUPS,)))
    generator = well(status("generator", queues=(QueueStatus(name="requests", depth=4),)))
    procs = all_well(learner=learner, generator=generator)
    assert culprits(diagnose(procs)) == ["generator localhost:7310"]
    assert diagnose(procs, at_work=frozenset({"generator localhost:7310"})).culprits == ()


def test_waits_in_a_circle_are_told_with_the_newest_failure() -> None:
    learner = well(
        status("learner", waits=(("a generator that serves version 0", 90.0),), failures=("broadcast broke",))
    )
    generator = well(status("generator", waits=(("weights of the learner", 90.0),)))
    found = diagnose(all_well(learner=learner, generator=generator)).culprits
    assert [culprit.what for culprit in found] == ["waits, in the end, for itself"] * 2
    assert found[0].because[-1] == "its newest warning, 1 s ago: broadcast broke"


def test_a_wait_for_a_kind_that_is_not_there_names_the_kind() -> None:
    learner = well(status("learner", waits=(("an env_service", 20.0),)))
    (culprit,) = diagnose([learner, well(status("generator"))]).culprits
    assert (culprit.who, culprit.what) == ("env-service", "no env-service is known to the doctor")


def test_a_start_is_a_remark_until_it_takes_too_long() -> None:
    env = well(status("env-service", waits=(("a generator that serves", 60.0),)))
    quick = well(status("generator", waits=(("its own start", 70.0),)))
    found = diagnose(all_well(env=env, generator=quick))
    assert (found.culprits, found.remarks) == ((), ("generator localhost:7310 is starting since 70 s",))
    slow = well(status("generator", waits=(("its own start", 400.0),)))
    assert culprits(diagnose(all_well(generator=slow))) == ["generator localhost:7310"]


def test_the_last_of_a_kind_that_falls_silent_is_a_culprit_and_others_are_not() -> None:
    silent = PeerStatus(name="e-1", kind="env-service", last_heard_s=40.0, state="3 of 8 groups")
    heard = PeerStatus(name="e-2", kind="env-service", last_heard_s=1.0, state="3 of 8 groups")
    assert culprits(diagnose(all_well(learner=well(status("learner", peers=(silent,)))))) == ["e-1"]
    found = diagnose(all_well(learner=well(status("learner", peers=(silent, heard)))))
    assert found.culprits == ()
    assert "nothing of the env-service e-1 since 40 s" in found.remarks[0]


def test_a_generator_that_stays_behind_is_named_with_both_versions() -> None:
    behind = PeerStatus(name="g-1", kind="generator", last_heard_s=1.0, serving_version="1.5", state="behind")
    publish = EventStatus(name="publish", age_s=90.0)
    learner = status("learner", version="1.9", peers=(behind,), events=(publish,))
    (culprit,) = diagnose(all_well(learner=well(learner))).culprits
    assert culprit.what == "serves 1.5, the learner holds 1.9, and the last publish was 90 s ago"
    recent = learner.model_copy(update={"events": (EventStatus(name="publish", age_s=2.0),)})
    assert diagnose(all_well(learner=well(recent))).culprits == ()


def test_a_generator_without_a_version_is_named_if_it_is_to_join_and_not_if_it_is_a_teacher() -> None:
    publish = EventStatus(name="publish", age_s=90.0)
    for state, found in (("joining", 1), ("answers", 0)):
        peer = PeerStatus(name="g-1", kind="generator", last_heard_s=1.0, state=state)
        learner = status("learner", version="1.9", peers=(peer,), events=(publish,))
        assert len(diagnose(all_well(learner=well(learner))).culprits) == found, state


def test_what_is_worth_knowing_is_a_remark_and_no_fault() -> None:
    noted = status("learner").model_copy(update={"notes": ("the guard bounds the lag by 1 instead of 4",)})
    found = diagnose(all_well(learner=well(noted)))
    assert found.culprits == ()
    assert "the guard bounds the lag by 1" in found.remarks[0]


def test_a_learner_that_trains_forever_is_named() -> None:
    learner = well(status("learner", events=(EventStatus(name="step", age_s=5000.0),)))
    assert culprits(diagnose(all_well(learner=learner))) == ["learner localhost:7300"]


def test_another_protocol_version_is_a_culprit() -> None:
    procs = all_well(generator=well(status("generator", protocol_version=2)))
    assert culprits(diagnose(procs)) == [f"{p.name}" for p in procs if p.kind != "generator"]
