"""A learner's adapters in a real engine: sent alone to who holds their base weights, exact for each stamped token."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import pytest_asyncio

from generator.weights.plan import WeightSyncError
from learner.weights.probe import Probe
from learner.weights.process_group import lay_out
from learner.weights.published import BaseWeights, Snapshot
from protocol.fleet import LowRank, Prepare
from tests.generator.conftest import CompletionSoFar, Rig, pack, sample, start_rig
from tests.generator.real_sync import served
from tests.generator.test_adapters import CLOSE, AdaptedReference, RandomAdapter
from tests.learner.tenants.tiny import make_tiny_model
from tests.learner.weights.publishing import OPTIONS, PublishingLearner, learner

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 8
TEXT = (40, 41, 45, 50, 60, 44)
PROMPT = (3, 4, 5, 6, 7)


class AdaptedPolicy:
    """The learner's part: base weights that are not those of the engine's folder, and an adapter of each version."""

    def __init__(self, rig: Rig, reference: AdaptedReference) -> None:
        self.rig, self.reference = rig, reference
        self.adapters: dict[str, RandomAdapter] = {}
        weights = {name: value for name, value in reference.model.state_dict().items() if name != "lm_head.weight"}
        for value in weights.values():
            value.mul_(1.05)
        self._base = lay_out(list(weights.items()), bucket_bytes=60_000)
        self._sent: dict[int, BaseWeights] = {}

    def snapshot(self, version: int, *, rank: int = RANK) -> Snapshot:
        adapter = RandomAdapter(self.reference.model, rank=rank, seed=version, names=LAYERS)
        self.adapters[f"1.{version}"] = adapter
        names = [(f"base_model.model.{name}.lora_{side}.weight", number) for name in adapter.factors
                 for number, side in enumerate("AB")]  # fmt: skip
        factors = [(name, adapter.factors[name[17:-14]][number]) for name, number in names]
        logprobs = self.reference.logprobs(TEXT, [adapter] * (len(TEXT) - 1), 1)
        return Snapshot(
            version=version,
            buckets=lay_out(factors, bucket_bytes=60_000),
            probe=Probe(texts=(TEXT,), logprobs=tuple(logprobs)),
            base=self._sent.setdefault(rank, BaseWeights(buckets=self._base, rank=rank, alpha=32.0)),
        )

    def gap(self, completion: CompletionSoFar, versions: Sequence[str] | None = None) -> float:
        """Of its logprobs from those under the stamped version of each token, on the keys of those before."""
        stamped = [span.version for span in completion.spans for _ in range(span.start, span.end)]
        adapters = [self.adapters[version] for version in versions or stamped]
        own = self.reference.logprobs((*PROMPT, *completion.token_ids), adapters, len(PROMPT))
        return max(abs(ours - theirs) for ours, theirs in zip(own, completion.behavior_logprobs, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def policy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdaptedPolicy]:
    folder = tmp_path_factory.mktemp("adapted") / "model"
    make_tiny_model(folder, hidden=64)
    rig = await start_rig(
        folder=folder, tied=True, policy=object(),  # type: ignore[arg-type]
        change=lambda options: replace(options, policy_rank=RANK, stream_interval=1),
    )  # fmt: skip
    yield AdaptedPolicy(rig, AdaptedReference(folder))
    await rig.engine.shutdown()


async def publish(ours: PublishingLearner, policy: AdaptedPolicy, version: int, *, rank: int = RANK) -> None:
    ours.publisher.offer(policy.snapshot(version, rank=rank))
    await ours.until(lambda: bool(ours.reports) and ours.reports[-1].version == version)


def begun(rig: Rig, sampling: asyncio.Task[list[CompletionSoFar]]) -> bool:
    """The engine works on it, or has done so since somebody looked last."""
    return rig.engine.counters().running > 0 or sampling.done()


async def test_completions_run_on_over_adapters_that_are_sent_alone(policy: AdaptedPolicy) -> None:
    rig = policy.rig
    async with learner(replace(OPTIONS, commit_timeout_s=20.0)) as ours, served(rig, ours) as generator:
        generator.join(ours)
        await publish(ours, policy, 1)
        for version in range(2, 8):  # the first broadcast has a group to open: what was sampled may end before it
            running = asyncio.create_task(sample(rig, n=1, max_tokens=800))
            await ours.until(partial(begun, rig, running))
            await publish(ours, policy, version)
            (completion,) = await running
            if len(completion.spans) == 2:
                break
        before, after = f"1.{version - 1}", f"1.{version}"
        assert [span.version for span in completion.spans] == [before, after]
        assert policy.gap(completion) < CLOSE
        first, second = (span.end - span.start for span in completion.spans)
        assert policy.gap(completion, [before] * (first + 1) + [after] * (second - 1)) > 1e-3
        assert all(report.probe_gap < CLOSE for report in ours.reports)
        assert ours.reports[1].sent_bytes < ours.reports[0].sent_bytes / 4, "the base weights were not sent again"


async def test_an_adapter_to_other_base_weights_than_are_held_is_refused(policy: AdaptedPolicy) -> None:
    layer = "model.layers.0.self_attn.q_proj"
    factors = zip("AB", policy.adapters["1.1"].factors[layer], strict=True)
    buckets = pack({f"base_model.model.{layer}.lora_{side}.weight": factor for side, factor in factors})
    plan = Prepare(
        version="1.9", epoch=0, buckets=tuple(bucket.spec for bucket in buckets),
        adapter=LowRank(base="others", rank=RANK, alpha=32.0),
    )  # fmt: skip
    with pytest.raises(WeightSyncError, match="an adapter to base weights others came, held are"):
        await policy.rig.engine.stage_files(plan, paths=["/nowhere"])


async def test_what_layers_cannot_hold_is_added_to_the_weights(policy: AdaptedPolicy) -> None:
    """Rank 9, of layers for 8: the base weights are sent once more, for the engine keeps them now."""
    rig = policy.rig
    async with learner(replace(OPTIONS, commit_timeout_s=20.0)) as ours, served(rig, ours) as generator:
        generator.join(ours)
        for version in (11, 12):
            await publish(ours, policy, version, rank=9)
            (completion,) = await sample(rig, n=1, max_tokens=20)
            assert {span.version for span in completion.spans} == {f"1.{version}"}
            assert policy.gap(completion) < CLOSE
        assert ours.reports[1].sent_bytes < ours.reports[0].sent_bytes / 4
