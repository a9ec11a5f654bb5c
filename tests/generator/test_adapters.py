"""Adapters in a real engine: exact beside each other and the base, replaced within completions, fetched again."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save as saved
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from protocol.adapters import AdapterSampleAnswer, AdapterSampleRequest, AdapterSequence, OfferedAdapter, adapter_name
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from tests.generator.conftest import Rig, start_rig
from tests.learner.tenants.tiny import make_tiny_model

if TYPE_CHECKING:
    pass

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = tuple(range(40, 52))
SLOTS = 2
CLOSE = 2e-4


class RandomAdapter:
    """Random factors, large enough to change each token's logprob."""

    def __init__(self, model: Qwen3ForCausalLM, *, rank: int, seed: int, names: Sequence[str]) -> None:
        random = torch.Generator().manual_seed(seed)
        self.rank, self.scale = rank, 32 / rank
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, layer in model.named_modules():
            if name.rsplit(".", 1)[-1] in names and isinstance(layer, torch.nn.Linear):
                down = torch.randn(rank, layer.in_features, generator=random) / layer.in_features**0.5
                self.factors[name] = down, 0.05 * torch.randn(layer.out_features, rank, generator=random)

    def files(self) -> list[bytes]:
        tensors = {
            f"base_model.model.{name}.lora_{side}.weight": factor.contiguous()
            for name, factors in self.factors.items()
            for side, factor in zip("AB", factors, strict=True)
        }
        targets = sorted({name.rsplit(".", 1)[-1] for name in self.factors})
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": 32, "target_modules": targets, "bias": "none"}
        return [json.dumps(config).encode(), saved(tensors)]


@contextmanager
def adapted(model: Qwen3ForCausalLM, adapter: RandomAdapter | None) -> Any:
    layers = dict(model.named_modules())
    with ExitStack() as stack:
        for name, (down, up) in adapter.factors.items() if adapter is not None else ():

            def add(_: Any, inputs: Any, output: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
                assert adapter is not None
                changed: Tensor = output + adapter.scale * (inputs[0] @ down.T) @ up.T
                return changed

            stack.callback(layers[name].register_forward_hook(add).remove)
        yield


class AdaptedReference:
    """The policy by transformers, one token after the other: under the adapter of each, on the keys of those before."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder).float().eval()
        self.adapters = {
            "narrow": RandomAdapter(self.model, rank=4, seed=1, names=("q_proj", "down_proj")),
            "wide": RandomAdapter(
                self.model, rank=8, seed=2, names=("k_proj", "v_proj", "o_proj", "gate_proj", "lm_head")
            ),
            "third": RandomAdapter(self.model, rank=3, seed=3, names=("up_proj", "lm_head")),
        }

    def logprobs(self, token_ids: Sequence[int], adapters: Sequence[RandomAdapter | None], start: int) -> list[float]:
        """Of token_ids[start:], sampled under the adapters, one for each. The prompt is the first one's."""
        cache, found, given = DynamicCache(), [], list(token_ids[:start])
        for token, adapter in zip(token_ids[start:], adapters, strict=True):
            with torch.no_grad(), adapted(self.model, adapter):
                logits = self.model(input_ids=torch.tensor([given]), past_key_values=cache, use_cache=True).logits
            found.append(torch.log_softmax(logits[0, -1].float(), -1)[token].item())
            given = [token]
        return found

    def gap(self, sequence: AdapterSequence, adapters: Sequence[RandomAdapter | None]) -> float:
        token_ids = (*PROMPT, *sequence.token_ids)
        own = self.logprobs(token_ids, adapters, len(PROMPT))
        return max(abs(ours - theirs) for ours, theirs in zip(own, sequence.logprobs, strict=True))


class AdapterRig:
    """The generator's part, with files that a test hands out."""

    def __init__(self, rig: Rig, reference: AdaptedReference) -> None:
        from generator.adapter_sampling import AdapterSampling
        from generator.adapters import AdapterSlots
        from generator.serving import GeneratorMetrics, Serving

        metrics = GeneratorMetrics(Metrics("generator"), engine=rig.engine)
        serving = Serving(
            engine=rig.engine, generator_id="g", vocabulary_size=263, max_model_len=1024, max_waiting_requests=64,
            metrics=metrics,
        )  # fmt: skip
        serving.holds(rig.engine.version)
        self.reference = reference
        self.files: dict[str, Sequence[bytes]] = {}
        self.fetches: asyncio.Queue[str] = asyncio.Queue()
        self.slots: AdapterSlots = AdapterSlots(
            engine=rig.engine, fetch=self._fetch, slots=SLOTS, max_rank=8, metrics=Metrics("adapters")
        )
        self.sampling: AdapterSampling = AdapterSampling(
            engine=rig.engine, serving=serving, slots=self.slots, metrics=metrics, generator_id="g"
        )

    async def _fetch(self, name: str) -> Sequence[bytes]:
        self.fetches.put_nowait(name)
        return self.files[name]

    def offered(self, target: str, of: str, *, version: int = 1, replaced: bool = False) -> OfferedAdapter:
        adapter = self.reference.adapters[of]
        files = adapter.files()
        name = adapter_name(files)
        self.files[name] = files
        return OfferedAdapter(target_id=target, version=version, name=name, rank=adapter.rank, is_replaced=replaced)

    async def sample(self, adapter: OfferedAdapter | None = None, **fields: Any) -> AdapterSampleAnswer:
        given = {"request_id": "r", "namespace": "s", "prompt_token_ids": PROMPT, "max_tokens": 12, "ignore_ends": True}
        return await self.sampling.sample(AdapterSampleRequest.model_validate({**given, **fields, "adapter": adapter}))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdapterRig]:
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("adapters") / "model"
    make_tiny_model(folder, hidden=64)
    rig = await start_rig(
        folder=folder,
        tied=True,
        policy=object(),  # type: ignore[arg-type]
        change=lambda options: replace(options, adapter_slots=SLOTS, max_adapter_rank=8, tokenizer=True),
    )
    made = AdapterRig(rig, AdaptedReference(folder))
    yield made
    made.slots.close()
    await rig.engine.shutdown()


async def test_adapters_of_all_slots_and_the_base_are_exact_beside_each_other(served: AdapterRig) -> None:
    """With all of its slots taken, vLLM on a CPU computes the base with the last one's adapter: one stays free."""
    chosen = [None, served.offered("a", "narrow"), served.offered("b", "wide"), None]
    answers = await asyncio.gather(*(served.sample(each, n=2, seed=number) for number, each in enumerate(chosen)))

    adapters = [None, served.reference.adapters["narrow"], served.reference.adapters["wide"], None]
    for answer, adapter in zip(answers, adapters, strict=True):
        for sequence in answer.sequences:
            assert served.reference.gap(sequence, [adapter] * len(sequence.token_ids)) < CLOSE
    assert served.reference.gap(answers[1].sequences[0], [None] * 12) > 0.01, "an adapter that changes nothing"


async def test_each_token_is_of_the_version_with_which_it_is_stamped(served: AdapterRig) -> None:
    while not served.fetches.empty():
        served.fetches.get_nowait()
    first = served.offered("live", "narrow", version=3, replaced=True)
    running = asyncio.create_task(served.sample(first, n=3, max_tokens=400, namespace="live-1"))
    beside = asyncio.create_task(served.sample(None, max_tokens=400))
    async with asyncio.timeout(60):
        await served.fetches.get()
    await asyncio.sleep(0.5)
    held = await served.slots.offer(served.offered("live", "third", version=7, replaced=True))
    answer = await running

    assert held == 7
    by_version = {3: served.reference.adapters["narrow"], 7: served.reference.adapters["third"]}
    for sequence in answer.sequences:
        assert [span.version for span in sequence.spans] == [3, 7], "it was replaced while they ran"
        adapters = [by_version[span.version] for span in sequence.spans for _ in range(span.start, span.end)]
        assert served.reference.gap(sequence, adapters) < CLOSE
        wrong = [by_version[3]] * (sequence.spans[0].end + 1) + [by_version[7]] * (sequence.spans[1].end - 1)
        assert served.reference.gap(sequence, wrong[: len(adapters)]) > 1e-3, "one token later is seen"
    assert served.reference.gap((await beside).sequences[0], [None] * 400) < CLOSE

    later = await served.sample(first, namespace="live-2")
    assert [span.version for span in later.sequences[0].spans] == [7], "it was asked for version 3 or a later one"
    assert served.reference.gap(later.sequences[0], [by_version[7]] * 12) < CLOSE


async def test_more_targets_than_slots_take_turns_and_are_fetched_again(served: AdapterRig) -> None:
    offers = [served.offered(f"target-{number}", name) for number, name in enumerate(("narrow", "wide", "third"))]
    for _ in range(2):
        answers = await asyncio.gather(*(served.sample(each) for each in [*offers, None, *offers]))
        names = ["narrow", "wide", "third"]
        adapters = [*map(served.reference.adapters.get, names), None, *map(served.reference.adapters.get, names)]
        gaps = [
            served.reference.gap(answer.sequences[0], [adapter] * 12)
            for answer, adapter in zip(answers, adapters, strict=True)
        ]
        assert max(gaps) < CLOSE
    assert len(served.slots._held) <= SLOTS


async def test_a_client_that_goes_away_while_an_adapter_is_fetched_leaves_its_slot_free(
    served: AdapterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(name: str) -> Sequence[bytes]:
        await asyncio.Event().wait()
        return ()

    with monkeypatch.context() as patched:
        patched.setattr(served.slots, "_fetch", never)
        tasks = [asyncio.create_task(served.sample(served.offered(f"slow-{n}", "wide"))) for n in range(4)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    answers = await asyncio.gather(*(served.sample(served.offered(f"fast-{n}", "wide")) for n in range(3)))
    assert len(answers) == 3


async def test_nothing_stays_of_targets_that_are_not_held(served: AdapterRig) -> None:
    """Each save of each client is offered to each generator."""
    for number in range(20):
        assert await served.slots.offer(served.offered(f"unheld-{number}", "narrow")) is None
    await asyncio.gather(*(served.sample(served.offered("shared", "narrow")) for _ in range(3)))
    assert served.slots._turns == {}


async def test_what_cannot_be_loaded_is_refused_and_the_next_one_is_served(served: AdapterRig) -> None:
    wide = RandomAdapter(served.reference.model, rank=9, seed=4, names=("q_proj",))
    served.reference.adapters["too wide"] = wide
    with pytest.raises(RequestRefused, match=r"adapter.rank: 9; this generator takes ranks up to 8 .adapters.max_rank"):
        await served.sample(served.offered("x", "too wide"))
    offered = served.offered("x", "narrow")
    served.files[offered.name] = [served.files[offered.name][0], b"no tensors"]
    with pytest.raises(RequestRefused, match="vLLM does not load adapter x"):
        await served.sample(offered)
    answer = await served.sample(served.offered("x", "narrow"))
    assert served.reference.gap(answer.sequences[0], [served.reference.adapters["narrow"]] * 12) < CLOSE


async def test_the_prompt_is_scored_and_the_likeliest_tokens_are_given(served: AdapterRig) -> None:
    adapter = served.reference.adapters["wide"]
    answer = await served.sample(
        served.offered("scored", "wide"), prompt_logprobs=True, top_of_prompt=2, top_of_samples=3, temperature=0.5
    )
    expected = served.reference.logprobs(PROMPT, [adapter] * (len(PROMPT) - 1), 1)
    assert answer.prompt_logprobs == pytest.approx(expected, abs=CLOSE)
    assert answer.top_of_prompt is not None
    assert [len(row) for row in answer.top_of_prompt.logprobs] == [2] * (len(PROMPT) - 1)
    assert all(row[0] >= own - CLOSE for row, own in zip(answer.top_of_prompt.logprobs, expected, strict=True))
    sequence = answer.sequences[0]
    assert sequence.top is not None
    assert [len(row) for row in sequence.top.token_ids] == [3] * 12
    assert all(sum(map(torch.tensor(row).exp().__getitem__, range(3))) <= 1.001 for row in sequence.top.logprobs)


async def test_prompts_are_scored_by_their_own_adapters_beside_completions_of_others(served: AdapterRig) -> None:
    """vLLM takes the adapters of the tokens that are sampled in the same step, and dies if there are not as many."""
    names = (None, "narrow", "wide", "third")
    running = [asyncio.create_task(served.sample(None, max_tokens=200, namespace=f"beside-{n}")) for n in range(3)]
    chosen = [(name, None if name is None else served.offered(f"prompt-{name}", name)) for name in names[:3]]
    for number, (name, offered) in enumerate(chosen * 2):
        asked = served.sample(offered, n=2, prompt_logprobs=True, max_tokens=4, namespace=f"prompt-{number}")
        answer = await asked
        adapter = None if name is None else served.reference.adapters[name]
        expected = served.reference.logprobs(PROMPT, [adapter] * (len(PROMPT) - 1), 1)
        assert answer.prompt_logprobs == pytest.approx(expected, abs=CLOSE), name
    await asyncio.gather(*running)


async def test_completions_at_temperature_0_are_as_many_as_asked_for_and_all_the_same(served: AdapterRig) -> None:
    answer = await served.sample(served.offered("greedy", "wide"), n=3, temperature=0)
    assert len(answer.sequences) == 3
    assert len({sequence.token_ids for sequence in answer.sequences}) == 1


async def test_completions_end_where_they_are_told_to(served: AdapterRig) -> None:
    free = (await served.sample(None, seed=5, max_tokens=40)).sequences[0]
    again = (await served.sample(None, seed=5, max_tokens=40)).sequences[0]
    assert (free.token_ids, free.finish_reason) == (again.token_ids, "length")
    at = next(n for n, token in enumerate(free.token_ids) if n > 5 and token not in free.token_ids[:n])
    stopped = (await served.sample(None, seed=5, max_tokens=40, stop_token_ids=(free.token_ids[at],))).sequences[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: at + 1], "stop")


async def test_a_text_ends_a_completion(served: AdapterRig) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(served.reference.model.name_or_path)
    free = (await served.sample(None, seed=6, max_tokens=60)).sequences[0]
    letters = [words.decode([token]) for token in free.token_ids]
    plain = [n for n in range(1, 58) if all(each.isascii() and each.isprintable() for each in letters[n : n + 2])]
    at = plain[0]
    text = "".join(letters[at : at + 2])
    stopped = (await served.sample(None, seed=6, max_tokens=60, stop_texts=(text,))).sequences[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert words.decode(stopped.token_ids).endswith(text)
