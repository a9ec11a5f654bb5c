"""Whole weights of a target in place of the model's own, with clients that go away in the middle of it."""

import asyncio
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save, save_file

from generator.weights.plan import WeightSyncError
from protocol.adapters import OfferedAdapter
from protocol.fleet import Prepare
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.serving import GeneratorMetrics, Serving
    from generator.whole_targets import WholeTargets


@dataclass
class EngineOfOneNumber:
    """Holds weights of one number. A commit goes on to its end if its caller goes away, as the real one's does."""

    held: float = 0.0
    staged: float = 0.0
    version: str = "1.0"
    resumes: bool = True
    """False: it does not answer once it has loaded."""
    fails: list[WeightSyncError] = field(default_factory=list)
    """The ends of the next commits; after them, commits succeed."""
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a commit loads."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    is_alive: bool = True

    async def stage_files(self, plan: Prepare, *, paths: Sequence[str]) -> None:
        self.staged = _first_number(paths[0])

    async def commit(self, *, version: str) -> None:
        await asyncio.shield(asyncio.ensure_future(self._load(version)))
        if not self.resumes:
            raise WeightSyncError("the engine did not answer")

    async def _load(self, version: str) -> None:
        self.loading.set()
        await self.may_end.wait()
        self.loading.clear()
        if self.fails:
            raise self.fails.pop(0)
        self.held, self.version = self.staged, version


def _first_number(path: str) -> float:
    return float(torch.from_file(path, size=1, dtype=torch.float32)[0])


@dataclass
class TargetsOfNumbers:
    """The weights of each target are a number, which is the name of its files; the model's own are 0."""

    engine: EngineOfOneNumber
    targets: WholeTargets

    async def sample(self, number: int | None) -> float:
        """The weights that are sampled from by who asks for those of a number."""
        async with self.targets.using(None if number is None else offered(number)):
            return self.engine.held


def offered(number: int) -> OfferedAdapter:
    return OfferedAdapter(target_id=f"target {number}", version=0, name=f"{number:064d}", rank=0)


@pytest.fixture
def numbers(tmp_path: Path) -> TargetsOfNumbers:
    async def fetch(name: str) -> Sequence[bytes]:
        return b"{}", save({"w": torch.full((4,), float(name))})

    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    engine = EngineOfOneNumber()
    given = cast("Any", engine)
    serving = Serving(
        engine=given, generator_id="g", vocabulary_size=8, max_model_len=8, max_waiting_requests=8,
        metrics=GeneratorMetrics(Metrics("generator"), engine=given),
    )  # fmt: skip
    targets = WholeTargets(engine=given, fetch=fetch, base=tmp_path, serving=serving, metrics=Metrics("whole"))
    return TargetsOfNumbers(engine, targets)


async def left_while_loading(numbers: TargetsOfNumbers, number: int) -> None:
    """A client asks for weights, and goes away while the engine loads them, which it does to the end."""
    asking = asyncio.ensure_future(numbers.sample(number))
    async with asyncio.timeout(10):
        await numbers.engine.loading.wait()
    asking.cancel()
    await asyncio.wait([asking])
    numbers.engine.may_end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@pytest.mark.parametrize("former", [None, 1])
async def test_weights_that_came_after_their_client_had_left_are_not_taken_for_those_before(
    numbers: TargetsOfNumbers, former: int | None
) -> None:
    numbers.engine.may_end.set()
    assert await numbers.sample(former) == (former or 0)
    numbers.engine.may_end.clear()

    await left_while_loading(numbers, 2)

    assert await numbers.sample(former) == (former or 0)
    assert await numbers.sample(2) == 2


async def test_a_client_that_leaves_while_the_models_own_weights_are_loaded_again_leaves_them_to_be_loaded(
    numbers: TargetsOfNumbers,
) -> None:
    numbers.engine.fails = [WeightSyncError(why, unloaded=True) for why in ("a tensor does not fit", "nor does this")]
    asking = asyncio.ensure_future(numbers.sample(2))
    for _ in range(2):  # the load, and that of the model's own weights
        async with asyncio.timeout(10):
            await numbers.engine.loading.wait()
        if len(numbers.engine.fails) == 1:
            asking.cancel()
            await asyncio.wait([asking])
        numbers.engine.may_end.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        numbers.engine.may_end.clear()
    numbers.engine.held = -1  # half of something
    numbers.engine.may_end.set()

    assert await numbers.sample(None) == 0


async def test_a_load_that_never_began_leaves_what_was_there(numbers: TargetsOfNumbers) -> None:
    numbers.engine.may_end.set()
    await numbers.sample(1)
    numbers.engine.fails = [WeightSyncError("nothing to load")]
    with pytest.raises(RequestRefused, match="the weights of target 2: nothing to load"):
        await numbers.sample(2)
    numbers.engine.may_end.clear()  # nothing is loaded any more

    async with asyncio.timeout(10):
        assert await numbers.sample(1) == 1


async def test_a_load_whose_end_nobody_heard_of_is_not_taken_for_none(numbers: TargetsOfNumbers) -> None:
    numbers.engine.may_end.set()
    await numbers.sample(1)
    numbers.engine.resumes = False
    with pytest.raises(RequestRefused, match="the weights of target 2: the engine did not answer"):
        await numbers.sample(2)
    numbers.engine.resumes = True

    assert await numbers.sample(1) == 1


@pytest.mark.parametrize("has_index", [True, False])
async def test_a_copy_of_the_models_own_weights_in_another_format_is_not_loaded(
    numbers: TargetsOfNumbers, tmp_path: Path, has_index: bool
) -> None:
    if has_index:
        (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"layers.0.w": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    numbers.engine.may_end.set()
    await numbers.sample(1)

    assert await numbers.sample(None) == 0
