import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from learner.algorithms.config import AlgorithmConfig, GrpoConfig, SftConfig

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


def test_configs_load_no_torch() -> None:
    code = "import sys, learner.algorithms.config, learner.training.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
