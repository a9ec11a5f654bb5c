"""Numbers of `headway plan`: memory and rates by arithmetic, throughput and lag by the simulator in virtual time."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headway.measured_rates import MeasuredRates
from headway.model_shape import Shape
from headway.planner import (
    DEVICES,
    DeviceSplit,
    Forecast,
    Plan,
    as_text,
    assumed,
    engine_times,
    forecast,
    generator_bytes,
    lags,
    learner_bytes,
    lengths_of,
    plan_of,
    plan_run,
    publish_seconds,
    rehearsal_of,
    rehearsed,
    splits,
    train_seconds,
)
from services.config.sources import ConfigError

SMALL = Shape(parameters=5e8, layers=24, hidden=896, kv_width=128, vocabulary=151_936)
PLAN = Plan(shape=SMALL, device=DEVICES["H100"], devices=4, lengths=(200, 400, 600), groups=4, group_size=4)
GIVEN = {
    "--parameters": "5e8", "--layers": "24", "--hidden": "896", "--kv-width": "128", "--vocabulary": "151936",
    "--device": "H100", "--devices": "4", "--lengths": "200,400,600",
}  # fmt: skip


def test_memory_is_of_weights_cache_and_optimizer() -> None:
    token = 2 * 24 * 128 * 2
    assert generator_bytes(PLAN, 1, 256) == pytest.approx(2 * 2 * 5e8 + 256 * PLAN.context * token + 2e9)
    assert generator_bytes(PLAN, 1, 1) == pytest.approx(2 * 2 * 5e8 + (PLAN.prompt + 600) * token + 2e9), "the longest"
    assert learner_bytes(PLAN, 1) - learner_bytes(PLAN, 2) == pytest.approx(18 * 5e8 / 2)


def test_ranks_that_share_rows_share_the_longest_sequence_and_send_each_other_heads() -> None:
    long = replace(PLAN, lengths=(100_000,))
    shared = replace(long, sequence_parallel=4)
    rows = [max(8192, (PLAN.prompt + 100_000) / ranks) for ranks in (1, 4)]
    of_a_token = 2 * 2 * PLAN.shape.layers * PLAN.shape.hidden
    assert learner_bytes(long, 4) - learner_bytes(shared, 4) == pytest.approx((rows[0] - rows[1]) * of_a_token)
    assert learner_bytes(replace(PLAN, sequence_parallel=4), 4) == learner_bytes(PLAN, 4)
    assert train_seconds(shared, 4) > train_seconds(long, 4)
    assert {split.learner_devices % 2 for split in splits(replace(PLAN, sequence_parallel=2))} == {0}
    with pytest.raises(
        ConfigError, match="--sequence-parallel: got 9, expected at most the learner's devices, 3 of --devices 4"
    ):
        splits(replace(PLAN, sequence_parallel=9))


def test_a_reference_takes_its_weights_and_a_forward_a_critic_as_much_as_the_policy() -> None:
    reference, critic = replace(PLAN, reference=True), replace(PLAN, critic=True)
    assert learner_bytes(reference, 2) - learner_bytes(PLAN, 2) == pytest.approx(2 * 5e8 / 2)
    assert learner_bytes(critic, 2) - learner_bytes(PLAN, 2) == pytest.approx(18 * 5e8 / 2)
    assert train_seconds(reference, 2) / train_seconds(PLAN, 2) == pytest.approx(6 / 5)
    assert train_seconds(critic, 2) / train_seconds(PLAN, 2) == pytest.approx(2)


def test_a_greedy_answer_takes_its_part_of_sampling_and_is_not_trained() -> None:
    """Groups of 4: of five completions four are trained on. Prompts are computed once for all of them."""
    plain, greedy = replace(PLAN, prompt=0), replace(PLAN, prompt=0, greedy=True)
    one, other = splits(plain)[0], splits(greedy)[0]
    assert other == one, "a token costs what it did, and the learner trains as many"
    assert other.sampling(greedy) == pytest.approx(0.8 * one.sampling(plain))
    assert other.training(greedy) == one.training(plain)
    rehearsal, before = rehearsal_of(greedy, other), rehearsal_of(plain, one)
    assert rehearsal["at_once"] == round(0.8 * before["at_once"])
    assert rehearsal["sequence_s"] == pytest.approx(before["sequence_s"] / 0.8)
    assert rehearsal["settings"]["capacity"] == math.ceil(other.engines * other.at_once / 5)
    assert "1 in 5 of the sampled tokens is not trained on" in " ".join(assumed(greedy, other))
    assert plan_of({**GIVEN, "--greedy": ""}).greedy
    assert not plan_of(GIVEN).greedy


def test_comparing_consecutive_gradients_keeps_one_more_and_leaves_the_weights_whole() -> None:
    aligned = replace(PLAN, alignment=True)
    assert learner_bytes(aligned, 1) - learner_bytes(PLAN, 1) == pytest.approx(4 * 5e8)
    # Of two ranks each has the other half of the weights besides, in bfloat16, and half of the copy.
    assert learner_bytes(aligned, 2) - learner_bytes(PLAN, 2) == pytest.approx((2 / 2 + 4 / 2) * 5e8)
    muon = replace(PLAN, optimizer="muon")
    assert learner_bytes(replace(muon, alignment=True), 2) - learner_bytes(muon, 2) == pytest.approx(4 * 5e8)
    assert "of the former gradient 4 more" in " ".join(assumed(aligned, splits(aligned)[0]))
    assert plan_of({**GIVEN, "--alignment": ""}).alignment
    assert not plan_of(GIVEN).alignment


def test_muon_keeps_one_mean_of_the_layers_matrices_and_shards_nothing() -> None:
    matrices = 5e8 - 2 * 151_936 * 896 - 896 * 49
    assert SMALL.matrices == pytest.approx(matrices)
    muon = replace(PLAN, optimizer="muon")
    activations = 8192 * 2 * (4 - 2) * SMALL.layers * SMALL.hidden  # in float32
    assert learner_bytes(muon, 1) - learner_bytes(PLAN, 1) == pytest.approx(
        12 * matrices + 16 * (5e8 - matrices) - 18 * 5e8 + activations
    )
    assert learner_bytes(muon, 2) == learner_bytes(muon, 1)
    reference = learner_bytes(replace(muon, reference=True), 2) - learner_bytes(muon, 2)
    assert reference == pytest.approx(4 * 5e8), "no stage but 3 takes a reference apart"
    assert "12 bytes for a parameter of layers' matrices and 16 for others, all in each rank" in " ".join(
        assumed(muon, splits(muon)[0])
    )


SEVEN = Shape(parameters=7.6e9, layers=28, hidden=3584, kv_width=512, vocabulary=152_064)


def test_long_sequences_fit_as_many_at_once_as_their_mean_leaves_room_for() -> None:
    plan = replace(PLAN, shape=SEVEN, devices=8, lengths=(8000, 16000, 32000))
    found = splits(plan)
    assert {split.engine_devices for split in found} == {1, 2, 4}, "each width that fits beside a learner"
    by_width = {split.engine_devices: split.at_once for split in found}
    assert 1 <= by_width[1] < by_width[2] < by_width[4] <= plan.at_once
    assert all(split.generator_gb <= 80 for split in found)


def test_the_devices_of_an_engine_add_up_their_results() -> None:
    free = replace(PLAN, device=replace(DEVICES["H100"], link_gb_s=1e9))
    assert engine_times(PLAN, 1, 64) == engine_times(free, 1, 64), "one has nobody to add up with"
    token_s, sequence_s = engine_times(PLAN, 4, 64)
    assert token_s > 2 * 24 * 1e-5
    sent = 2 * 24 * 896 * 2 * 2 * 3 / 4
    assert sequence_s - engine_times(free, 4, 64)[1] == pytest.approx(sent / 450e9, rel=1e-3)


def test_attention_is_counted_by_the_length_of_what_is_read_and_trained() -> None:
    longer = replace(PLAN, lengths=(32000,))
    per_token = train_seconds(longer, 1) / (16 * (256 + 32000))
    assert per_token > 2 * train_seconds(PLAN, 1) / (16 * (256 + 400)), "half of a long one's work is attention's"


def test_a_publish_goes_over_the_network() -> None:
    seventy = replace(PLAN, shape=replace(SEVEN, parameters=70e9))
    total_s, pause_s = publish_seconds(seventy)
    assert total_s - pause_s == pytest.approx(140e9 / (50e9 * 0.9) + 0.05)
    assert publish_seconds(replace(seventy, network=100.0))[0] > 10


def test_everything_that_is_neither_given_nor_measured_is_under_assumed() -> None:
    split = splits(PLAN)[0]
    said = " ".join(assumed(PLAN, split))
    for word in ("60% of 3350 GB/s", "all-reduce", "35% of the TFLOPS", "90% of 400 Gb/s", "neither a reference nor"):
        assert word in said
    known = MeasuredRates("old", token_s=0.01, sequence_s=0.001, train_s=1e-3, publish_s=2.0, pause_s=0.1)
    less = " ".join(assumed(replace(PLAN, measured=known), split))
    assert "TFLOPS" not in less
    assert "Gb/s" not in less
    assert "rates are those of old" in less
    assert "as fast as one of old, whatever the number of its devices" in less


def test_settings_that_a_run_has_otherwise_by_default_are_named() -> None:
    planned = replace(PLAN, at_once=256, in_flight=48)
    (told,) = [line for line in assumed(planned, splits(planned)[0]) if "run file" in line]
    for each in (
        "generator.engine.max_num_seqs = 256 (64)",
        "env-service.capacity = 48 (64)",
        'learner.training.dtype = "bfloat16" ("float32")',
        'learner.training.publish_dtype = "bfloat16" ("float32")',
        "learner.training.zero_stage = 3 (0)",
        "learner.training.microbatch_tokens = 8192 (16384)",
        "learner.training.gradient_checkpointing = true (false)",
    ):
        assert each in told
    usual = replace(PLAN, at_once=64, in_flight=64)
    assert not keys_to_set(usual) & {"generator.engine.max_num_seqs", "env-service.capacity"}


def test_the_stage_and_dtype_to_set_are_those_that_go_with_the_optimizer_and_the_devices() -> None:
    def stage(plan: Plan, devices: int) -> str:
        found = assumed(plan, replace(splits(plan)[0], learner_devices=devices))
        return "".join(re.findall(r"zero_stage = (\d)", " ".join(found)))

    assert [stage(PLAN, 2), stage(replace(PLAN, alignment=True), 2), stage(PLAN, 1)] == ["3", "2", ""]
    muon = replace(PLAN, optimizer="muon")
    assert stage(muon, 2) == ""
    assert "learner.training.dtype" not in keys_to_set(muon)
    assert "learner.training.dtype" not in keys_to_set(replace(PLAN, device=replace(PLAN.device, number_bytes=4)))


def keys_to_set(plan: Plan) -> set[str]:
    (told,) = [line for line in assumed(plan, splits(plan)[0]) if "run file" in line]
    return set(re.findall(r"([\w.-]+) = ", told))


def test_a_mixture_takes_the_memory_of_all_its_weights_and_the_time_of_those_that_a_token_meets() -> None:
    dense, mixture = (replace(PLAN, shape=replace(SMALL, active=active, met=0.25)) for active in (None, 1e8))
    assert generator_bytes(mixture, 1, 256) == generator_bytes(dense, 1, 256)
    assert learner_bytes(mixture, 1) == learner_bytes(dense, 1)
    attention = train_seconds(replace(PLAN, shape=replace(SMALL, active=0)), 1)
    assert train_seconds(mixture, 1) - attention == pytest.approx((train_seconds(dense, 1) - attention) / 5)
    assert engine_times(mixture, 1, 1)[0] == pytest.approx(engine_times(dense, 1, 1)[0] / 5)
    assert engine_times(mixture, 1, 256)[0] == pytest.approx(engine_times(dense, 1, 256)[0]), "256 meet every expert"
    assert engine_times(mixture, 1, 256)[1] < engine_times(dense, 1, 256)[1]


def test_the_split_with_the_highest_bound_comes_first() -> None:
    found = splits(PLAN)
    assert {split.generator_devices + split.learner_devices for split in found} == {4}
    assert {(split.generator_devices, split.engine_devices) for split in found} == {(1, 1), (2, 1), (3, 1), (2, 2)}
    bounds = [split.bound(PLAN) for split in found]
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"--devices": "1"}, "--devices: expected 2 or more"),
        ({"--devices": "many"}, "--devices: got 'many', expected a number of at least 1"),
        ({"--device": "H900"}, "--device: got 'H900', expected one of H100"),
        ({"--lengths": "long"}, "--lengths: got 'long', expected tokens"),
        ({"--run": "runs/none"}, "one of --lengths"),
        ({"--generator-devices": "4"}, "the learner needs one"),
        ({"--active": "6e8"}, "--active: got 6e+08, expected at most --parameters 5e+08"),
        ({"--optimizer": "sgd"}, "--optimizer: got 'sgd', expected adamw or muon"),
        ({"--max-lag": "-1"}, "--max-lag: got '-1', expected a number of at least 0"),
        ({"--model": "no/such/model"}, "expected the folder of a model"),
    ],
)
def test_an_error_names_what_is_wrong(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of({**GIVEN, **given})
    assert says in error.value.problems[0]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="--hidden is missing"):
        plan_of({name: value for name, value in GIVEN.items() if name != "--hidden"})


def test_a_word_that_is_no_option_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean --device"):
        plan_run(["--devise", "H100"])


@pytest.mark.parametrize(("parameters", "who"), [(4e11, "a generator"), (1.2e10, "the learner")])
def test_a_model_that_fits_nowhere_is_an_error(parameters: float, who: str) -> None:
    with pytest.raises(ConfigError, match=f"{who} does not fit: it needs"):
        splits(replace(PLAN, devices=2, shape=replace(SMALL, parameters=parameters)))


def test_too_few_devices_for_a_generator_are_no_fault_of_the_learner() -> None:
    plan = replace(PLAN, devices=16, generator_devices=1, shape=replace(SMALL, parameters=3.2e10))
    with pytest.raises(ConfigError, match="a generator does not fit: it needs"):
        splits(plan)
    assert splits(replace(plan, generator_devices=2))[0].engine_devices == 2


def test_the_learner_that_does_not_fit_has_the_devices_that_are_left_to_it() -> None:
    plan = replace(PLAN, generator_devices=3, shape=replace(SMALL, parameters=6e9))
    needed = learner_bytes(plan, 1) / 1e9
    with pytest.raises(ConfigError, match=f"the learner does not fit: it needs {needed:.1f} GB"):
        splits(plan)


def test_devices_that_no_generator_takes_are_said_to_be_idle() -> None:
    plan = replace(PLAN, generator_devices=3)
    wide, narrow = (next(one for one in splits(plan) if one.engine_devices == width) for width in (2, 1))
    numbers = {"tokens_per_s": 1.0, "share": 1.0, "step_s": 1.0, "lag_mean": 0.0, "hours": 1.0, "cost": 0.0}
    said, unsaid = (
        as_text(plan, [Forecast(split=one, lag_p90=0, lag_max=0, **numbers)], [one]) for one in (wide, narrow)
    )

    assert (wide.idle_devices, narrow.idle_devices) == (1, 0)
    assert "3 devices, 1 of them idle, for 1 generators of 2, 1 for the learner" in said
    assert "  3 (1 of 2, 1 idle) + 1: at most" in said
    told = "of --generator-devices 3 there is nothing to do for 1, since each generator takes 2: give a multiple of 2"
    assert told in assumed(plan, wide)
    assert "3 devices for 3 generators of 1, 1 for the learner" in unsaid
    assert "idle" not in unsaid


def test_lengths_are_those_of_a_recorded_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "length_mean": 7.0}) + "\n")
    assert lengths_of(tmp_path) == (7,)
    completions = [{"tokens": 3}, {"tokens": 5}]
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 1, "completions": completions}) + "\n")
    assert lengths_of(tmp_path) == (3, 5)


def test_a_long_completion_takes_as_long_as_its_tokens_would() -> None:
    rehearsal = rehearsal_of(PLAN, splits(PLAN)[0])
    mean = sum(rehearsal["lengths"]) / 3
    assert mean * rehearsal["sequence_s"] == pytest.approx(400 * splits(PLAN)[0].sequence_s)


GUARDED = {"patience": 2, "recovery_steps": 4, "max_behavior_kl": 1.0}
_WELL = {"behavior_kl": 0.0, "effective_sample_share": 1.0}


@pytest.fixture(scope="module")
def forecasts() -> list[tuple[Plan, DeviceSplit, list[dict[str, object]]]]:
    """Plans with the same devices: a slow learner; one that waits for whole batches of its own version; and the slow
    one in a run whose policy came too far from those that sampled in its third and fourth step.
    """
    plan = replace(PLAN, at_once=32, steps=8)
    split = replace(splits(plan)[0], generator_devices=1, learner_devices=3, publish_s=0.01, pause_s=0.01)
    slow = replace(split, token_s=0.0005, sequence_s=0.0001, train_s=5.0)
    in_turn = replace(plan, max_lag=0)
    even = replace(split, token_s=0.001, sequence_s=0.0, train_s=0.6)
    pairs = [(plan, slow), (in_turn, even)]
    rehearsals = [rehearsal_of(*pair) for pair in pairs]
    readings = [_WELL, _WELL, {**_WELL, "behavior_kl": 2.0}, {**_WELL, "behavior_kl": 2.0}, *[_WELL] * 4]
    rehearsals.append({**rehearsals[0], "readings": readings})
    rehearsals[2]["settings"] = {**rehearsals[0]["settings"], "guard": GUARDED}
    return [(*pair, steps) for pair, steps in zip([*pairs, pairs[0]], rehearsed(rehearsals), strict=True)]


def test_a_slow_learner_bounds_the_run_and_its_tokens_are_old(
    forecasts: list[tuple[Plan, DeviceSplit, list[dict[str, object]]]],
) -> None:
    plan, split, steps = forecasts[0]
    found = forecast(replace(plan, price=2.0), split, steps)
    assert found.share == pytest.approx(1.0, abs=0.03)
    assert 1 <= found.lag_mean <= found.lag_max <= plan.max_lag
    assert found.cost == pytest.approx(found.hours * 4 * 2.0)


def test_without_lag_the_sides_take_turns(forecasts: list[tuple[Plan, DeviceSplit, list[dict[str, object]]]]) -> None:
    plan, split, steps = forecasts[1]
    assert set(lags(steps)) == {0}
    assert forecast(plan, split, steps).share < 0.75


def test_a_guard_lowers_and_raises_the_bound_in_the_rehearsal_as_it_would_in_the_run(
    forecasts: list[tuple[Plan, DeviceSplit, list[dict[str, object]]]],
) -> None:
    plan, _, steps = forecasts[2]
    bounds = [step["lag_bound"] for step in steps]
    lowest = bounds[4]
    assert isinstance(lowest, int)
    assert bounds == [plan.max_lag] * 4 + [lowest] * 4
    assert lowest < plan.max_lag
    assert max(lags(steps[4:])) <= lowest
    assert {step["lag_bound"] for step in forecasts[0][2]} == {plan.max_lag}
