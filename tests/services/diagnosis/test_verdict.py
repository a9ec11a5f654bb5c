"""The verdict in a sentence, and the pace that is told beside it."""

import pytest

from protocol.status import EventStatus, ProgressStatus, Status, UsageStatus
from services.diagnosis.asked import AskedProcess, Condition
from services.diagnosis.culprits import diagnose
from services.diagnosis.pace import standing_s
from services.diagnosis.verdict import RunVerdict, verdict_on
from services.local_processes import LocalProcess
from tests.services.diagnosis.statuses import ill, load, status, target, well


def learner(*, step_age_s: float = 0.5, busy: float = 0.7, done: int = 30, waits: float | None = None) -> Status:
    return status(
        "learner",
        events=(EventStatus(name="step", age_s=step_age_s),),
        progress=ProgressStatus(unit="steps", done=done, total=90, usual_s=0.3),
        load=load(busy=busy),
        waits=() if waits is None else (("groups: 3 of 8 are there", waits, False),),
    )


def judged(*procs: AskedProcess) -> RunVerdict:
    return verdict_on(procs, diagnose(procs))


def test_a_healthy_run_tells_what_its_sides_do() -> None:
    found = judged(well(learner()), well(status("generator", load=load(busy=0.9))))

    assert (found.state, found.text) == (
        "healthy", "Healthy: the learner trains 70% of the time, generators work 90% of theirs",
    )  # fmt: skip


def test_a_healthy_run_on_shared_cores_tells_that_these_are_all_at_work() -> None:
    """The learner trains 97 % of the time beside generators that idle 60 %: what they leave, the trainer has."""
    used = UsageStatus(cores=0.9, usable_cores=2.0, memory_bytes=1)
    learns = learner(busy=0.97).model_copy(update={"usage": used})
    samples = status("generator", load=load(busy=0.4, per_s=900, running=4, limit=64), usage=used)

    assert judged(well(learns), well(samples)).text == (
        "Healthy: the learner trains 97% of the time, generators work 40% of theirs, and the cores that they share are "
        "all at work"
    )
    apart = samples.model_copy(update={"host": "elsewhere"})
    assert judged(well(learns), well(apart)).cause == "training"


def test_a_stopped_generator_is_named_with_the_way_to_let_it_go_on() -> None:
    process = LocalProcess(4711, "generator --config run.toml", is_stopped=True)
    stopped = AskedProcess(target("generator"), Condition.HANGS, complaint="does not answer", process=process)

    found = judged(well(learner()), stopped)

    assert found.state == "sick"
    assert found.text.startswith("generator localhost:7310: hangs: does not answer; it is process 4711 (generator")
    assert "a signal has stopped it" in found.text
    assert found.text.endswith("kill -CONT 4711 lets it go on; kill -KILL 4711 ends it")


def test_a_run_in_which_no_step_ends_is_not_healthy_and_has_no_pace() -> None:
    stands, goes = learner(step_age_s=36.0, waits=36.0), learner(step_age_s=2.0)

    assert (standing_s(stands), standing_s(goes)) == (36.0, None)
    found = judged(well(stands))
    assert (found.state, found.cause) == ("sick", "standstill")
    assert found.sentence == (
        "No step has ended for 36 s, one takes 0.3 s: the learner waits for groups: 3 of 8 are there since 36 s"
    )


def test_a_slow_step_and_one_that_is_the_last_do_not_stand_still() -> None:
    slow = learner(step_age_s=36.0)
    assert slow.progress is not None
    usual = slow.model_copy(update={"progress": slow.progress.model_copy(update={"usual_s": 30.0})})

    assert standing_s(usual) is None
    assert standing_s(learner(step_age_s=100.0, done=90)) is None
    assert judged(well(learner(step_age_s=100.0, done=90))).state == "ending"


def test_what_bounds_a_run_is_told_with_its_remedy_also_while_no_step_ends() -> None:
    others = (
        well(status("generator", load=load(busy=0.9, running=2, limit=64))),
        well(status("env-service", load=load(running=2, limit=2))),
    )

    bounded, stands = judged(well(learner(busy=0.2)), *others), judged(well(learner(busy=0.0, step_age_s=40)), *others)

    assert (bounded.state, bounded.cause) == ("bounded", "capacity")
    assert bounded.text.endswith("; raise env-service.capacity, to 48 say")
    assert (stands.state, stands.cause) == ("sick", "capacity")
    assert stands.text.startswith("No step has ended for 40 s, one takes 0.3 s. Sampling bounds: ")


def test_a_start_is_on_the_way_and_a_dead_process_is_not() -> None:
    starting = well(status("generator", waits=(("its own start", 70.0),)))

    assert judged(well(status("learner")), starting).text == (
        "On the way: generator localhost:7310 is starting since 70 s"
    )
    assert judged(well(status("learner")), starting, ill("env-service", Condition.DEAD)).state == "sick"


def test_processes_that_wait_for_each_other_are_on_the_way_until_the_first_publish() -> None:
    env = well(status("env-service", waits=(("a generator that serves", 40.0),)))
    waits = (("groups: 0 of 8 are there", 20.0, False),)
    young = well(status("learner", waits=waits))
    old = well(status("learner", waits=waits, events=(EventStatus(name="publish", age_s=50.0),)))

    found = judged(young, env)
    assert (found.state, found.remedy) == ("starting", "if it stays so, see the log of the generator, or start one")
    assert found.sentence == (
        "On the way: no generator has been heard of yet; the learner waits for groups: 0 of 8 are there since 20 s"
    )
    assert judged(old, env).state == "sick"
    assert judged(young, env, ill("reward-service", Condition.DEAD)).state == "sick", "nobody waits for a start here"


def test_a_learner_that_has_published_nothing_is_not_healthy_yet() -> None:
    waits = (("its own start", 9.0),)
    others = well(status("generator", load=load())), well(status("env-service", load=load()))

    assert judged(well(status("learner", load=load(busy=0.05))), *others).sentence == (
        "On the way: no weights are published yet"
    )
    assert judged(well(status("learner", waits=waits)), *others).state == "starting"


def test_a_run_that_is_evaluated_before_its_first_step_is_on_the_way() -> None:
    """Nothing is trained yet, and more generators would be advice for a moment."""
    waits = (("the evaluation of version 0", 9.0, False),)
    first = learner(done=0, busy=1.0).model_copy(
        update={"events": (EventStatus(name="publish", age_s=9.0),), "waits": status("learner", waits=waits).waits}
    )
    generator = well(status("generator", load=load(busy=0.8)))

    found = judged(well(first), generator)
    assert (found.state, found.cause) == ("starting", "start")
    assert found.text == (
        "On the way: the learner waits for the evaluation of version 0 since 9 s, before its first step"
    )
    # One beside training holds up nothing.
    later = learner(busy=1.0).model_copy(update={"waits": first.waits})
    assert judged(well(later), generator).state == "healthy"


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (RunVerdict(state="bounded", cause="rewards", sentence="8 of 9 wait"), True),
        (RunVerdict(state="sick", cause="rewards", sentence="9 of 9 wait"), False),
        (RunVerdict(state="bounded", cause="capacity", sentence="9 of 9 wait"), False),
        (None, False),
    ],
)
def test_a_verdict_stays_the_same_while_its_numbers_move(other: RunVerdict | None, alike: bool) -> None:
    assert RunVerdict(state="bounded", cause="rewards", sentence="9 of 9 wait").is_like(other) is alike


def test_a_process_that_another_one_asked_comes_out_as_it_went_in() -> None:
    stopped = AskedProcess(
        target("reward-service"), Condition.HANGS, complaint="c", process=LocalProcess(3, "reward", is_stopped=True)
    )

    assert AskedProcess.told(stopped.to_tell()) == stopped
    assert AskedProcess.told(well(status("reward-service")).to_tell()) == well(status("reward-service"))
