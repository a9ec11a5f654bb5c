"""Config of a generator: when weights are taken, and which engines a learner may update."""

import json
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


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        ("config.json", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ("config.json", {"compression_config": {"format": "dense"}}, "of an unnamed kind"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_a_learner_updates_no_model_that_its_own_files_call_quantized(
    file: str, content: dict[str, object], method: str, tmp_path: Path
) -> None:
    for name, found in {"config.json": {}, file: content}.items():
        (tmp_path / name).write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"quantized \({method}, .* or set join\.learner to none"):
        GeneratorConfig(model=tmp_path)
    assert GeneratorConfig(model=tmp_path, join=JoinConfig(learner=None)).model == tmp_path
    for name in {file, "config.json"}:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert GeneratorConfig(model=tmp_path).model == tmp_path
