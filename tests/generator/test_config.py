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


@pytest.mark.parametrize(
    ("width", "learner", "engine", "threads", "niceness"),
    [
        (576, "http://127.0.0.1:7300", {}, 3, 10),
        (128, "http://127.0.0.1:7300", {}, 1, 0),
        (576, "http://192.0.2.1:7300", {}, 3, 0),
        (576, None, {}, 3, 0),
        (576, "http://127.0.0.1:7300", {"tensor_parallel_size": 3}, 1, 0),
        (576, "http://127.0.0.1:7300", {"threads": 2}, 2, 0),
        (576, "http://127.0.0.1:7300", {"threads": 2, "niceness": 5}, 2, 5),
    ],
)
def test_a_generator_takes_all_cores_for_a_wide_model_and_stands_back_for_a_learner_on_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    learner: str | None,
    engine: dict[str, int],
    threads: int,
    niceness: int,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("generator.config.cores", lambda: 3)
    (tmp_path / "config.json").write_text(f'{{"hidden_size": {width}}}')
    config = GeneratorConfig(
        model=tmp_path, engine=EngineConfig.model_validate(engine), join=JoinConfig(learner=learner)
    )
    assert (config.threads, config.niceness) == (threads, niceness)
