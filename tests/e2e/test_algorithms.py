"""Algorithms with real processes: one generator, reward_service and env_service, and a learner for each algorithm."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.long_lived_system import LongLivedSystem
from tests.e2e.processes import until
from tests.e2e.run_files import RunFolder, token_lags

pytestmark = pytest.mark.e2e

MAX_LAG = 2
GROUPS = 4
SHORT = (
    "--groups-per-step", str(GROUPS), "--max-lag", str(MAX_LAG), "--evaluation.tasks", "0",
    "--evaluation.final-tasks", "0",
)  # fmt: skip


def trained(system: LongLivedSystem, name: str, *words: str) -> tuple[RunFolder, str]:
    """The folder of a run that has ended well, and what it said."""
    with system.learner(name, *SHORT, *words) as (learner, run):
        code = learner.wait()
        assert code == 0, learner.text()
        return run, learner.text()


def algorithm_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """The algorithm's own metrics of each step."""
    return [line["means"] for line in run.metrics("step")]


def assert_streamed(run: RunFolder, *, steps: int) -> None:
    """Every step was trained, within the bound on lag, its weights were served, and the last ones were exported."""
    again = {line["step"] for line in run.metrics("replay")}  # a killed learner's last step may be there alone
    assert sorted({*run.steps(), *again}) == list(range(1, steps + 1))
    assert token_lags(run) <= set(range(MAX_LAG + 1))
    assert {int(lag) for line in run.metrics("step") for lag in line["token_lag_counts"]} <= set(range(MAX_LAG + 1))
    published = run.metrics("publish")
    assert published[-1]["version"] == steps
    assert all(line["probe_gap"] < 1e-3 for line in published)
    assert loads(run.path / "model") > 0


def assert_replayed(system: LongLivedSystem, name: str, *, steps: int, weights: str) -> None:
    """Trained again from the initial model, it comes to the same numbers and weights, over all of the run's lives."""
    code, said = system.replayed(name)
    assert code == 0, said
    assert f"replayed steps 1 to {steps}: the numbers of {steps} of them are those of metrics.jsonl" in said
    assert f"equal bit for bit: model/, {weights}\n" in said


def loads(folder: Path) -> int:
    """The number of parameters of the exported model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_ppo_that_is_killed_has_its_policy_and_its_critic_back(system: LongLivedSystem) -> None:
    """The batches after the checkpoint are trained again from the log: to the same numbers only if both are back."""
    words = (
        "--algo", "ppo", "--algo.kl-coefficient", "0.01", "--steps", "20", "--checkpoint.every-steps", "8",
        "--training.critic.optimizer.learning-rate", "1e-3", "--training.critic.warmup-steps", "2",
        "--training.optimizer.learning-rate", "3e-4", "--checkpoint.whole-journal", "true",
    )  # fmt: skip
    with system.learner("ppo", *SHORT, *words) as (learner, run):
        processes = [learner, *system.services.values()]
        until(lambda: len(run.steps()) >= 10, what="steps beyond a checkpoint", during=processes)
        learner.send(signal.SIGKILL)
        learner.wait()
    before = {line["step"]: line for line in run.metrics("step")}
    resumed, said = trained(system, "ppo", *words, "--resume", "true")
    assert "resuming at version" in said
    assert_streamed(resumed, steps=20)
    again = [line for line in resumed.metrics("replay") if line["step"] in before]
    assert again, "steps since the checkpoint"
    for line in again:
        first = before[line["step"]]
        assert line["loss"] == pytest.approx(first["loss"], abs=1e-5)
        assert line["means"] == pytest.approx(first["means"], rel=1e-3, abs=1e-5)
    names = {"value_loss", "value_mean", "return_mean", "reference_kl"}
    assert all(means.keys() >= names for means in algorithm_metrics(resumed)[2:])
    assert any("value_explained_variance" in means for means in algorithm_metrics(resumed)), (
        "returns that are not all alike"
    )
    assert algorithm_metrics(resumed)[0]["value_mean"] == 0, "the critic's head begins with zeros"
    assert algorithm_metrics(resumed)[-1]["value_mean"] != 0
    assert_replayed(system, "ppo", steps=20, weights="checkpoint-00000008, checkpoint-00000016")


def test_online_dpo_trains_the_best_and_the_worst_of_groups_that_have_both(system: LongLivedSystem) -> None:
    """A low learning rate: a policy that is right about nothing any more would have no such groups."""
    words = (
        "--algo", "online_dpo", "--steps", "10", "--training.optimizer.learning-rate", "5e-5",
        "--rollouts.filter-rounds", "50", "--checkpoint.every-steps", "4", "--checkpoint.whole-journal", "true",
    )  # fmt: skip
    with system.learner("online_dpo", *SHORT, *words) as (learner, _):
        until(
            lambda: "checkpoint-00000004" in learner.text(), what="a checkpoint",
            during=[learner, *system.services.values()],
        )  # fmt: skip
        learner.send(signal.SIGKILL)
        learner.wait()
    run, said = trained(system, "online_dpo", *words, "--resume", "true")
    assert_streamed(run, steps=10)
    assert_replayed(system, "online_dpo", steps=10, weights="checkpoint-00000004, checkpoint-00000008")
    assert "clip" not in said, "it has none"
    assert {line["sequences"] for line in run.metrics("step")} == {2 * GROUPS}
    assert {line["uniform_groups_share"] for line in run.metrics("step")} == {0}
    assert all(
        means.keys() >= {"pair_accuracy", "chosen_reward", "rejected_reward"} for means in algorithm_metrics(run)
    )
    assert algorithm_metrics(run)[0]["chosen_reward"] == pytest.approx(0, abs=1e-6), (
        "the policy is its own reference yet"
    )


def test_a_student_is_distilled_on_its_own_samples_from_a_teacher_in_a_folder(
    system: LongLivedSystem, model: Path, untrained_model: Path
) -> None:
    """The teacher knows nothing, so that little has to be sampled to learn from it: to be as unsure as it is."""
    teacher = json.dumps([{"name": "unsure", "path": str(untrained_model)}])
    run, _ = trained(
        system, "opd", "--algo", "opd", "--teachers", teacher, "--model", str(model), "--steps", "50",
        "--training.optimizer.learning-rate", "1e-3",
    )  # fmt: skip
    assert_streamed(run, steps=50)
    divergences = [means["teacher_kl"] for means in algorithm_metrics(run)]
    assert sum(divergences[-10:]) / 10 < 0.75 * divergences[0]


def test_grpo_with_adapters_a_penalty_two_updates_and_every_filter(system: LongLivedSystem) -> None:
    run, _ = trained(
        system, "filters", "--algo", "grpo", "--algo.kl-coefficient", "0.05", "--algo.token-window", "[0.5, 5.0]",
        "--algo.sequence-window", "[0.8, 1.25]", "--algo.truncated", "mask", "--training.updates-per-step", "2",
        "--training.lora.rank", "8", "--rollouts.drop-uniform-groups", "true", "--rollouts.max-mean-reward", "0.9",
        "--steps", "10",
    )  # fmt: skip
    assert_streamed(run, steps=10)
    steps = run.metrics("step")
    assert {line["updates"] for line in steps} == {2}
    assert {line["uniform_groups_share"] for line in steps} == {0}
    assert all(line["trained_tokens"] <= line["sampled_tokens"] for line in steps)
    assert all(line["clip_fraction"] is not None for line in steps)
    assert all(means["reference_kl"] >= 0 for means in algorithm_metrics(run))
    assert algorithm_metrics(run)[-1]["reference_kl"] > 0
