"""What a generator's config comes to."""

from pathlib import Path

import pytest

from generator.config import EngineConfig, GeneratorConfig, JoinConfig
from protocol.fleet import Backend


@pytest.mark.parametrize(
    ("workers", "backend", "staging"), [(1, "nccl", "staging"), (2, "gloo", "staging"), (2, "nccl", "none")]
)
def test_workers_that_speak_nccl_while_they_serve_take_weights_in_the_pause(
    workers: int, backend: Backend, staging: str
) -> None:
    config = GeneratorConfig(
        model=Path("m"), engine=EngineConfig(tensor_parallel_size=workers), join=JoinConfig(backend=backend)
    )
    assert config.staging == staging
    assert config.gpus_wanted == workers


def test_a_teacher_that_serves_alone_takes_part_in_no_collective() -> None:
    assert GeneratorConfig(model=Path("m"), join=JoinConfig(learner=None, backend="nccl")).collective == ""


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_a_learner_updates_no_quantized_engine_and_a_teacher_may_have_one(name: str) -> None:
    engine = EngineConfig.model_validate({"extra": {name: "fp8"}})
    with pytest.raises(ValueError, match=rf"engine\.extra: {name} quantizes .* set join\.learner to none"):
        GeneratorConfig(model=Path("m"), engine=engine)
    assert GeneratorConfig(model=Path("m"), engine=engine, join=JoinConfig(learner=None)).engine == engine
    plain = EngineConfig.model_validate({"extra": {name: None}})
    assert GeneratorConfig(model=Path("m"), engine=plain).engine == plain
