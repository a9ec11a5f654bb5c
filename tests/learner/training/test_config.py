import pytest
from pydantic import ValidationError

from learner.training.config import LoraConfig, ReferenceConfig, TrainingConfig


def test_everything_is_off_by_default_and_survives_a_round_trip() -> None:
    config = TrainingConfig()
    assert not config.lora.enabled
    assert (config.offload, config.reference.mode) == ("none", "initial")
    assert TrainingConfig.model_validate_json(config.model_dump_json(exclude_none=True)) == config


@pytest.mark.parametrize("knob", [{"alpha": 8.0}, {"dropout": 0.1}, {"targets": ("q_proj",)}])
def test_a_setting_of_lora_without_a_rank_is_refused(knob: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=rf"{next(iter(knob))} set but rank is 0"):
        LoraConfig.model_validate(knob)
    assert LoraConfig.model_validate({"rank": 8, **knob}).enabled


def test_all_linear_layers_and_names_of_some_do_not_go_together() -> None:
    with pytest.raises(ValidationError, match="all-linear and other names"):
        LoraConfig(rank=8, targets=("all-linear", "q_proj"))


def test_a_setting_of_another_mode_of_the_reference_is_refused() -> None:
    with pytest.raises(ValidationError, match="decay is set but mode is initial"):
        ReferenceConfig(decay=0.5)
    with pytest.raises(ValidationError, match="every_steps is set but mode is ema"):
        ReferenceConfig(mode="ema", every_steps=5)
    assert ReferenceConfig(mode="refresh", every_steps=5).every_steps == 5


@pytest.mark.parametrize(
    ("offload", "stage", "dtype"),
    [("optimizer", 0, "float32"), ("all", 2, "float32"), ("all", 0, "bfloat16")],
)
def test_offloading_needs_a_stage_that_can(offload: str, stage: int, dtype: str) -> None:
    with pytest.raises(ValidationError, match=rf"offload is {offload} and zero_stage is {stage}.*needs zero_stage"):
        TrainingConfig.model_validate({"offload": offload, "zero_stage": stage, "dtype": dtype})


def test_bfloat16_offloads_its_optimizer_at_any_stage() -> None:
    # It trains with stage 1 at least.
    assert TrainingConfig(offload="optimizer", dtype="bfloat16").offload == "optimizer"


@pytest.mark.parametrize("setting", [{"recompute_attention": False}, {"offload_activations": True}])
def test_what_is_said_of_recomputed_layers_needs_some(setting: dict[str, object]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ValidationError, match=rf"{name} is {str(value).lower()} and gradient_checkpointing is false"):
        TrainingConfig.model_validate(setting)
    assert TrainingConfig.model_validate({**setting, "gradient_checkpointing": True}).gradient_checkpointing
