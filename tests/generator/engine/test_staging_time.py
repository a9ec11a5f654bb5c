"""The time that an engine gives its workers to stage: an adapter is small, what it may be added to is not."""

from pathlib import Path
from typing import Any

import pytest

from generator.engine.options import EngineOptions
from generator.weights.plan import WeightSyncError
from protocol.fleet import BucketSpec, LowRank, Prepare, TensorSpec

POLLS = 20


class BusyWorkers:
    """They are done after so many questions."""

    def __init__(self, *, polls: int) -> None:
        self._polls = self._left = polls

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        del args
        if method == "headway_fingerprint":
            return ["f"]
        if method != "headway_progress":
            self._left = self._polls
            return [""]
        self._left -= 1
        return [(self._left <= 0, "")]


def plan_of(*names: str) -> Prepare:
    buckets = tuple(
        BucketSpec(nbytes=400, xxh3="0", tensors=(TensorSpec(name=name, shape=(100,), dtype="float32", offset=0),))
        for name in names
    )
    return Prepare(version="1.1", epoch=0, buckets=buckets, adapter=LowRank(base="b", rank=1, alpha=1.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_an_adapter_alone_has_the_time_of_its_base_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from generator.engine import engine as module

    monkeypatch.setattr(module, "GRACE_S", 0.0)
    monkeypatch.setattr(module, "FILE_TIMEOUT_S", 0.0)
    engine = module.Engine(options=EngineOptions(model="m"), llm=BusyWorkers(polls=POLLS), last_words=None)  # type: ignore[arg-type]
    factor, weight = "base_model.model.layer.lora_A.weight", "layer.weight"
    with pytest.raises(WeightSyncError, match="not done within"):
        await engine.stage_files(plan_of(factor), paths=["factor"])
    monkeypatch.setattr(module, "SLOWEST_BYTES_PER_S", 8.0)
    await engine.stage_files(plan_of(weight, factor), paths=["weight", "factor"])
    await engine.stage(plan_of(factor))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_fingerprint_has_the_time_of_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from generator.engine import engine as module

    (tmp_path / "model.safetensors").write_bytes(bytes(800))
    monkeypatch.setattr(module, "FINGERPRINT_S", 0.0)
    monkeypatch.setattr("services.model_folder.SLOWEST_BYTES_PER_S", 8.0)
    llm: Any = BusyWorkers(polls=POLLS)
    options = EngineOptions(model="m")
    engine = module.Engine(options=options, llm=llm, last_words=None)  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match="not done within"):
        await engine.fingerprint()
    options = EngineOptions(model=str(tmp_path))
    engine = module.Engine(options=options, llm=llm, last_words=None)  # type: ignore[arg-type]
    assert await engine.fingerprint() == "f"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_fingerprint_of_one_version_is_not_taken_of_another() -> None:
    pytest.importorskip("vllm")
    from generator.engine import engine as module

    llm: Any = BusyWorkers(polls=1)
    llm.cache_version = "1.5"
    engine = module.Engine(options=EngineOptions(model="m"), llm=llm, last_words=None)  # type: ignore[arg-type]
    assert await engine.fingerprint(version="1.5") == "f"
    with pytest.raises(WeightSyncError, match=r"version 1\.5 serves by now, and not 1\.4"):
        await engine.fingerprint(version="1.4")
