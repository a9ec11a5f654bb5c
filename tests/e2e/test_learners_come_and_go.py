"""A generator, an env_service, and several learners: killed and resumed, with two ranks, synchronous."""

import json
import os
import re
import signal

import httpx
import pytest

from tests.e2e.long_lived_system import LongLivedSystem, generate
from tests.e2e.processes import marked, script, until
from tests.e2e.run_files import GROUPS_PER_STEP, RunFolder, token_lags
from tests.process_ends import all_end, children_of

pytestmark = pytest.mark.e2e


def test_a_killed_learner_resumes_and_no_step_is_missing(system: LongLivedSystem) -> None:
    words = ("--steps", "40", "--checkpoint.every-steps", "7", "--max-lag", "2", "--checkpoint.whole-journal", "true")
    with system.learner("killed", *words) as (learner, run):
        until(lambda: len(run.steps()) >= 18, what="18 steps", during=[learner, *system.services.values()])
        learner.send(signal.SIGKILL)
        learner.wait()
    before = run.steps()
    with system.learner("killed", *words, "--resume", "true") as (learner, _):
        assert learner.wait() == 0, learner.text()
        said = learner.text()
    assert all(service.alive for service in system.services.values())
    checkpoint = int(re.findall(r"resuming at version (\d+)", said)[0])
    assert checkpoint in (14, 21)
    replayed = [int(number) for number in re.findall(r"replaying the batch of step (\d+)", said)]
    assert replayed == list(range(checkpoint + 1, checkpoint + 1 + len(replayed)))
    assert [line["step"] for line in run.metrics("replay")] == replayed
    last_before = checkpoint + len(replayed)
    assert run.steps() == before + list(range(last_before + 1, 41))
    assert before == list(range(1, len(before) + 1))
    assert last_before - len(before) in (0, 1), "a batch may have been logged and its step not yet"
    assert {lag for line in run.metrics("step") for lag in line["token_lag_counts"]} <= {"0", "1", "2"}
    stamps = {v for sample in run.lines("samples.jsonl") for one in sample["completions"] for v in one["versions"]}
    assert {stamp.partition(".")[0] for stamp in stamps} == {"1", "2"}
    assert all(line["probe_gap"] < 1e-3 for line in run.metrics("publish"))

    code, said = system.replayed("killed")
    assert code == 0, said
    assert "replayed steps 1 to 40: the numbers of 40 of them are those of metrics.jsonl, digit for digit" in said
    assert "equal bit for bit: model/, checkpoint-00000028, checkpoint-00000035\n" in said
    written = run.path / "metrics.jsonl"
    written.write_text(
        re.sub(r'("step": 31,.*"grad_norm": )|("grad_norm": )(?=.*"step": 31,)', r"\g<0>1", written.read_text())
    )
    code, said = system.replayed("killed")
    assert code == 1
    assert "step 31 is the first that differs: its grad_norm was 1" in said


def test_a_guard_that_has_lowered_the_bound_still_holds_it_after_a_resume(system: LongLivedSystem) -> None:
    """Any lag makes a larger KL than this limit, engine numerics in float32 do not: so the bound falls to 0."""
    words = ("--steps", "60", "--checkpoint.every-steps", "7", "--max-lag", "2", "--evaluation.tasks", "0")
    guard = ("--guard.max-behavior-kl", "1e-9", "--guard.patience", "1", "--guard.recovery-steps", "1000")
    with system.learner("guarded", *words, *guard) as (learner, run):
        until(
            lambda: bool(lowered(run)) and max(run.steps()) > lowered(run)[0] + 8,
            what="steps under a bound of 0",
            during=[learner, *system.services.values()],
        )
        learner.send(signal.SIGKILL)
        learner.wait()
    assert "guard: step" in learner.text()
    assert max(run.steps()) < 60
    with system.learner("guarded", *words, *guard, "--resume", "true") as (learner, _):
        assert learner.wait() == 0, learner.text()
    assert "the guard goes on with a lag bound of 0, the configured one is 2" in learner.text()
    steps = {line["step"]: line for line in run.metrics("step")}
    assert all(line["lag_max"] <= line["lag_bound"] for line in steps.values())
    assert all(line["lag_bound"] == 0 for step, line in steps.items() if step > lowered(run)[0])


def lowered(run: RunFolder) -> list[int]:
    """The steps after which the guard lowered the bound to 0."""
    return [line["step"] for line in run.metrics("guard") if line["after"] == 0]


def test_two_ranks_with_sharded_gradients_train_as_one(system: LongLivedSystem) -> None:
    words = ("--steps", "8", "--ranks", "2", "--training.zero-stage", "2", "--evaluation.final-tasks", "0")
    with system.learner("ranks", *words, "--evaluation.tasks", "0") as (learner, run):
        assert learner.wait() == 0, learner.text()
    assert run.steps() == list(range(1, 9))
    assert run.summary()["groups_trained"] == 8 * GROUPS_PER_STEP
    assert all(line["probe_gap"] < 1e-3 for line in run.metrics("publish"))
    mismatches = [line["mismatch_kl"] for line in run.metrics("step") if line["mismatch_kl"] is not None]
    assert max(map(abs, mismatches)) < 1e-5


SHORT = ("--evaluation.tasks", "0", "--evaluation.final-tasks", "0", "--checkpoint.every-steps", "5")


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "rank 1 was killed by SIGKILL"), (signal.SIGSTOP, "rank 1 is silent for 2 s")]
)
def test_a_learner_that_loses_a_rank_starts_again_by_itself_and_goes_on(
    system: LongLivedSystem, number: signal.Signals, said: str
) -> None:
    words = ("--steps", "16", "--ranks", "2", "--training.rank-silence-s", "2", *SHORT)
    name = f"lost-by-{number.name}"
    with system.learner(name, *words) as (learner, run):
        until(lambda: len(run.steps()) >= 7, what="7 steps", during=[learner, *system.services.values()])
        (lost,) = children_of(learner.pid)
        os.kill(lost, number)
        assert all_end([lost])
        assert learner.wait() == 0, learner.text()
    assert said in learner.text()
    assert "starting again with --resume (1 of 5)" in learner.text()
    assert sorted({*run.steps(), *(line["step"] for line in run.metrics("replay"))}) == list(range(1, 17))
    assert not [words for words in marked(system.launch.mark).values() if "learner" in words]


def test_a_learner_that_may_not_start_again_by_itself_asks_for_it(system: LongLivedSystem) -> None:
    words = ("--steps", "16", "--ranks", "2", "--rank-restarts", "0", *SHORT)
    with system.learner("asks", *words) as (learner, run):
        until(lambda: len(run.steps()) >= 2, what="2 steps", during=[learner, *system.services.values()])
        (lost,) = children_of(learner.pid)
        os.kill(lost, signal.SIGKILL)
        assert learner.wait() == 75, learner.text()
    assert "stopped by an error: RankLost: rank 1 was killed by SIGKILL" in learner.text()
    assert not [words for words in marked(system.launch.mark).values() if "learner" in words]


def test_a_run_under_torchrun_ends_and_a_lost_rank_is_started_again(system: LongLivedSystem) -> None:
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2")
    command = ("--no-python", script("learner"), "--config", str(system.run_file.path), "--run.name", "torchrun")
    torchrun = system.launch("torchrun", *words, *command, "--steps", "12", *SHORT)
    run = system.run_file.run("torchrun")
    until(lambda: len(run.steps()) >= 7, what="7 steps", during=[torchrun, *system.services.values()])
    os.kill(children_of(torchrun.pid)[1], signal.SIGKILL)
    assert torchrun.wait() == 0, torchrun.text()
    assert sorted({*run.steps(), *(line["step"] for line in run.metrics("replay"))}) == list(range(1, 13))
    assert len(run.metrics("resume")) == 1
    assert run.summary()["groups_trained"] == 12 * GROUPS_PER_STEP


def test_max_lag_0_is_synchronous(system: LongLivedSystem) -> None:
    with system.learner("synchronous", "--steps", "6", "--max-lag", "0", "--evaluation.tasks", "0") as (learner, run):
        assert learner.wait() == 0, learner.text()
    assert token_lags(run) == {0}
    assert run.summary()["lag_histogram"].keys() == {"0"}
    assert run.summary()["max_lag_seen"] == 0


def test_a_generator_that_is_stopped_lets_running_requests_end_and_takes_no_new_ones(system: LongLivedSystem) -> None:
    """It ends the generator, which the next learner of this system starts anew."""
    generator = system.services["generator"]
    body = generate(n=100, purpose="evaluate", sampling={"max_tokens": 50, "min_tokens": 50})
    url, headers = f"{system.run_file.url('generator')}/v1/generate", {"Authorization": f"Bearer {system.token}"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        generator.send(signal.SIGTERM)
        until(lambda: "stopping" in generator.text(), what="the signal to arrive")
        refused = system.call("generator", "/v1/generate", json=generate())
        parts = [json.loads(line) for line in (first, *lines)]
    assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "draining")
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"] * 100
    assert generator.wait() == 0
    assert "Traceback" not in generator.text()
