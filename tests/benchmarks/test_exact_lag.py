"""The benchmark of exact lags: runs that the learner would take, a sampler that tells the truth, and its tables."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.algorithm_runs import AlgorithmRun
from benchmarks.exact_lag import CONFIG, FRESH, GROUP_SIZE, STALE, AgedRun, key_of, planned, report, selected
from benchmarks.plain_sampler import LagQueue, PlainSampler
from examples.addition.make_model import make_model, make_tokenizer
from learner.algorithms.presets.online_dpo import OnlineDpoConfig
from learner.config import LearnerConfig
from learner.training.batch import TrainSequence
from services.config.models import load_config

EACH = {run.variant: run for run in planned(seeds=1)}
"""The last of each variant: at the highest lag."""


def test_each_run_is_planned_once_and_grpo_at_every_lag() -> None:
    runs = planned()
    assert max(Counter(map(key_of, runs)).values()) == 1
    assert {run.max_lag for run in runs if run.variant == "grpo"} == {0, 4, 8}


@pytest.mark.parametrize("run", EACH.values(), ids=EACH)
def test_the_learner_takes_the_options_of_each(run: AlgorithmRun) -> None:
    words = [word for key, value in run.options.items() for word in (f"--{key}", str(value))]
    config = load_config(LearnerConfig, process="learner", argv=["--config", str(CONFIG), *words], environ={})
    assert (config.algo.type, config.training.updates_per_step) == (run.algo, run.updates_per_step)


class LuckySampler(PlainSampler):
    """Its policy is untrained; of each group of several but every third the first is called right, and of greedy
    answers every second.
    """

    def _sampled(self, tasks: Any, indices: Sequence[int], size: int, *, greedy: bool = False) -> list[TrainSequence]:
        made = super()._sampled(tasks, indices, size, greedy=greedy)
        lucky = [each.group % 2 == 0 if size == 1 else each.group % 3 > 0 and row % size == 0
                 for row, each in enumerate(made)]  # fmt: skip
        return [replace(each, reward=float(right)) for each, right in zip(made, lucky, strict=True)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products as small as these only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    make_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sampler(model: Path) -> PlainSampler:
    return PlainSampler(seed=1, model=model)


@pytest.fixture(scope="module")
def lucky(model: Path) -> PlainSampler:
    return LuckySampler(seed=1, model=model)


def test_sampled_logprobs_are_those_of_the_whole_sequence(sampler: PlainSampler, model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    for each in sampler.batch(groups=4, group_size=3):
        ids = torch.from_numpy(each.token_ids).long()[None]
        with torch.no_grad():
            spread = torch.log_softmax(policy(ids).logits[0, :-1].float(), dim=-1)
        logprobs = spread.gather(1, ids[0, 1:, None])[:, 0].numpy()
        own = each.loss_mask[1:]
        np.testing.assert_allclose(each.behavior_logprobs[1:][own], logprobs[own], atol=1e-5)
        assert not each.behavior_logprobs[~each.loss_mask].any()


def test_groups_are_of_one_task_and_a_queue_makes_them_exactly_as_old(sampler: PlainSampler) -> None:
    queue = LagQueue(2)
    first, *others = [sampler.batch(groups=3, group_size=4) for _ in range(4)]
    assert [queue.put(first), queue.put(others[0])] == [None, None]
    batch = queue.put(others[1])
    assert batch is not None
    assert [np.array_equal(old.token_ids, each.token_ids) for old, each in zip(first, batch, strict=True)] == [
        True
    ] * 12
    for _, members in groupby(batch, key=lambda each: each.group):
        assert len({tuple(each.token_ids[~each.loss_mask]) for each in members}) == 1
    assert {int(lag) for each in batch for lag in each.lags[each.loss_mask]} == {2}


def test_groups_without_spread_are_replaced_and_a_greedy_answer_is_that_of_the_task(lucky: PlainSampler) -> None:
    batch = lucky.batch(groups=5, group_size=4, with_spread=True, with_greedy=True)
    assert [each.group for each in batch] == [number for number in range(5) for _ in range(4)]
    for _, members in groupby(batch, key=lambda each: each.group):
        known = list(members)
        assert {each.reward for each in known} == {0.0, 1.0}
        assert len({each.greedy_reward for each in known}) == 1


def test_a_policy_that_solves_nothing_has_no_groups_with_spread(sampler: PlainSampler) -> None:
    with pytest.raises(RuntimeError, match="the policy solves nothing any more"):
        sampler.batch(groups=2, group_size=2, with_spread=True)


def test_pairs_are_numbered_by_group(lucky: PlainSampler) -> None:
    batch = lucky.batch(groups=4, group_size=GROUP_SIZE, with_spread=True)
    pairs = selected(batch, OnlineDpoConfig().preset())
    assert [each.pair for each in pairs] == [number for number in range(4) for _ in range(2)]
    assert [each.reward for each in pairs] == [1.0, 0.0] * 4


def test_the_tables_show_what_is_lost_what_fell_and_what_is_missing() -> None:
    runs = [run for run in planned(seeds=2) if run.variant in ("grpo", "sapo", "uncorrected")]
    rows = {key_of(run): _row(run) for run in runs}
    text = report(rows, runs)
    assert "| grpo | **0.800** (0.800 to 0.800) |" in text
    assert "**0.100** (0.100 to 0.100; 2 of 2 fell)" in text
    assert "| **+0.700** |" in text
    assert "| uncorrected | **0.790** (0.790 to 0.790) | +0.010 | 0.50 | 0 of 2 |" in text
    assert "Partial" not in text
    of_grpo = {key: row for key, row in rows.items() if row.variant == "grpo"}
    assert "8 of 14 runs are missing" in report(of_grpo, runs)


def _row(run: AlgorithmRun) -> AgedRun:
    variant, lag, updates, seed, steps, settings = key_of(run)
    collapsed = variant == "sapo" and lag == STALE.lag
    stale = variant == "uncorrected"
    return AgedRun(
        variant=variant, lag=lag, updates=updates, seed=seed, steps=steps, settings=settings,
        machine="2 cores (x), load 1.0 at the end; commit a", before=0.4,
        after=0.1 if collapsed else 0.79 if stale else 0.8,
        rewards=(0.6, 0.1) if collapsed else (0.8, 0.8),
        effective_sample=None if lag == FRESH.lag else 0.5,
    )  # fmt: skip
