"""Computed seconds of a run whose processes share a machine, and the curve of its engine, by hand-worked numbers."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.measured_rates import measured_rates
from headway.model_shape import Shape
from headway.planner import DEVICES, DeviceSplit, Plan, assumed, rehearsal_of, splits, train_seconds
from headway.recorded_turns import SampledTurns, computed_share, engine_curve, sampled_turns, scoring_times
from headway.shared_machine import GROUP_AS_COMPLETIONS
from services.costs import CostTally
from tests.headway.test_recorded_texts import keep as keep_texts

TINY = Shape(parameters=6e5, layers=3, hidden=128, kv_width=128, vocabulary=15)
CORES = {"learner": 0.7, "generator": 0.8, "env-service": 0.2, "reward-service": 0.1}


def step(number: int) -> dict[str, Any]:
    """Of 10 groups of 4, with 6 tokens of prompt and 4 sampled ones each, every 2 s."""
    return {
        "kind": "step", "step": number, "time_s": 2.0 * number, "wait_s": 0.4, "train_s": 1.2, "copy_s": 0.1,
        "optimizer_s": 0.2, "cpu_s": 1.0, "groups": 10, "trajectories": 40, "sampled_tokens": 160, "tokens": 400,
        "unix_s": 1000.0 + 2 * number,
    }  # fmt: skip


def load(*, hosts: int = 1, at_unix_s: float = 1010.0, cores: dict[str, float] = CORES) -> dict[str, Any]:
    return {
        "kind": "load", "version": 3, "generators": 1, "running": 20.0, "limit": 64, "tokens_per_s": 80.0, "busy": 1.0,
        "cores": cores, "hosts": hosts, "unix_s": at_unix_s,
    }  # fmt: skip


def write(folder: Path, *loads: dict[str, Any]) -> Path:
    folder.mkdir()
    lines = [*map(step, range(1, 9)), *loads]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "made_with.json").write_text(json.dumps({"settings": {}, "rank_count": 1, "host": {"cores": 2}}))
    return folder


def keep(folder: Path, turns: Sequence[tuple[float, float, int]], *, left_out: int = 0) -> None:
    """Turns of groups that were granted 100 s after 1970 and began and ended these seconds later, with their tokens."""
    (folder / "trajectories").mkdir()
    database = sqlite3.connect(folder / "trajectories" / "part-0000000001.db")
    database.execute("CREATE TABLE steps(step INTEGER PRIMARY KEY, groups INT, left_out INT)")
    database.execute("CREATE TABLE groups(id INTEGER PRIMARY KEY, step INT, times TEXT)")
    database.execute("CREATE TABLE rows(grp INT, step INT, facts TEXT)")
    database.execute("INSERT INTO steps VALUES(5, ?, ?)", (len(turns), left_out))
    for number, (began, ended, tokens) in enumerate(turns):
        turn = {"asked_s": began, "ended_s": ended, "completion_start": 6, "end": 6 + tokens}
        times = {"granted_unix_s": 100.0, "scoring_s": [ended, ended + 0.01 * (1 + number)]}
        database.execute("INSERT INTO groups VALUES(?, 5, ?)", (number, json.dumps(times)))
        database.execute("INSERT INTO rows VALUES(?, 5, ?)", (number, json.dumps({"turns": [turn]})))
    database.commit()
    database.close()


def in_bursts(*, step_s: float, sequence_s: float) -> list[tuple[float, float, int]]:
    """Bursts of 2, 8 and 20 turns of 4 tokens, of an engine whose step takes so long."""
    found, at = list[tuple[float, float, int]](), 0.0
    for size in (2, 8, 20) * 2:
        end = at + 4 * (step_s + size * sequence_s)
        found += [(at, end, 4)] * size
        at = end + 1.0
    return found


def test_turns_at_once_are_counted_over_the_time_of_each() -> None:
    """The first has the second beside it for half of its time, the second one has it for all of its own."""
    turns = SampledTurns(np.array([0.0, 2.0]), np.array([4.0, 4.0]), np.array([4.0, 4.0]))
    assert turns.at_once(1).tolist() == pytest.approx([1.5, 2.0])
    assert turns.at_once(2).tolist() == pytest.approx([1.0, 1.0]), "one at least"
    assert turns.open == pytest.approx((4.0 + 2.0) / 4.0)


def test_turns_that_wait_before_their_engine_are_not_in_it(tmp_path: Path) -> None:
    """Of two that are open a load says that one runs: with half as many at once a step is as long, and each sequence
    adds twice as much.
    """
    bursts = in_bursts(step_s=0.04, sequence_s=0.001)
    at, until = 100.0, 100.0 + bursts[-1][1]
    open_on_average = sum(ended - began for began, ended, _ in bursts) / (until - at)
    told = {**load(at_unix_s=at + 1.0), "running": open_on_average / 2}
    run = write(tmp_path / "run", told)
    keep(run, bursts)

    found = measured_rates(run)

    assert found.token_s == pytest.approx(0.04)
    assert found.sequence_s == pytest.approx(0.002)


def test_the_curve_of_an_engine_is_that_of_its_turns(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    keep(run, in_bursts(step_s=0.01, sequence_s=0.001))

    turns = sampled_turns(run, after_step=2)

    assert turns is not None
    assert engine_curve(turns, open_for_one=1) == pytest.approx((0.01, 0.001))
    found = measured_rates(run)
    assert found.token_s == pytest.approx(0.01)
    assert found.sequence_s == pytest.approx(0.001)
    assert found.machine is None
    # With n at once a token costs 0.01 / n + 0.001: over 2, 8 and 20 turns 4 * (3 * 0.01 + 30 * 0.001) / 30 each.
    share = computed_share((0.01, 0.001), turns, open_for_one=1, engine_s=0.004)
    assert share == pytest.approx(0.004 / (4 * 0.06 / 30))


def test_a_run_that_sampled_greedy_answers_computed_as_many_completions(tmp_path: Path) -> None:
    """Groups of 4 and their greedy answers: what was computed is that of five completions."""
    run = write(tmp_path / "run", load())
    plain = measured_rates(run, on_cores=True)
    made = {"settings": {"algo.type": "remax"}, "rank_count": 1, "host": {"cores": 2}}
    (run / "made_with.json").write_text(json.dumps(made))
    found = measured_rates(run, on_cores=True)
    assert (plain.greedy, found.greedy) == (False, True)
    assert plain.machine is not None
    assert found.machine is not None
    assert (plain.machine.group_size, found.machine.group_size) == (4, 5)
    assert found.machine.before_s == pytest.approx(0.8 * plain.machine.before_s)
    assert found.machine.others_s["env-service"] == pytest.approx(0.8 * plain.machine.others_s["env-service"])


def test_a_few_that_were_left_out_change_little(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    keep(run, in_bursts(step_s=0.01, sequence_s=0.001), left_out=3)
    assert sampled_turns(run, after_step=2) is not None, "3 of 63"


def test_turns_of_a_run_that_left_some_out_say_nothing_of_those_at_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    keep(run, in_bursts(step_s=0.01, sequence_s=0.001), left_out=4)
    assert sampled_turns(run, after_step=2) is None
    assert len(scoring_times(run, after_step=2)) == 60, "their rewards tell all the same"
    assert sampled_turns(tmp_path / "none", after_step=2) is None


def test_turns_that_all_had_as_many_beside_them_have_no_curve() -> None:
    began = np.repeat(np.arange(10.0), 8)
    assert engine_curve(SampledTurns(began, began + 0.5, np.full(80, 4.0)), open_for_one=1) is None


def test_what_threads_computed_is_shared_out_to_steps_and_completions(tmp_path: Path) -> None:
    run = write(tmp_path / "run", load(at_unix_s=1001.0, cores={**CORES, "generator": 9.0}), load())
    keep(run, in_bursts(step_s=0.01, sequence_s=0.001))

    found = measured_rates(run, on_cores=True)

    machine = found.machine
    assert machine is not None, "the first load is of the steps that are left out"
    assert (machine.cores, machine.group_size) == (2, 4)
    # A step of 40 completions each 2 s: 0.05 s a completion for each core.
    assert machine.before_s == pytest.approx(0.25 * 0.8 * 0.05)
    assert machine.engine_s == pytest.approx(0.75 * 0.8 * 0.05)
    assert machine.others_s == {
        "env-service": pytest.approx(0.01), "reward-service": pytest.approx(0.005),
        "learner": pytest.approx((0.7 * 2 - 1.0) / 40),
    }  # fmt: skip
    # Of 1.6 s without the wait a step has 0.6 s whatever its tokens: the optimizer's, the copy's, and 0.3 s between.
    assert found.step_s == pytest.approx(0.6 / 1.6)
    assert found.train_s == pytest.approx(1.0 / 1.6 / 400)
    assert found.prompt == pytest.approx(6.0)
    # The engine's 0.03 s are 3.75 times as much as the curve's 0.008 s.
    assert found.token_s == pytest.approx(0.01 * 3.75)
    assert found.sequence_s == pytest.approx(0.001 * 3.75)
    assert found.reward_s == pytest.approx(np.quantile(0.01 * np.arange(1, 61), 0.02)), "of those that hardly waited"


def test_pauses_for_publishes_are_no_part_of_an_engines_rate(tmp_path: Path) -> None:
    """Of each step's 2 s generators pause for 0.5 s, and load weights: a quarter of the time."""
    paused = [{"kind": "publish", "version": n, "members": 1, "total_s": 0.9, "pause_s": 0.5} for n in range(1, 9)]
    by_turns, by_loads = write(tmp_path / "turns", *paused, load()), write(tmp_path / "loads", *paused, load())
    keep(by_turns, in_bursts(step_s=0.01, sequence_s=0.001))

    assert measured_rates(by_turns).token_s == pytest.approx(0.75 * 0.01)
    assert measured_rates(by_turns).sequence_s == pytest.approx(0.75 * 0.001)
    # 20 sequences make 80 tokens a second with pauses, all of the time busy: a step of 0.25 s, 0.1875 s without.
    assert measured_rates(by_loads).sequence_s == pytest.approx(0.75 * 0.25 / 20)
    machine = measured_rates(by_turns, on_cores=True).machine
    assert machine is not None
    assert machine.engine_s == pytest.approx((0.75 * 0.8 * 2 - 0.5) / 40)
    assert machine.before_s == pytest.approx(0.25 * 0.8 * 2 / 40)


def test_cores_that_others_used_are_not_the_runs(tmp_path: Path) -> None:
    """The run has 1.8 of 2 cores at work: where the machine has 1.9, 0.1 are left to others."""
    for name, machine_cores, free in (("little", 1.9, 1.9), ("much", 2.6, 1.8), ("none", 1.5, 2.0)):
        run = write(tmp_path / name, {**load(), "machine_cores": machine_cores}, load())
        machine = measured_rates(run, on_cores=True).machine
        assert machine is not None
        assert machine.cores == pytest.approx(free), name


def test_several_machines_and_records_without_cores_are_not_shared(tmp_path: Path) -> None:
    for name, loads in {"two": [load(hosts=2)], "older": [{**load(), "cores": {}}], "none": []}.items():
        found = measured_rates(write(tmp_path / name, *loads), on_cores=True)
        assert found.machine is None
        assert found.step_s == pytest.approx(0.6)
    assert measured_rates(write(tmp_path / "devices", load())).machine is None, "engines have devices of their own"


def counted(load_line: dict[str, Any], *, steps: int, at_unix_s: float, cpu_s: float) -> dict[str, Any]:
    """A load of engines whose steps took 6 ms, 0.1 ms for each sequence, and 0.3 ms for each that began: 12, 7, 9.2 and
    8 ms in turn. All of the run computed `cpu_s`.
    """
    tally = CostTally(3)
    for number in range(steps):
        held = ((1, 30, 10), (1, 10, 0), (1, 20, 4), (1, 20, 0))[number % 4]
        tally.add(0.006 + 0.0001 * held[1] + 0.0003 * held[2], *held)
    used = {
        "learner": 0.3 * cpu_s,
        "generator": 0.5 * cpu_s,
        "env-service": 0.15 * cpu_s,
        "reward-service": 0.05 * cpu_s,
    }
    return {**load_line, "unix_s": at_unix_s, "cpu_s": used, "step_costs": json.loads(tally.sums().model_dump_json())}


def test_engines_that_count_what_their_steps_hold_say_what_each_of_it_costs(tmp_path: Path) -> None:
    """From 1006 to 1016, in which a step of 40 completions takes 2 s: 200 steps of 9.05 ms each are 0.181 cores."""
    loads = [
        counted(load(), steps=100, at_unix_s=1002.0, cpu_s=1.0),
        counted(load(), steps=200, at_unix_s=1006.0, cpu_s=20.0),
        counted(load(), steps=400, at_unix_s=1016.0, cpu_s=36.0),
    ]
    found = measured_rates(write(tmp_path / "run", *loads), on_cores=True)

    assert (found.token_s, found.sequence_s, found.begin_s) == pytest.approx((0.006, 0.0001, 0.0003))
    machine = found.machine
    assert machine is not None
    assert machine.engine_is_told
    assert machine.engine_s == pytest.approx(0.181 * 2.0 / 40)
    # Of all 1.6 cores generators have half, and what is not of the engines' steps comes before them.
    assert machine.before_s == pytest.approx((0.8 - 0.181) * 2.0 / 40)
    assert machine.others_s["env-service"] == pytest.approx(0.15 * 1.6 * 2.0 / 40)
    plan = Plan(shape=TINY, device=DEVICES["CPU"], devices=2, lengths=(4,), measured=found)
    said = " ".join(assumed(plan, _one(plan)))
    assert "a sequence that begins takes 0.3 ms of its engine" in said
    assert "is before its engine" not in said, "it is measured"


def test_engines_that_were_started_anew_meanwhile_tell_nothing_of_their_steps(tmp_path: Path) -> None:
    loads = [counted(load(), steps=n, at_unix_s=at, cpu_s=at) for n, at in ((400, 1006.0), (200, 1016.0))]
    found = measured_rates(write(tmp_path / "run", *loads), on_cores=True)
    assert found.begin_s == 0.0
    assert found.machine is not None
    assert not found.machine.engine_is_told


def test_a_step_is_its_passes_their_tokens_and_the_rest_of_what_its_trajectories_cost(tmp_path: Path) -> None:
    """Each step has 12 passes: 8 of 25 tokens and 4 of 100, which take 10 ms and 0.2 ms a token: 0.12 + 0.12 s. Of 1 s
    that the trainer's thread computes, 0.375 s are whatever the tokens, as above; 0.385 s are left to 40 trajectories.
    """
    tally = CostTally(2)
    for tokens in (25,) * 8 + (100,) * 4:
        tally.add(0.01 + 0.0002 * tokens, 1, tokens)
    costs = json.loads(tally.sums().model_dump_json())
    run = write(tmp_path / "run", load())
    lines = [{**step(number), "pass_costs": costs} for number in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, load()]))
    texts = ((1, 2, 5, 6), 1.0), ((1, 2, 5, 6), 1.0), ((1, 2, 7, 8), 0.0), ((1, 2, 5, 9), 0.0)
    keep_texts(run, [texts] * 20)

    found = measured_rates(run, on_cores=True).learned

    assert found is not None
    assert (found.pass_s, found.token_s, found.passes) == pytest.approx((0.01, 0.0002, 12))
    assert found.trajectory_s == pytest.approx((1.0 - 0.6 / 1.6 - 0.24) / 40)
    assert found.texts.tokens == 4
    known = measured_rates(run, on_cores=True)
    plan = Plan(
        shape=TINY, device=DEVICES["CPU"], devices=2, lengths=(4,), prompt=6, groups=10, group_size=4, measured=known
    )
    # Settings are not known: one update in one epoch, with three passes of each of 40 tokens.
    assert train_seconds(plan, 1) == pytest.approx(0.375 + 0.12 + 120 * 0.0002 + 0.385)
    said = " ".join(assumed(plan, _one(plan)))
    assert "each over 4 tokens of a group, and 0% of the groups have equal rewards" in said


def test_engines_with_no_turns_kept_compute_as_their_loads_say(tmp_path: Path) -> None:
    found = measured_rates(write(tmp_path / "run", load()), on_cores=True)
    assert found.machine is not None
    assert found.token_s == 0.0
    assert found.sequence_s == pytest.approx(found.machine.engine_s / 4)


@pytest.fixture
def shared(tmp_path: Path) -> Plan:
    run = write(tmp_path / "run", load())
    keep(run, in_bursts(step_s=0.01, sequence_s=0.001))
    known = measured_rates(run, on_cores=True)
    return Plan(
        shape=TINY, device=DEVICES["CPU"], devices=2, lengths=(4,), prompt=6, groups=10, group_size=4, in_flight=2,
        reward_s=0.0, measured=known,
    )  # fmt: skip


def _one(plan: Plan) -> DeviceSplit:
    known = plan.measured
    assert known is not None
    assert known.token_s is not None
    assert known.sequence_s is not None
    return DeviceSplit(
        generator_devices=1, learner_devices=1, engine_devices=1, generator_gb=1.0, learner_gb=1.0,
        token_s=known.token_s, sequence_s=known.sequence_s, train_s=train_seconds(plan, 1), publish_s=0.1, pause_s=0.1,
        at_once=64,
    )  # fmt: skip


def test_a_step_of_the_run_itself_takes_what_it_took(shared: Plan) -> None:
    assert train_seconds(shared, 1) == pytest.approx(1.0)


def test_cores_bound_what_both_sides_could_do_alone(shared: Plan) -> None:
    """A completion costs 0.025 s around model and engine, 1 / 40 s in training, and 4 tokens with 8 at once."""
    split = _one(shared)
    completion_s = 0.01 + 0.025 + 4 * (split.token_s / 8 + split.sequence_s) + 1.0 / 40
    assert split.sharing(shared) == pytest.approx(2 * 4 / completion_s)
    assert split.bound(shared) == split.sharing(shared)


def test_the_rehearsal_shares_the_cores_and_groups_cost_by_their_size(shared: Plan) -> None:
    split = _one(shared)
    found = rehearsal_of(shared, split)
    assert found["cores"] == 2
    assert found["train_s"] == [split.train_s], "it is simulated as fast as it is"
    assert found["request_s"] == pytest.approx(0.01)
    assert found["computed_s"]["env-service"] == pytest.approx(0.01)
    eight = rehearsal_of(replace(shared, groups=4, group_size=8), split)
    of_group = (1 + GROUP_AS_COMPLETIONS / 8) / (1 + GROUP_AS_COMPLETIONS / 4)
    assert eight["request_s"] == pytest.approx(0.01 * of_group)


def test_a_plan_says_that_its_cores_are_shared(shared: Plan) -> None:
    said = " ".join(assumed(shared, _one(shared)))
    assert "all processes share 2 cores" in said
    assert "do not share a machine" not in said
    assert splits(shared)
