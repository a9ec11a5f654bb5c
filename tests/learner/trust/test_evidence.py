"""The test of generators: who is named and why, and what honest generators may differ in without being named."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from learner.trust.evidence import NEAR, outcomes_of
from learner.trust.tokens import step_tokens
from tests.learner.trust.streams import (
    ENTROPY,
    PROBABILITIES,
    SampledRow,
    Sampler,
    new_test,
    run,
    sampled,
    step,
    without_entropies,
)

HONEST: Mapping[str, Sampler] = dict.fromkeys(("b", "c", "d"), sampled)


ROWS_OF_TOKENS = ("processes", "lags", "groups", "texts", "old_cache", "theirs", "ours", "entropies")


def tempered(temperature: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    powers = PROBABILITIES ** (1 / temperature)
    return np.asarray(powers / powers.sum())


def edited(random: np.random.Generator) -> SampledRow:
    row = sampled(random)
    changed = random.random(len(row.ours)) < 0.02
    return replace(row, ours=np.where(changed, -6.0, row.ours))


def stated_too_low(random: np.random.Generator) -> SampledRow:
    row = sampled(random)
    return replace(row, theirs=row.theirs - 0.2)


def repeating(random: np.random.Generator) -> SampledRow:
    return replace(sampled(random), whole=(1, 1))


CHEATS: Mapping[str, Sampler] = {
    "gap": partial(sampled, noise=0.04),
    "tail": edited,
    "ratio": stated_too_low,
    "likely": partial(sampled, probabilities=tempered(0.7)),
    "unlikely": partial(sampled, probabilities=tempered(1.5)),
    "repeat": repeating,
}


def test_outcomes_of_a_token_by_hand() -> None:
    """exp(-0.5 - -1) - 1 = 0.649 for a token whose logprob is stated half a nat too low."""
    tokens = step(np.random.default_rng(0), {"a": sampled})
    tokens = replace(tokens, ours=np.full(len(tokens.ours), -0.5), theirs=np.full(len(tokens.ours), -1.0))

    assert outcomes_of(tokens).rows[:, 0] == pytest.approx([0.5, 0.0, 0.6487, ENTROPY - 0.5], abs=1e-4)


def test_outcomes_have_bounds_on_the_sides_that_could_decide_alone() -> None:
    tokens = step(np.random.default_rng(0), {"a": sampled})
    tokens = replace(tokens, ours=np.full(len(tokens.ours), -40.0), theirs=np.full(len(tokens.ours), -80.0))

    assert outcomes_of(tokens).rows[:, 0].tolist() == [1.0, 1.0, 4.0, -4.0]


@pytest.mark.parametrize("test", list(CHEATS))
def test_a_cheat_is_named_by_the_test_that_is_made_for_it_and_nobody_else_is(test: str) -> None:
    found = run({"cheat": CHEATS[test], **HONEST}, steps=60)

    assert [(one.name, one.instance) for one in found] == [("cheat", "cheat-process")]
    assert found[0].test == test
    assert found[0].evidence >= 16
    assert found[0].text.startswith("generator cheat samples otherwise than it says: ")
    assert "nan" not in found[0].text


@pytest.mark.parametrize("seed", range(2))
def test_honest_generators_are_not_named(seed: int) -> None:
    assert run({"a": sampled, **HONEST}, steps=120, seed=seed) == []


def test_what_all_differ_in_names_nobody() -> None:
    """Tokens of one policy behind the learner's, less and less likely, of fourfold noise."""
    common = partial(sampled, noise=0.04, drift=-0.3, lag=1)

    assert run(dict.fromkeys(("a", "b", "c"), common)) == []


def test_a_generator_that_samples_older_versions_is_compared_at_their_lag() -> None:
    older = partial(sampled, noise=0.1, drift=-0.1, lag=2)

    assert run({"a": older, "b": older, "c": sampled, "d": sampled}) == []


def test_a_lag_at_which_nobody_else_samples_says_nothing() -> None:
    assert run({"a": partial(sampled, noise=0.3, drift=-0.2, lag=3), **HONEST}) == []


def test_tokens_that_are_far_behind_or_of_an_old_cache_say_nothing() -> None:
    def of_old_cache(random: np.random.Generator) -> SampledRow:
        row = sampled(random, noise=0.5, drift=-1.0)
        return replace(row, old_cache=np.ones(len(row.ours), dtype=np.bool_))

    far = partial(sampled, noise=0.5, drift=-1.0, lag=NEAR + 1)

    assert run({"a": of_old_cache, "b": far, **HONEST}) == []


def test_one_that_says_just_what_the_learner_says_makes_nobody_look_bad() -> None:
    assert run({"parrot": partial(sampled, noise=0.0), "b": sampled, "c": sampled}) == []


def test_of_two_generators_the_one_that_is_further_off_is_named() -> None:
    found = run({"a": sampled, "b": partial(sampled, noise=0.05)})

    assert [one.name for one in found] == ["b"]


def test_of_two_the_honest_one_is_not_named_for_what_the_other_samples_too_likely() -> None:
    found = run({"a": sampled, "b": CHEATS["likely"]})

    assert [one.name for one in found] == ["b"]


def test_a_generator_alone_is_held_to_the_tolerance_alone() -> None:
    assert run({"a": CHEATS["gap"]}, alone=0.05) == []
    assert run({"a": CHEATS["likely"]}, alone=0.05) == []
    assert [one.test for one in run({"a": CHEATS["gap"]}, alone=0.01)] == ["gap"]


def test_one_that_was_named_is_no_measure_for_the_others() -> None:
    """Of three, two cheats would set the median once there is nobody else."""
    random, test = np.random.default_rng(0), new_test()
    generators: dict[str, Sampler] = {"cheat": partial(sampled, noise=0.2), "late": sampled, "c": sampled}
    for _ in range(30):
        test.observe(step(random, generators))
    generators["late"] = partial(sampled, noise=0.05)
    for _ in range(60):
        test.observe(step(random, generators))

    assert [one.name for one in test.suspicions()] == ["cheat", "late"]


def test_a_cheat_that_was_honest_for_long_is_named_all_the_same() -> None:
    random, test = np.random.default_rng(0), new_test()
    for _ in range(100):
        assert test.observe(step(random, {"a": sampled, **HONEST})) == []
    found = [one for _ in range(60) for one in test.observe(step(random, {"a": CHEATS["likely"], **HONEST}))]

    assert [one.name for one in found] == ["a"]


def test_without_entropies_the_gap_tells() -> None:
    random, test = np.random.default_rng(0), new_test()
    generators = {"hot": CHEATS["likely"], "off": CHEATS["gap"], **HONEST}
    found = [one for _ in range(60) for one in test.observe(without_entropies(step(random, generators)))]

    assert [(one.name, one.test) for one in found] == [("off", "gap")]


def test_the_evidence_is_by_generator_and_never_below_zero() -> None:
    random, test = np.random.default_rng(0), new_test()
    for _ in range(40):
        test.observe(step(random, {"cheat": CHEATS["gap"], **HONEST}))
    found = test.evidence()

    assert set(found) == {"cheat", "b", "c", "d"}
    assert found["cheat"] > 16
    assert found["b"] == found["c"] == found["d"] == 0.0


def test_a_wider_tolerance_names_no_one_within_it() -> None:
    random, test = np.random.default_rng(0), new_test(tolerance=5.0)
    found = [one for _ in range(60) for one in test.observe(step(random, {"a": CHEATS["gap"], **HONEST}))]

    assert found == []


def test_steps_of_which_nothing_is_known_change_nothing() -> None:
    nothing = step_tokens([], [], ours=np.zeros(0), entropies=np.zeros(0), version=4)
    random, test = np.random.default_rng(0), new_test()
    for _ in range(2):
        assert test.observe(nothing) == []
    some = step(random, {"a": sampled})
    unsaid = replace(some, **{name: getattr(some, name)[:0] for name in ROWS_OF_TOKENS})
    for tokens in (unsaid, some, nothing, unsaid):
        assert test.observe(tokens) == []

    assert test.evidence() == {"a": 0.0}


def test_a_step_of_more_processes_than_are_remembered_is_tested_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.trust.evidence.MAX_PROCESSES", 2)
    random, test = np.random.default_rng(0), new_test()
    generators: dict[str, Sampler] = {"cheat": CHEATS["gap"], **HONEST}
    found = [one.name for _ in range(60) for one in test.observe(step(random, generators))]

    assert found == ["cheat"]
    assert list(test.evidence()) == ["cheat", "b", "c", "d"]
    test.observe(step(random, {"c": sampled}))
    assert list(test.evidence()) == ["d", "c"], "those of the newest steps"
