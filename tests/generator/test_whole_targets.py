"""All weights of a target in a real engine: exact, one target after the other, and the model's own again."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save as saved
from transformers import Qwen3ForCausalLM

from protocol.adapters import AdapterSampleAnswer, AdapterSampleRequest, AdapterSequence, OfferedAdapter, adapter_name
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from tests.generator.conftest import Rig, start_rig
from tests.learner.tenants.tiny import make_tiny_model

if TYPE_CHECKING:
    pass

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = tuple(range(40, 52))
CLOSE = 2e-4


class WholeRig:
    """The generator's part, with files that a test hands out; `models` by name are what it must sample from."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        from generator.adapter_sampling import AdapterSampling
        from generator.serving import GeneratorMetrics, Serving
        from generator.whole_targets import WholeTargets

        metrics = GeneratorMetrics(Metrics("generator"), engine=rig.engine)
        serving = Serving(
            engine=rig.engine, generator_id="g", vocabulary_size=263, max_model_len=1024, max_waiting_requests=64,
            metrics=metrics,
        )  # fmt: skip
        serving.holds(rig.engine.version)
        self.models = {name: _changed(folder, seed) for seed, name in enumerate(("base", "first", "second"))}
        self.files: dict[str, Sequence[bytes]] = {}
        self.fetched: list[str] = []
        self.targets: WholeTargets = WholeTargets(
            engine=rig.engine, fetch=self._fetch, base=folder, serving=serving, metrics=Metrics("whole")
        )
        self.sampling: AdapterSampling = AdapterSampling(
            engine=rig.engine, serving=serving, slots=self.targets, metrics=metrics, generator_id="g"
        )

    async def _fetch(self, name: str) -> Sequence[bytes]:
        self.fetched.append(name)
        return self.files[name]

    def offered(self, target: str, of: str, *, version: int = 0) -> OfferedAdapter:
        tensors = {name: each.detach().contiguous() for name, each in self.models[of].named_parameters()}
        files = [json.dumps(self.models[of].config.to_dict()).encode(), saved(tensors)]
        name = adapter_name(files)
        self.files[name] = files
        return OfferedAdapter(target_id=target, version=version, name=name, rank=0, is_replaced=version > 0)

    async def sample(self, adapter: OfferedAdapter | None = None, **fields: Any) -> AdapterSampleAnswer:
        given = {"request_id": "r", "namespace": "s", "prompt_token_ids": PROMPT, "max_tokens": 12, "ignore_ends": True}
        return await self.sampling.sample(AdapterSampleRequest.model_validate({**given, **fields, "adapter": adapter}))

    def gap(self, sequence: AdapterSequence, of: str) -> float:
        token_ids = torch.tensor([[*PROMPT, *sequence.token_ids]])
        with torch.no_grad():
            scores = torch.log_softmax(self.models[of](input_ids=token_ids).logits[0, len(PROMPT) - 1 : -1].float(), -1)
        own = scores.gather(1, token_ids[0, len(PROMPT) :, None])[:, 0].tolist()
        found: float = max(abs(ours - theirs) for ours, theirs in zip(own, sequence.logprobs, strict=True))
        return found


def _changed(folder: Path, seed: int) -> Qwen3ForCausalLM:
    """The model, with other weights unless the seed is 0."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder).float().eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if seed else ():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=random))
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholeRig]:
    folder = tmp_path_factory.mktemp("whole") / "model"
    make_tiny_model(folder, hidden=64)
    rig = await start_rig(
        folder=folder,
        tied=True,
        policy=object(),  # type: ignore[arg-type]
        change=lambda options: replace(options, tokenizer=True),
    )
    yield WholeRig(rig, folder)
    await rig.engine.shutdown()


async def test_targets_that_are_sampled_at_once_are_each_exact_and_so_is_the_model_itself(served: WholeRig) -> None:
    first, second = served.offered("one", "first"), served.offered("two", "second")
    names = ["base", "first", "second", "first", "base", "second"]
    chosen = {"base": None, "first": first, "second": second}
    answers = await asyncio.gather(*(served.sample(chosen[name], n=2, namespace=name) for name in names))
    for name, answer in zip(names, answers, strict=True):
        for sequence in answer.sequences:
            assert served.gap(sequence, name) < CLOSE, name
            assert served.gap(sequence, "second" if name != "second" else "first") > 0.01, "weights that are the same"
    fetched = len(served.fetched)
    await served.sample(second)
    assert len(served.fetched) == fetched, "it was held"


async def test_later_weights_of_a_target_serve_those_who_ask_for_former_ones(served: WholeRig) -> None:
    former, later = (served.offered("live", of, version=version) for of, version in (("first", 3), ("second", 7)))
    for adapter, of, version in ((former, "first", 3), (later, "second", 7), (former, "second", 7)):
        (sequence,) = (await served.sample(adapter, namespace=f"{of}-{version}")).sequences
        assert [span.version for span in sequence.spans] == [version]
        assert served.gap(sequence, of) < CLOSE
    assert await served.targets.offer(later) == 7


async def test_what_cannot_be_is_refused_by_name(served: WholeRig) -> None:
    adapter = OfferedAdapter(target_id="low", version=0, name="0" * 64, rank=4)
    with pytest.raises(RequestRefused, match="this generator takes all weights, and no adapters"):
        await served.sample(adapter)
    served.files["1" * 64] = [b"{}", saved({"model.norm.weight": torch.zeros(3)})]
    with pytest.raises(RequestRefused, match="the weights of broken: "):
        await served.sample(OfferedAdapter(target_id="broken", version=0, name="1" * 64, rank=0))
    (sequence,) = (await served.sample(None, namespace="after")).sequences
    assert served.gap(sequence, "base") < CLOSE
