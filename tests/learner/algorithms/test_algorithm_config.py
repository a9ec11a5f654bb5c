import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from learner.algorithms.knobs import Knobs
from learner.algorithms.presets.distill import DistillConfig
from learner.algorithms.presets.dpo import DpoConfig
from learner.algorithms.presets.gdpo import GdpoConfig
from learner.algorithms.presets.grpo import GrpoConfig
from learner.algorithms.presets.registry import ALGORITHMS, AlgorithmConfig
from learner.algorithms.presets.sft import SftConfig

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)


@pytest.mark.parametrize(
    ("given", "knob"),
    [
        ({"type": "grpo", "correction": "none", "correction_cap": 3.0}, "correction_cap"),
        ({"type": "grpo", "constant_length": 128}, "constant_length"),
        ({"type": "sft", "constant_length": 128}, "constant_length"),
        ({"type": "sft", "clip_low": 0.1}, "clip_low"),
        ({"type": "grpo", "clip_lo": 0.1}, "clip_lo"),
    ],
)
def test_a_knob_that_nothing_uses_is_an_error_that_names_it(given: dict[str, object], knob: str) -> None:
    with pytest.raises(ValidationError, match=knob):
        ADAPTER.validate_python(given)


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(),
        GrpoConfig(correction="none"),
        GrpoConfig(aggregation="constant", constant_length=64, dual_clip=3.0),
        SftConfig(),
    ],
)
def test_a_dumped_config_can_be_read_again(config: AlgorithmConfig) -> None:
    assert ADAPTER.validate_json(config.model_dump_json()) == config


ALL = [kind for name, kind in ALGORITHMS.items() if name != "custom"]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: str(kind.model_fields["type"].default))
def test_every_algorithm_has_defaults_a_source_and_a_dump_that_can_be_read_again(kind: type[Knobs]) -> None:
    config = kind.model_validate({"components": {"correct": 1.0}} if kind is GdpoConfig else {})
    assert ADAPTER.validate_json(config.model_dump_json()) == config
    assert kind.__doc__
    assert all(field.description for name, field in kind.model_fields.items() if name != "type")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "grpo", "token_window": [5.0, 0.5]}, "token_window is \\[5.0, 0.5\\]: expected two numbers"),
        ({"type": "grpo", "kl_coefficient": 0.1, "kl_form": "k1"}, "kl_form is k1 and kl_in is loss"),
        ({"type": "max_rl", "reward_normalisation": "standardise"}, "a mean of about 0, which nothing can be divided"),
        ({"type": "grpo", "kl_form": "k2"}, "kl_form is set but has no effect: kl_coefficient is 0"),
        ({"type": "grpo", "proximal": "behavior", "correction_cap": 3.0}, "correction_cap is set but has no effect"),
        ({"type": "rloo", "clip_low": 0.1}, "clip_low is set but has no effect: policy_loss is reinforce"),
        ({"type": "dpo", "loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is set but has no effect"),
        ({"type": "distill", "jsd_beta": 0.1}, "jsd_beta is set but has no effect: the divergence is forward_kl"),
        ({"type": "distill", "jsd_beta": 0.5}, "jsd_beta is set but has no effect: the divergence is forward_kl"),
        ({"type": "distill", "divergence": "reverse_kl", "jsd_beta": 0.1}, "divergence is reverse_kl"),
        ({"type": "distill", "skew": 0.1}, "skew is set but has no effect: the divergence is forward_kl"),
        ({"type": "distill", "divergence": "adaptive_kl", "skew": 0.3}, "skew is set .*divergence is adaptive_kl"),
        ({"type": "distill", "divergence": "skewed_forward_kl", "skew": 1.0}, "less than 1"),
        ({"type": "distill", "divergence": "skewed_reverse_kl", "skew": -0.1}, "greater than or equal to 0"),
        ({"type": "distill", "divergence": "skewed_reverse_kl", "jsd_beta": 0.5}, "divergence is skewed_reverse_kl"),
        (
            {"type": "distill", "divergence": "skewed_reverse_kl", "head_mass": 0.5},
            "head_mass is set but has no effect",
        ),
        ({"type": "distill", "divergence": "jsd", "head_mass": 0.5}, "head_mass is set .*: the divergence is jsd"),
        ({"type": "distill", "divergence": "adaptive_kl", "head_mass": 1.0}, "less than 1"),
        ({"type": "distill", "divergence": "skewed_kl"}, "skewed_forward_kl"),
        ({"type": "distill", "constant_length": 64}, "constant_length is set but has no effect"),
        ({"type": "distill", "clip_low": 0.1}, "clip_low"),
        ({"type": "distill", "teacher_tokens": 0}, "greater than or equal to 1"),
        ({"type": "dpo", "loss": "simpo", "reference_free": True}, "reference_free is set .*: loss is simpo"),
        (
            {"type": "dpo", "loss": "simpo", "discopop_temperature": 0.05},
            "discopop_temperature is set .*: loss is simpo",
        ),
        ({"type": "dpo", "loss": "simpo", "good_weight": 1.0}, "good_weight is set .*: loss is simpo"),
        ({"type": "dpo", "simpo_margin": 1.0}, "simpo_margin is set but has no effect: loss is sigmoid"),
        ({"type": "cispo", "correction": "truncate"}, "correction"),
        ({"type": "custom", "path": "no colon"}, "path"),
    ],
)
def test_knobs_that_do_not_go_together_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ADAPTER.validate_python(given)


@pytest.mark.parametrize(
    ("loss", "beta"), [("sigmoid", 0.1), ("simpo", 2.0), ("length_normalised", 5.0), ("sppo", 1e-3), ("kto", 0.1)]
)
def test_a_preference_loss_has_the_beta_of_its_source_unless_one_is_given(loss: str, beta: float) -> None:
    assert ADAPTER.validate_python({"type": "dpo", "loss": loss}) == DpoConfig.model_validate(
        {"loss": loss, "beta": beta}
    )
    assert DpoConfig.model_validate({"loss": loss, "beta": 0.7}).beta == 0.7


def test_simpos_margin_is_half_of_its_beta_and_it_asks_no_reference() -> None:
    simpo = DpoConfig(loss="simpo")
    assert (simpo.simpo_margin, simpo.uses_reference) == (simpo.beta / 2, False)
    assert "simpo_margin" not in DpoConfig().model_dump()


def test_what_distillation_is_by_default_is_the_forward_divergence_of_64_tokens() -> None:
    kept = {"type": "distill", "divergence": "forward_kl", "teacher_tokens": 64, "sft_weight": 0.0}
    assert DistillConfig().model_dump().items() >= kept.items()
    assert not {"jsd_beta", "skew", "head_mass"} & DistillConfig().model_dump().keys()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"divergence": "jsd"}, {"jsd_beta": 0.5}),
        ({"divergence": "skewed_forward_kl"}, {"skew": 0.1}),
        ({"divergence": "skewed_reverse_kl", "skew": 0.0}, {"skew": 0.0}),
        ({"divergence": "adaptive_kl"}, {"head_mass": 0.5}),
    ],
)
def test_a_divergence_of_distillation_has_its_own_knob_alone(given: dict[str, object], kept: dict[str, float]) -> None:
    config = DistillConfig.model_validate(given)
    dumped = config.model_dump()
    assert {knob: dumped[knob] for knob in ("jsd_beta", "skew", "head_mass") if knob in dumped} == kept
    assert ADAPTER.validate_json(config.model_dump_json()) == config


def test_configs_load_no_torch() -> None:
    code = "import sys, learner.algorithms.presets.registry, learner.training.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
