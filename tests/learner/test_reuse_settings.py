"""Settings of groups that are trained again: how many they come to, and what is refused, by name."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from learner.algorithms.old_tokens import OldTokenBound
from learner.algorithms.preset import Preset
from learner.algorithms.presets.grpo import GrpoConfig
from learner.config import LearnerConfig
from learner.event_loop import lease_terms, ledger_config
from services.process import WrongSettings


def config_of(algo: str | dict[str, Any] = "grpo", *, share: float = 0.25, **more: Any) -> LearnerConfig:
    reuse = {"share": share, **more.pop("reuse", {})}
    return LearnerConfig.model_validate(
        {
            "model": "/nowhere",
            "run": {"name": "one"},
            "algo": {"type": algo} if isinstance(algo, str) else algo,
            "reuse": reuse,
            **more,
        }
    )


def test_groups_that_are_trained_again_take_the_place_of_sampled_ones() -> None:
    config = config_of(steps=10, groups_per_step=32, seed=7, reuse={"priority": "recent", "max_reuses": 3})
    ledger = ledger_config(config)
    assert (ledger.groups_per_step, ledger.reused_per_step) == (24, 8)
    assert (ledger.reuse_priority, ledger.max_reuses, ledger.reuse_seed) == ("recent", 3, 7)
    assert lease_terms(config).total_groups == 240
    old = config_of(max_lag=0, reuse={"max_lag": 16})
    assert (ledger_config(old).reused_lag, old.old_tokens) == (16, OldTokenBound(0, 0.04))
    assert (ledger.reused_lag, config.old_tokens) == (4, None)
    usual = ledger_config(config_of(share=0.0, groups_per_step=32))
    assert (usual.groups_per_step, usual.reused_per_step) == (32, 0)


@pytest.mark.parametrize(("share", "groups", "expected"), [(0.25, 10, 2), (0.3, 10, 3), (0.99, 3, 2), (0.5, 2, 1)])
def test_the_share_is_rounded_down(share: float, groups: int, expected: int) -> None:
    assert config_of(share=share, groups_per_step=groups).reused_per_step == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_lag": 0}, "max_lag 0: a group that was trained is one version old at the next step"),
        ({"groups_per_step": 3}, "reuse.share is 0.25 and groups_per_step 3: that is less than one group"),
        ({"algo": "ppo"}, "the targets of algo ppo's critic are uncorrected for stale tokens"),
        ({"algo": "rae"}, "the running baselines of algo rae would count a group's rewards again"),
        (
            {"algo": "opd", "teachers": [{"name": "t", "path": "/nowhere"}]},
            "the teachers of algo opd would be asked again",
        ),
        ({"share": 0.0, "reuse": {"priority": "recent"}}, "priority set and share is 0"),
        ({"share": 1.0}, "less than 1"),
        ({"reuse": {"max_lag": 4}}, "reuse.max_lag is 4 and max_lag 4, which holds for groups"),
        ({"reuse": {"second_moment_limit": 0.1}}, "second_moment_limit set and max_lag is not"),
        ({"share": 0.0, "reuse": {"max_lag": 8}}, "max_lag set and share is 0"),
        (
            {"reuse": {"max_lag": 8}, "training": {"partial_batches": True}},
            "reuse.max_lag is set and training.partial_batches is true",
        ),
        ({"algo": "cispo", "reuse": {"max_lag": 8}}, "algo cispo leaves out no tokens by their second moment"),
        ({"algo": "rloo", "reuse": {"max_lag": 8}}, "algo rloo leaves out no tokens by their second moment"),
        ({"algo": {"type": "grpo", "correction": "none"}, "reuse": {"max_lag": 8}}, "algo.correction is none"),
        ({"algo": {"type": "grpo", "divergence_limit": 0.5}, "reuse": {"max_lag": 8}}, "algo.divergence_limit leaves"),
    ],
)
def test_what_cannot_be_trained_again_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(**settings)


def own(*, teacher: bool = False, values: bool = False, candidates: int = 0) -> Preset:
    """An own algorithm, with passes of grpo and these, and so many tokens of a teacher."""
    preset = GrpoConfig().preset()
    passes = replace(preset.passes, teacher=teacher, values=values)
    return replace(preset, name="mine", passes=passes, candidates=candidates)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, None),
        ({"teacher": True}, "its teachers would be asked again"),
        ({"candidates": 8}, "its teachers would be asked again"),
        ({"values": True}, "the targets of its critic are uncorrected for stale tokens"),
    ],
)
def test_what_an_own_preset_cannot_train_again_is_refused_by_its_name(
    options: dict[str, int], said: str | None
) -> None:
    algo = {"type": "custom", "path": f"{__name__}:own", "options": options}
    made = {"model": "/nowhere", "run": {"name": "one"}, "algo": algo}
    assert LearnerConfig.model_validate(made).preset().name == "mine"
    reusing = LearnerConfig.model_validate({**made, "reuse": {"share": 0.5}})
    if said is None:
        assert reusing.preset().name == "mine"
        return
    with pytest.raises(WrongSettings, match=f"reuse.share is 0.5, and the Preset mine .* trains a group once: {said}"):
        reusing.preset()


def test_running_moments_of_rewards_are_refused() -> None:
    algo = {"type": "grpo", "reward_normalisation": "scale"}
    with pytest.raises(ValidationError, match=r"algo.reward_normalisation is scale, and the moments of all rewards"):
        LearnerConfig.model_validate(
            {"model": "/nowhere", "run": {"name": "one"}, "algo": algo, "reuse": {"share": 0.5}}
        )


@pytest.mark.parametrize("algo", ["sft", "dpo"])
def test_learning_from_files_has_nothing_to_train_again(algo: str) -> None:
    with pytest.raises(ValidationError, match=r"learns from the file data.path"):
        config_of(algo, data={"path": "/nowhere.jsonl"})
    assert LearnerConfig.without_effect({"algo.type": algo})["reuse"].startswith(f"algo {algo} learns from the file")
