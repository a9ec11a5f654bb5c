"""A self-check of a model: all that are right pass it, each planted mistake fails it, and it leaves nothing behind."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import learner.training.attention as attention
from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.opd import OpdConfig
from learner.algorithms.presets.ppo import PpoConfig
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.algorithms.presets.rm import RmConfig
from learner.training.attention import ScoreRules
from learner.training.config import TrainingConfig
from learner.training.logits import LogitRules
from learner.training.logprobs import Chunking
from learner.training.models import open_models
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from learner.training.score_model import ScoreModel, load_score_model
from learner.training.self_check import PackingGap, check_policy, check_scores, probe
from tests.learner.training.tiny_model import write_tiny_llama
from tests.learner.training.tiny_models import ARCHITECTURES, WINDOW, write_tiny_model

SETTINGS = LogprobSettings(temperature=0.7, chunking=Chunking(tokens=16, vocabulary=13), with_entropy=True)
RIGHT = [name for name in ARCHITECTURES if name != "phimoe"]


pytestmark = pytest.mark.usefixtures("commands")


def policy_of(folder: Path, *, dtype: torch.dtype = torch.float32) -> PolicyModel:
    return PolicyModel(load_causal_lm(folder, dtype=dtype), settings=SETTINGS)


def checked(policy: PolicyModel) -> PackingGap:
    return check_policy(policy, Path("a-model"), compute=lambda microbatch: policy(microbatch)[0])


def scores_checked(scores: ScoreModel) -> PackingGap:
    return check_scores(scores, Path("a-model"), compute=lambda microbatch: scores(microbatch)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_every_architecture_that_is_right_passes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    gap = checked(policy_of(write_tiny_model(name, tmp_path), dtype=dtype))
    print(f"{name} {dtype}: {gap.found:.1e} of {gap.allowed}")
    assert gap.passes


_RIGHT_KERNEL, _RIGHT_ENDS = attention.kernel_with, attention.kernel_seeing


def _one_token_more(rules: ScoreRules, query: torch.Tensor) -> attention.Kernel:
    return _RIGHT_KERNEL(ScoreRules(window=None if rules.window is None else rules.window + 1), query)


def _one_key_less(rules: ScoreRules, query: torch.Tensor, places: torch.Tensor, *, keys: int) -> attention.Kernel:
    return _RIGHT_ENDS(rules, query, (places - 1).clamp(min=0), keys=keys)


def _ends_without_rules(rules: ScoreRules, query: torch.Tensor, places: torch.Tensor, *, keys: int) -> attention.Kernel:
    return _RIGHT_ENDS(ScoreRules(), query, places, keys=keys)


MISTAKES: dict[str, tuple[str, str, object]] = {
    "a lost window": ("mistral", "_window_of", lambda module, given: None),
    "a lost softcap and lost sinks": ("gpt-oss", "kernel_with", lambda rules, query: attention.kernel_for(query)),
    "a window of one token more": (
        "gemma3",
        "kernel_with",
        _one_token_more,
    ),
    "a branch that does not see its newest token": ("qwen3", "kernel_seeing", _one_key_less),
    "a branch without a window": ("gemma3", "kernel_seeing", _ends_without_rules),
    "a branch without sinks": ("gpt-oss", "kernel_seeing", _ends_without_rules),
}


@pytest.mark.parametrize(("name", "function", "wrong"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mistake_in_packed_attention_is_found(
    name: str, function: str, wrong: object, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(write_tiny_model(name, tmp_path), dtype=dtype)
    monkeypatch.setattr(attention, function, wrong)
    with pytest.raises(ValueError, match=r"a-model: .* computes several sequences together .* Name another model"):
        checked(policy)


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "granite hybrid"])
def test_layers_that_mix_the_sequences_of_a_row_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason in ("why_not_packed", "why_modules_are_not_packed"):
        monkeypatch.setattr(f"learner.training.policy.{reason}", lambda _: None)
    with pytest.raises(ValueError, match="computes several sequences together"):
        checked(policy_of(write_tiny_model(name, tmp_path)))


def test_lost_rules_of_logits_are_found(tmp_path: Path) -> None:
    policy = policy_of(write_tiny_model("granite", tmp_path))
    policy._head().rules = LogitRules()
    with pytest.raises(ValueError, match="a self-check found"):
        checked(policy)


def test_a_critic_whose_head_is_zero_is_checked_by_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = load_score_model(write_tiny_model("mistral", tmp_path), dtype=torch.float32)
    assert not scores.head.weight.any()
    assert scores_checked(scores).passes
    monkeypatch.setattr(attention, "_window_of", lambda module, given: None)
    with pytest.raises(ValueError, match="computes several sequences together"):
        scores_checked(scores)
    assert not scores.probed


@pytest.mark.parametrize("preset", ["grpo", "rm", "ppo", "teacher"])
def test_each_model_of_a_run_is_checked_as_it_is_loaded(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, other = write_tiny_llama(tmp_path / "policy", tied=True), write_tiny_model("mistral", tmp_path / "other")
    critic = {"critic": {"model": other}} if preset == "ppo" else {}
    algorithm: AlgorithmConfig = {
        "grpo": GrpoConfig(),
        "rm": RmConfig(),
        "ppo": PpoConfig(),
        "teacher": OpdConfig(),
    }[preset]
    opened = partial(
        open_models,
        other if preset in ("grpo", "rm") else policy,
        config=TrainingConfig.model_validate(critic),
        preset=algorithm.preset(),
        teachers=[other] if preset == "teacher" else [],
        device=torch.device("cpu"),
    )
    opened().close()
    monkeypatch.setattr(attention, "_window_of", lambda module, given: None)
    with pytest.raises(ValueError, match=rf"{other}: Mistral.* computes several sequences together"):
        opened()


def test_numbers_that_are_none_fail() -> None:
    assert not PackingGap(found=float("nan"), allowed=1.0).passes


def test_the_check_leaves_modes_settings_gradients_and_random_numbers_as_they_were(tmp_path: Path) -> None:
    policy = policy_of(write_tiny_model("gemma2", tmp_path))
    frozen = next(policy.causal_lm.base_model.children()).eval()  # type: ignore[union-attr]
    before = torch.random.get_rng_state(), random.getstate(), policy.settings
    checked(policy)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (random.getstate(), policy.settings) == before[1:]
    assert policy.training
    assert not frozen.training
    assert policy.causal_lm.config._attn_implementation == attention.ATTENTION_NAME  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in policy.parameters())


class _Sized(nn.Module):
    """A module of a model's config that says how many parameters it has."""

    def __init__(self, policy: PolicyModel, size: int) -> None:
        super().__init__()
        self.config = policy.causal_lm.config
        self.weight = nn.Parameter(torch.empty(size, device="meta"))


def test_one_sequence_is_longer_than_the_window_unless_the_model_is_too_large_for_that(tmp_path: Path) -> None:
    policy = policy_of(write_tiny_model("mistral", tmp_path))
    policy.causal_lm.config.sliding_window = 64  # type: ignore[union-attr]

    def longest(size: int) -> int:
        return int(probe(_Sized(policy, size), device=torch.device("cpu")).lengths.max())

    assert longest(10**6) == 64 + 16
    assert longest(10**8) == 10**10 // 10**8 - 31
    assert longest(10**10) == 24
    assert WINDOW < 24
