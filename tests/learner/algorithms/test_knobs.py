"""The knobs that algorithms share: what is refused, what has no effect, and what a dumped config holds."""

import pytest
from pydantic import TypeAdapter, ValidationError

from learner.algorithms.knobs import CorrectionKnobs, EntropyKnobs, KlKnobs, Knobs, RewardKnobs
from learner.algorithms.presets.registry import AlgorithmConfig

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)


@pytest.mark.parametrize("name", ["token_window", "sequence_window"])
@pytest.mark.parametrize("window", [(5.0, 0.5), (-0.1, 2.0)])
def test_a_window_is_two_numbers_in_order_from_0_on(name: str, window: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match=rf"{name} is \[.*\]: expected two numbers, 0 <= low <= high"):
        CorrectionKnobs.model_validate({name: window})


@pytest.mark.parametrize("name", ["token_window", "sequence_window"])
@pytest.mark.parametrize("window", [(0.5, 5.0), (0.0, 0.0), (1.0, 1.0)])
def test_a_window_in_order_is_taken(name: str, window: tuple[float, float]) -> None:
    knobs = CorrectionKnobs.model_validate({name: window})
    assert (knobs.has_filter, getattr(knobs, name)) == (True, window)
    assert not CorrectionKnobs().has_filter


@pytest.mark.parametrize("name", ["token_veto", "divergence_limit", "binary_kl_limit"])
def test_what_leaves_tokens_out_is_a_filter_as_a_window_is(name: str) -> None:
    assert CorrectionKnobs.model_validate({name: 0.5}).has_filter
    assert CorrectionKnobs.model_validate({name: 0.5, "count_left_out": True}).count_left_out


def test_a_floor_of_the_weights_is_not_above_their_cap() -> None:
    with pytest.raises(ValidationError, match=r"correction_floor is 3, above correction_cap, 2: no weight is within"):
        CorrectionKnobs.model_validate({"correction_floor": 3.0})
    assert CorrectionKnobs.model_validate({"correction_floor": 3.0, "correction_cap": 3.0}).correction_floor == 3.0
    with pytest.raises(ValidationError, match=r"correction_floor is 0.5, above correction_cap_bad, 0.1: no weight"):
        CorrectionKnobs.model_validate({"correction_floor": 0.5, "correction_cap_bad": 0.1})


def test_k1_in_the_loss_has_a_gradient_once_it_is_weighted_by_the_ratio() -> None:
    assert KlKnobs.model_validate({"kl_coefficient": 0.1, "kl_form": "k1", "kl_ratio": True}).kl_form == "k1"


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (None, None)),
        ({"reward_clip": 2.0}, (-2.0, 2.0)),
        ({"reward_clip": 2.0, "reward_clip_low": 0.0}, (0.0, 2.0)),
        ({"reward_clip_low": -0.5}, (-0.5, None)),
    ],
)
def test_rewards_are_clipped_on_both_sides_alike_or_on_each_by_itself(
    given: dict[str, float], bounds: tuple[float | None, float | None]
) -> None:
    assert RewardKnobs.model_validate(given).reward_bounds == bounds


def test_bounds_that_leave_nothing_between_them_are_refused() -> None:
    with pytest.raises(ValidationError, match="reward_clip_low is 2 and reward_clip 1: every reward would be the same"):
        RewardKnobs.model_validate({"reward_clip": 1.0, "reward_clip_low": 2.0})
    with pytest.raises(
        ValidationError, match=r"overlong_buffer is 128 and overlong_length 100: .* lower overlong_buffer"
    ):
        RewardKnobs.model_validate({"overlong_length": 100})


def test_a_weight_of_the_entropy_that_adapts_begins_within_its_bounds() -> None:
    with pytest.raises(ValidationError, match=r"entropy_coefficient is 0.1: .* between 0 and entropy_limit, 0.005"):
        EntropyKnobs.model_validate({"entropy_target": 0.2, "entropy_coefficient": 0.1})
    assert EntropyKnobs.model_validate({"entropy_target": 0.2}).has_entropy
    assert EntropyKnobs.model_validate({"entropy_coefficient": -0.1}).has_entropy
    assert not EntropyKnobs().has_entropy


def test_a_penalty_without_a_gradient_is_refused_and_what_holds_back_is_taken() -> None:
    """The gradient of E[lp - lp_ref] over the policy's own samples, taken through lp alone, is E[grad lp] = 0."""
    with pytest.raises(ValidationError, match=r"kl_form is k1 and kl_in is loss: .* set kl_form to k3 or k2"):
        KlKnobs.model_validate({"kl_coefficient": 0.1, "kl_form": "k1"})
    for form in ("k2", "k3"):
        assert KlKnobs.model_validate({"kl_coefficient": 0.1, "kl_form": form}).kl_form == form
    assert KlKnobs.model_validate({"kl_coefficient": 0.1, "kl_in": "reward"}).kl_in == "reward"


UNUSED: list[tuple[type[Knobs], dict[str, object], str, str]] = [
    (KlKnobs, {"kl_form": "k2"}, "kl_form", "kl_coefficient is 0"),
    (KlKnobs, {"kl_in": "reward"}, "kl_in", "kl_coefficient is 0"),
    (KlKnobs, {"kl_coefficient": 0.1, "kl_in": "reward", "kl_form": "k3"}, "kl_form", "takes k1"),
    (KlKnobs, {"kl_control": "adaptive"}, "kl_control", "kl_coefficient is 0"),
    (KlKnobs, {"kl_coefficient": 0.1, "kl_control": "adaptive"}, "kl_control", "only a penalty in the reward adapts"),
    (KlKnobs, {"kl_coefficient": 0.1, "kl_in": "reward", "kl_target": 3.0}, "kl_target", "kl_control is fixed"),
    (KlKnobs, {"kl_coefficient": 0.1, "kl_in": "reward", "kl_horizon": 9}, "kl_horizon", "kl_control is fixed"),
    (CorrectionKnobs, {"count_left_out": True}, "count_left_out", "divergence_limit or binary_kl_limit is set"),
    (EntropyKnobs, {"entropy_step": 0.01}, "entropy_step", "entropy_target is not set"),
    (EntropyKnobs, {"entropy_coefficient": 0.1, "entropy_limit": 0.2}, "entropy_limit", "entropy_target is not set"),
    (CorrectionKnobs, {"second_moment_limit": 0.04, "count_left_out": True}, "count_left_out", "nothing is left out"),
    (CorrectionKnobs, {"correction": "none", "correction_floor": 0.5}, "correction_floor", "correction is none"),
    (CorrectionKnobs, {"correction": "none", "correction_cap_bad": 5.0}, "correction_cap_bad", "correction is none"),
    (CorrectionKnobs, {"correction": "none", "self_normalise": True}, "self_normalise", "correction is none"),
    (CorrectionKnobs, {"proximal": "behavior", "token_veto": 0.1}, "token_veto", "leaves no gap to correct"),
    (KlKnobs, {"kl_ratio": True}, "kl_ratio", "kl_coefficient is 0"),
    (KlKnobs, {"kl_coefficient": 0.1, "kl_in": "reward", "kl_ratio": True}, "kl_ratio", "takes k1"),
    (RewardKnobs, {"overlong_factor": 0.5}, "overlong_factor", "overlong_length is not set"),
    (CorrectionKnobs, {"correction": "none", "correction_cap": 2.0}, "correction_cap", "correction is none"),
    (CorrectionKnobs, {"proximal": "behavior", "correction": "truncate"}, "correction", "leaves no gap to correct"),
    (CorrectionKnobs, {"proximal": "behavior", "token_window": (0.5, 2)}, "token_window", "leaves no gap to correct"),
    (RewardKnobs, {"truncated_penalty": 0.5}, "truncated_penalty", "truncated is keep"),
    (RewardKnobs, {"truncated": "mask", "truncated_penalty": 0.5}, "truncated_penalty", "truncated is mask"),
    (RewardKnobs, {"overlong_buffer": 64}, "overlong_buffer", "overlong_length is not set"),
    (RewardKnobs, {"length_limit": 64}, "length_limit", "length_penalty is 0"),
    (RewardKnobs, {"relative_length_reward": 0.5}, "relative_length_reward", "relative_length is 0"),
    (RewardKnobs, {"repetition_ngram": 3}, "repetition_ngram", "repetition_penalty is 0"),
]


@pytest.mark.parametrize(("knobs", "given", "name", "reason"), UNUSED, ids=[f"{c[2]}-{c[3]}" for c in UNUSED])
def test_a_knob_without_effect_is_refused_with_the_reason_even_at_its_default(
    knobs: type[Knobs], given: dict[str, object], name: str, reason: str
) -> None:
    with pytest.raises(ValidationError, match=f"{name} is set but has no effect: .*{reason}"):
        knobs.model_validate(given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"type": "rloo", "clip_low": 0.1}, "clip_low"),
        ({"type": "rloo", "correction": "truncate"}, "correction"),
        ({"type": "rloo", "policy_loss": "sequence_clip", "ratio_cap": 2.0}, "ratio_cap"),
        ({"type": "rloo", "policy_loss": "sequence_clip", "ratio_cap_bad": 2.0}, "ratio_cap_bad"),
        ({"type": "dpo", "loss": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ({"type": "dpo", "simpo_margin": 1.0}, "simpo_margin"),
        ({"type": "dpo", "good_weight": 2.0}, "good_weight"),
        ({"type": "distill", "jsd_beta": 0.5}, "jsd_beta"),
        ({"type": "cispo", "correction": "none"}, "correction"),
        ({"type": "opd", "advantage_scale": "none"}, "advantage_scale"),
        ({"type": "gdpo"}, "components"),
        ({"type": "gdpo", "components": {}}, "components"),
        ({"type": "gdpo", "components": {"a": 1.0}, "reward_clip": 1.0}, "reward_clip"),
        ({"type": "grpo", "components": {"a": 1.0}}, "components"),
        ({"type": "grpo", "positive_reward": 0.5}, "positive_reward"),
        ({"type": "cispo", "positive_nll": 0.1}, "positive_nll"),
        ({"type": "ppo", "length_adaptive_alpha": 0.05, "policy_lambda": 0.9}, "policy_lambda"),
        ({"type": "opd", "reward_scale": 2.0}, "reward_scale"),
        ({"type": "opd", "kl_coefficient": 0.1, "kl_in": "reward"}, "kl_in"),
        ({"type": "opd", "truncated": "penalise"}, "truncated"),
        ({"type": "online_dpo", "kl_coefficient": 0.1}, "kl_coefficient"),
    ],
)
def test_a_knob_of_another_part_or_choice_is_refused(given: dict[str, object], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        ADAPTER.validate_python(given)


def test_what_has_no_effect_is_left_out_of_a_dumped_config() -> None:
    kept = {"kl_coefficient": 0.0}
    assert KlKnobs().model_dump() == kept
    in_loss = {"kl_coefficient": 0.1, "kl_form": "k3", "kl_ratio": False, "kl_in": "loss"}
    assert KlKnobs(kl_coefficient=0.1).model_dump() == in_loss
    assert CorrectionKnobs(proximal="behavior").model_dump() == {"proximal": "behavior"}


@pytest.mark.parametrize("algo", list(ADAPTER.json_schema()["discriminator"]["mapping"]))
def test_every_algorithms_dumped_defaults_can_be_read_again(algo: str) -> None:
    required: dict[str, dict[str, object]] = {"custom": {"path": "a.b:c"}, "gdpo": {"components": {"correct": 1.0}}}
    given = {"type": algo, **required.get(algo, {})}
    config = ADAPTER.validate_python(given)
    assert ADAPTER.validate_json(ADAPTER.dump_json(config)) == config


@pytest.mark.parametrize(
    ("algo", "wants"), [("dapo", True), ("online_dpo", True), ("best_of_k", True), ("grpo", False), ("rm", False)]
)
def test_groups_of_equal_rewards_are_of_no_use_to_some(algo: str, wants: bool) -> None:
    assert ADAPTER.validate_python({"type": algo}).wants_spread is wants
