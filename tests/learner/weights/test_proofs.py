"""Generators that serve something else than they were sent are expelled by name, and the run goes on."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.config import LearnerConfig
from learner.event_loop import publisher_options
from learner.weights.fleet import FleetMember, JoinRefused
from learner.weights.probe import Probe, ProbeGap
from learner.weights.proofs import SURE, Proof, Proofs, median_of_others
from learner.weights.provenance import LoadedWeights, Provenance
from learner.weights.published import PackedWeights
from learner.weights.publisher import NoGeneratorIsRight
from protocol.fleet import CommitResult, FormerLoad
from protocol.model import PolicyVersion
from tests.learner.generators import ScriptedGenerator, announcement
from tests.learner.weights.publishing import OPTIONS, PROBE, learner, snapshot


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_a_generator_with_a_wrong_probe_is_expelled_by_name_and_stays_out() -> None:
    async with ScriptedGenerator("a", gap=0.2).running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, b)
        await ours.until(lambda: len(ours.fleet.members()) == 1)
        assert all("a" not in serving for serving in ours.history)
        with pytest.raises(JoinRefused, match=r"generator a was expelled: .* by 0\.2 nats in the mean.* at most 0\.1"):
            ours.join(a)
        await ours.publish(1, b)


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.weights.proofs._PROBE_REST_S", 0.0)


@pytest.mark.usefixtures("no_rest")
async def test_a_probe_that_had_no_answer_is_asked_for_again_and_proves_then() -> None:
    async with ScriptedGenerator("a", misses=2).running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        assert a.probed == ["1.0", "1.0"]
        a.gap = 0.01
        await ours.publish(1, a)
        assert ours.reports[-1].probe_gap == pytest.approx(0.01)


@pytest.mark.usefixtures("no_rest")
async def test_without_an_answer_to_any_probe_nothing_is_proven_until_there_is_one() -> None:
    options = replace(OPTIONS, pull_attempts=100)
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner(options) as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.gap, a.misses = 0.2, 10**6
        await ours.publish(1, b)
        await ours.until(lambda: len(a.pulls) > 2)
        assert ours.serving == {"b": "1.1"}
        assert len(a.probed) >= 2 * len(a.commits[1:-1])
        a.gap, a.misses = 0.0, 0
        await ours.until_served(a=1, b=1)


@pytest.mark.usefixtures("no_rest")
async def test_one_that_never_answers_a_probe_is_sent_away_where_others_serve() -> None:
    options = replace(OPTIONS, pull_attempts=2)
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner(options) as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.misses = 10**6
        await ours.publish(1, b)
        await ours.until(lambda: [member.generator_id for member in ours.fleet.members()] == ["b"])
        with pytest.raises(JoinRefused, match=r"no answer to the probe of version 1\.1 in 3 tries: it is not proven"):
            ours.join(a)


async def test_a_gap_that_all_generators_share_expels_nobody_and_the_run_goes_on() -> None:
    """As between a learner in float32 and engines in bfloat16."""
    names = [ScriptedGenerator(name, gap=0.09) for name in "abc"]
    async with names[0].running() as a, names[1].running() as b, names[2].running() as c, learner() as ours:
        ours.join(a, b, c)
        for version in range(3):
            await ours.publish(version, a, b, c)
            for generator in names:
                generator.gap += 0.003


async def test_one_whose_gap_is_far_larger_than_that_of_like_generators_is_an_outlier() -> None:
    options = replace(OPTIONS, probe_tolerance=0.5)
    odd = ScriptedGenerator("a", gap=0.01)
    good = ScriptedGenerator("b", gap=0.01), ScriptedGenerator("c", gap=0.02)
    async with odd.running() as a, good[0].running() as b, good[1].running() as c, learner(options) as ours:
        ours.join(a, b, c)
        await ours.publish(0, a, b, c)
        odd.gap = 0.2
        await ours.publish(1, b, c)
        with pytest.raises(JoinRefused, match=r"generator a was expelled: .* from like generators at most"):
            ours.join(a)


async def test_one_that_is_wrong_at_a_few_tokens_only_is_an_outlier() -> None:
    options = replace(OPTIONS, probe_tolerance=1.0)
    odd = ScriptedGenerator("a", gap=2.0, each=7)
    async with odd.running() as a, ScriptedGenerator("b").running() as b, learner(options) as ours:
        ours.join(b)
        await ours.publish(0, b)
        ours.join(a)
        await ours.until(lambda: [member.generator_id for member in ours.fleet.members()] == ["b"])


async def test_where_all_are_wrong_the_run_ends_and_says_so_and_nobody_is_expelled() -> None:
    names = [ScriptedGenerator(name, gap=0.2 + 0.1 * number) for number, name in enumerate("ab")]
    with pytest.RaisesGroup(NoGeneratorIsRight, flatten_subgroups=True) as raised:
        async with names[0].running() as a, names[1].running() as b, learner(silence_s=0.5) as ours:
            ours.join(a, b)
            ours.publisher.offer(snapshot(0))
            await ours.publishing
    text = str(raised.value.exceptions[0])
    assert "of 2 generators none serves" in text
    assert "a: its logprobs of the probe differ by 0.2 nats" in text
    assert "b: its logprobs of the probe differ by 0.3 nats" in text


async def test_a_doubted_generator_serves_nothing_and_is_expelled_as_soon_as_another_one_is_right() -> None:
    async with ScriptedGenerator("a", gap=0.2).running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        await ours.until(lambda: ours.fleet.all_doubted)
        ours.join(a)
        ours.publisher.offer(snapshot(1))
        ours.join(b)
        await ours.until(lambda: [member.generator_id for member in ours.fleet.members()] == ["b"])
        assert a.versions == ["1.0"], "a doubted generator is sent nothing more"


async def test_a_probe_of_the_learners_own_that_is_not_finite_expels_nobody() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        broken = Probe(texts=PROBE, logprobs=(math.nan,) * 7)
        a.gap, b.gap = math.nan, 3.0
        ours.publisher.offer(replace(snapshot(1), probe=broken))
        await ours.until_served(a=1, b=1)
        a.gap = b.gap = 0.0
        await ours.publish(2, a, b)


async def test_logprobs_that_are_not_finite_are_a_generators_own_fault_where_others_are_right() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.gap = math.nan
        await ours.publish(1, b)
        with pytest.raises(JoinRefused, match=r"did not answer the probe of version 1\.1 with a finite logprob"):
            ours.join(a)


async def test_a_generator_that_serves_the_version_before_is_expelled_though_the_gap_is_small() -> None:
    """The update moves the logprobs by less than the tolerance, and by less than the noise."""
    random = np.random.default_rng(0)
    texts = tuple(tuple(range(number, number + 17)) for number in range(16))
    truth = np.cumsum([random.normal(-1.0, 0.3, 256), *random.normal(0.0, 0.05, (3, 256))], axis=0)
    stale, right = ScriptedGenerator("a"), ScriptedGenerator("b")
    stale.says = lambda version: truth[max(version - 1, 0)] + random.normal(0.0, 0.05, 256)
    right.says = lambda version: truth[version] + random.normal(0.0, 0.05, 256)
    async with stale.running() as a, right.running() as b, learner() as ours:
        ours.join(a, b)
        for version in range(4):
            before = tuple(truth[version - 1]) if version else ()
            probe = Probe(texts=texts, logprobs=tuple(truth[version]), before=before)
            ours.publisher.offer(replace(snapshot(version), probe=probe))
            await ours.until(lambda at=f"1.{version}": ours.serving.get("b") == at)  # type: ignore[misc]
        await ours.until(lambda: [member.generator_id for member in ours.fleet.members()] == ["b"])
        with pytest.raises(JoinRefused, match=r"not those of version 1\.\d but of the one before .*serves old weights"):
            ours.join(a)


async def test_the_generator_whose_checksum_differs_from_the_others_is_expelled() -> None:
    odd = ScriptedGenerator("a")
    good = ScriptedGenerator("b"), ScriptedGenerator("c")
    async with odd.running(), good[0].running(), good[1].running(), learner() as ours:
        ours.join(odd, *good)
        await ours.publish(0, odd, *good)
        odd.loads_wrong = True
        await ours.publish(1, *good)
        with pytest.raises(JoinRefused, match="generator a was expelled: the checksum of its loaded weights at"):
            ours.join(odd)
        await ours.publish(2, *good)


async def test_a_wrong_generator_does_not_take_a_good_one_with_it() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.gap, a.loads_wrong = 0.2, True
        await ours.publish(1, b)
        assert [member.generator_id for member in ours.fleet.members()] == ["b"]


async def test_a_joiner_is_compared_with_those_that_serve_the_same_version() -> None:
    wrong = ScriptedGenerator("b", loads_wrong=True)
    async with ScriptedGenerator("a").running() as a, wrong.running() as b, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        ours.join(b)
        await ours.until(lambda: len(ours.fleet.members()) == 1)
        assert ours.serving == {"a": "1.0"}
        with pytest.raises(JoinRefused, match="the other generators' is"):
            ours.join(b)


async def test_a_generator_that_did_not_load_what_it_was_sent_is_expelled() -> None:
    stale = ScriptedGenerator("a", stale_checksum="0123")
    async with stale.running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        ours.publisher.offer(snapshot(1))
        await ours.until(lambda: not ours.fleet.members())
        text = r"the checksum of its loaded weights is 0123 at version 1\.1 as it was at 1\.0, .* did not load them"
        with pytest.raises(JoinRefused, match=text):
            ours.join(a)


async def test_equal_weights_have_equal_checksums_and_nobody_is_to_blame() -> None:
    async with ScriptedGenerator("a", stale_checksum="0123").running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        again = snapshot(0)
        ours.publisher.offer(replace(again, version=1))
        await ours.until_served(a=1)


@pytest.mark.parametrize(
    ("known", "former", "sent", "wrong"),
    [
        (None, FormerLoad(version="1.9", digest="d9", fingerprint="f9"), "d10", True),
        # A learner whose journal lost its end in a loss of power knows of an earlier version alone.
        (8, FormerLoad(version="1.9", digest="d9", fingerprint="f9"), "d10", True),
        (9, None, "d10", True),
        # The batch was trained again to the same weights, under the version of another life.
        (None, FormerLoad(version="1.9", digest="d9", fingerprint="f9"), "d9", False),
        (None, FormerLoad(version="1.8", digest="d8", fingerprint="f8"), "d10", False),
        (None, None, "d10", False),
    ],
)
def test_a_load_that_did_not_take_place_is_seen_by_a_learner_that_remembers_nothing_of_the_generator(
    known: int | None, former: FormerLoad | None, sent: str, wrong: bool
) -> None:
    member = FleetMember(announcement=announcement("g", "http://127.0.0.1:1"), last_seen=0.0)
    provenance = Provenance()
    if known is not None:
        provenance.prove(member.instance, LoadedWeights(PolicyVersion(1, known), f"d{known}", f"f{known}"))
    answer = CommitResult(version="2.10", fingerprint="f9", probe_logprobs=(-1.0,), load_s=0, pause_s=0, former=former)
    packed = PackedWeights(version=PolicyVersion(2, 10), buckets=(), digest=sent, probe=Probe(((1, 2),), (-1.0,)))
    proof = Proof(member=member, answer=answer, gap=ProbeGap(tokens=1, mean=1e-5, high=1e-5))
    verdict = Proofs(probe_tolerance=None, dtype="float32", provenance=provenance).judge([proof], packed)
    assert ["it did not load them" in why for why in verdict.outliers.values()] == [True] * wrong


def test_what_each_version_tells_of_old_weights_adds_up_until_it_is_believed() -> None:
    about = announcement("g", "http://127.0.0.1:1")
    proofs = Proofs(probe_tolerance=None, dtype="float32", provenance=Provenance())
    doubted = []
    for number, age in enumerate((0.4 * SURE, 0.4 * SURE, -0.1 * SURE, 0.4 * SURE)):
        answer = CommitResult(version=f"1.{number}", fingerprint="f", probe_logprobs=(-1.0,), load_s=0, pause_s=0)
        gap = ProbeGap(tokens=1, mean=1e-5, high=1e-5, age=age)
        proof = Proof(member=FleetMember(announcement=about, last_seen=0.0), answer=answer, gap=gap)
        packed = PackedWeights(
            version=PolicyVersion(1, number), buckets=(), digest="d", probe=Probe(((1, 2),), (-1.0,))
        )
        doubted.append(bool(proofs.judge([proof], packed).doubted))
    assert doubted == [False, False, False, True]


@pytest.mark.parametrize(
    ("as_computed", "dtype", "believed"),
    [(True, "bfloat16", True), (True, "", True), (False, "bfloat16", False), (True, "float32", False)],
)
def test_weights_that_are_rounded_after_the_learners_step_are_not_called_old(
    as_computed: bool, dtype: str, believed: bool
) -> None:
    about = announcement("g", "http://127.0.0.1:1").model_copy(update={"dtype": dtype})
    answer = CommitResult(version="1.0", fingerprint="f", probe_logprobs=(-1.0,), load_s=0, pause_s=0)
    gap = ProbeGap(tokens=1, mean=1e-3, high=1e-3, age=SURE + 1)
    proof = Proof(member=FleetMember(announcement=about, last_seen=0.0), answer=answer, gap=gap)
    packed = PackedWeights(version=PolicyVersion(1, 0), buckets=(), digest="d", probe=Probe(((1, 2),), (-1.0,)))
    proofs = Proofs(probe_tolerance=None, dtype="bfloat16", as_computed=as_computed, provenance=Provenance())
    assert bool(proofs.judge([proof], packed).doubted) is believed


@pytest.mark.parametrize(
    ("training", "as_computed"),
    [
        ({}, True),
        ({"dtype": "bfloat16", "publish_dtype": "bfloat16"}, True),
        ({"publish_dtype": "bfloat16"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"lora": {"rank": 2}}, True),
        ({"dtype": "bfloat16", "publish_dtype": "bfloat16", "lora": {"rank": 2}}, False),
    ],
)
def test_what_is_published_is_what_the_learner_computes_with_only_if_nothing_is_rounded_in_between(
    training: dict[str, object], as_computed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = LearnerConfig.model_validate({"model": "m", "steps": 1, "training": training})
    assert publisher_options(config, 1).as_computed is as_computed
    assert ("trained in float32 but published in bfloat16" in caplog.text) is (
        training == {"publish_dtype": "bfloat16"}
    )


class CountedGap(ProbeGap):
    """Counts how often one of them is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        CountedGap.looks += name == "mean"
        return super().__getattribute__(name)


def test_judging_a_fleet_at_once_looks_at_each_gap_a_few_times_however_many_there_are() -> None:
    count = 60
    proofs = []
    for number in range(count):
        about = announcement(f"g{number}", "http://127.0.0.1:1")
        answer = CommitResult(version="1.0", fingerprint="f", probe_logprobs=(-1.0,), load_s=0, pause_s=0)
        gap = CountedGap(tokens=1, mean=1e-3 * (1 + number % 2), high=1e-3)
        proofs.append(Proof(member=FleetMember(announcement=about, last_seen=0.0), answer=answer, gap=gap))
    packed = PackedWeights(version=PolicyVersion(1, 0), buckets=(), digest="d", probe=Probe(((1, 2),), (-1.0,)))
    CountedGap.looks = 0
    verdict = Proofs(probe_tolerance=None, dtype="float32", provenance=Provenance()).judge(proofs, packed)
    assert not verdict.outliers
    assert CountedGap.looks < 20 * count


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_the_median_of_the_others_is_what_it_says(values: list[int], data: st.DataObject) -> None:
    ordered = sorted(float(value) for value in values)
    assert median_of_others(ordered, None) == statistics.median(ordered)
    if len(ordered) > 1:
        left_out = data.draw(st.integers(0, len(ordered) - 1))
        others = [value for number, value in enumerate(ordered) if number != left_out]
        assert median_of_others(ordered, ordered[left_out]) == statistics.median(others)
