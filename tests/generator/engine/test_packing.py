"""Tokens between the engine's process and the generator's: several at a time, their logprobs packed behind them bit for
bit, and only where a request wants no others.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.engine.options import EngineOptions, prepare_environment
from protocol.costs import CostSums
from protocol.generation import Sampling
from services.costs import CostTally


@contextmanager
def as_a_generator() -> Iterator[None]:
    """Within it vLLM is imported as a generator does it; the environment of other tests stays theirs."""
    before = dict(os.environ)
    prepare_environment(EngineOptions(model="none"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch and vLLM say of themselves
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


with as_a_generator():
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists

    from generator.engine import packing
    from generator.engine.answers import sampling_params, scoring_params
    from generator.engine.packing import (
        MAX_HELD_S,
        Holding,
        StepLogprobs,
        pack_outputs,
        unpack,
        wants_sampled_only,
    )

TOKENS = st.lists(
    st.tuples(st.integers(0, (1 << 31) - 1), st.floats(width=32, allow_nan=False)), min_size=1, max_size=5
)


def lists_of(logprobs: list[float], *, others: int = 0) -> LogprobsLists:
    """Of a step that sampled a token for each of so many requests; beside each stand `others` that one wanted."""
    rows = np.array([[logprob, *[-9.0] * others] for logprob in logprobs], dtype=np.float32)
    return LogprobsLists(np.zeros(rows.shape, dtype=np.int32), rows, np.zeros(len(rows), dtype=np.int32))


def output_of(token_ids: list[int], logprobs: Any, **more: Any) -> EngineCoreOutput:
    """As the scheduler makes it."""
    return EngineCoreOutput(request_id=more.pop("name", "r"), new_token_ids=token_ids, new_logprobs=logprobs, **more)


def sent(holding: Holding, *outputs: EngineCoreOutput, at_once: bool = False, now_s: float = 0.0) -> dict[str, Any]:
    """The token ids and logprobs that a step sends, by request, as they arrive through vLLM's encoding."""
    answers = {0: EngineCoreOutputs(outputs=list(outputs))}
    holding.pass_on(answers, at_once=at_once, now_s=now_s)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(answers), type=dict[int, EngineCoreOutputs])
    assert all(answer.outputs for answer in received.values()), "a message that says nothing"
    taken = [(each, unpack(each)) for answer in received.values() for each in answer.outputs]
    return {each.request_id: (each.new_token_ids, logprobs) for each, logprobs in taken}


def step(numbers: dict[str, int], **more: Any) -> list[EngineCoreOutput]:
    """A token for each of several requests, whose logprobs are as many below 0."""
    lists = StepLogprobs(lists_of([-float(number) for number in numbers.values()]))
    rows = [lists.slice_request(row, 1) for row in range(len(numbers))]
    return [output_of([number], rows[row], name=name, **more) for row, (name, number) in enumerate(numbers.items())]


def holding_of(**intervals: int) -> Holding:
    holding = Holding()
    holding.intervals.update(intervals)
    return holding


@pytest.mark.parametrize("by_row", [True, False])
@given(tokens=TOKENS, others=st.integers(0, 2))
def test_tokens_and_the_bits_of_their_logprobs_come_through_vllms_encoding(
    by_row: bool, tokens: list[tuple[int, float]], others: int
) -> None:
    ids, logprobs = [token for token, _ in tokens], [logprob for _, logprob in tokens]
    lists = lists_of(logprobs, others=others)
    put = StepLogprobs(lists).slice_request(0, len(ids)) if by_row else lists
    token_ids, taken = sent(holding_of(r=1), output_of(list(ids), put))["r"]
    assert token_ids == ids
    assert np.array(taken, dtype=np.float32).tobytes() == np.array(logprobs, dtype=np.float32).tobytes()


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    interval=st.integers(1, 5),
    at_once=st.sets(st.integers(0, 12)),
    late=st.sets(st.integers(0, 12)),
)
def test_all_tokens_arrive_once_in_order_whenever_they_are_sent(
    lengths: list[int], interval: int, at_once: set[int], late: set[int]
) -> None:
    names = [str(number) for number in range(len(lengths))]
    holding = holding_of(**dict.fromkeys(names, interval))
    arrived: dict[str, list[int]] = {name: [] for name in names}
    clock = 0.0
    for place in range(max(lengths)):
        clock += MAX_HELD_S if place in late else 0.0
        outputs = []
        for name, length in zip(names, lengths, strict=True):
            if place < length:
                reason = FinishReason.LENGTH if place == length - 1 else None
                outputs += step(
                    {name: place}, finish_reason=reason, prefill_stats=PrefillStats() if not place else None
                )
        for name, (token_ids, logprobs) in sent(holding, *outputs, at_once=place in at_once, now_s=clock).items():
            assert logprobs == [-float(token) for token in token_ids]
            arrived[name] += token_ids
        if place in at_once:
            assert not holding
    assert arrived == {name: list(range(length)) for name, length in zip(names, lengths, strict=True)}
    assert not holding
    assert not holding.intervals


def test_tokens_wait_until_one_completion_has_a_part_and_then_those_of_all_are_sent_together() -> None:
    holding = holding_of(a=3, b=3)
    assert sent(holding, *step({"a": 1})) == {}
    assert sent(holding, *step({"a": 2, "b": 1})) == {}
    assert sent(holding, *step({"a": 3, "b": 2})) == {"a": ([1, 2, 3], [-1.0, -2.0, -3.0]), "b": ([1, 2], [-1.0, -2.0])}
    assert sent(holding, *step({"a": 4, "b": 3})) == {}


def test_a_first_and_a_last_token_are_sent_at_once_and_others_go_on_waiting() -> None:
    holding = holding_of(a=32, b=32)
    assert sent(holding, *step({"a": 1, "b": 1}, prefill_stats=PrefillStats())) == {
        "a": ([1], [-1.0]), "b": ([1], [-1.0]),
    }  # fmt: skip
    assert sent(holding, *step({"a": 2, "b": 2})) == {}
    assert sent(holding, *step({"a": 3}, finish_reason=FinishReason.STOP)) == {"a": ([2, 3], [-2.0, -3.0])}
    assert holding


def test_a_slow_engines_tokens_do_not_wait_for_a_whole_part() -> None:
    holding = holding_of(a=32)
    assert sent(holding, *step({"a": 1}), now_s=7.0) == {}
    assert sent(holding, *step({"a": 2}), now_s=7.0 + MAX_HELD_S / 2) == {}
    assert sent(holding, *step({"a": 3}), now_s=7.0 + MAX_HELD_S) == {"a": ([1, 2, 3], [-1.0, -2.0, -3.0])}


def test_the_end_of_a_completion_without_a_token_brings_what_was_held() -> None:
    holding = holding_of(a=32)
    sent(holding, *step({"a": 1}))
    assert sent(holding, output_of([], None, name="a", finish_reason=FinishReason.ERROR)) == {"a": ([1], [-1.0])}
    assert sent(holding_of(a=32), output_of([], None, name="a", finish_reason=FinishReason.ERROR)) == {"a": ([], None)}


def test_others_get_vllms_own_logprobs_with_the_step_that_made_them() -> None:
    lists = lists_of([-1.0, -2.0], others=2)
    theirs = output_of([4], StepLogprobs(lists).slice_request(1, 1), name="theirs")
    holding_of(ours=32).pass_on({0: EngineCoreOutputs(outputs=[theirs])}, at_once=False, now_s=0.0)
    assert theirs.new_logprobs.logprobs.tolist() == [[-2.0, -9.0, -9.0]]
    assert theirs.new_token_ids == [4]


class Sampling1:
    """Stands for vLLM's scheduler: each step samples one more token for its one request."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.requests = {"r": object()}

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def has_requests(self) -> bool:
        return bool(self.pause_state == PauseState.UNPAUSED)

    def update_from_output(self, scheduled: int | None, sampled: Any) -> dict[int, EngineCoreOutputs]:
        return {} if scheduled is None else {0: EngineCoreOutputs(outputs=step({"r": scheduled}))}

    def schedule(self, sequences: int, begun: int) -> Any:
        """A step that holds so many sequences, of which so many begin."""
        return SimpleNamespace(
            num_scheduled_tokens={str(number): 1 for number in range(sequences)}, scheduled_new_reqs=[object()] * begun
        )


class Scheduler1(packing._Packing, Sampling1):
    """It, with packed outputs."""


def stepped(scheduler: Scheduler1, token: int | None) -> list[list[int]]:
    answers = scheduler.update_from_output(token, SimpleNamespace(logprobs=None, aux_output_connector_output=None))
    return [[unpack(each), each.new_token_ids][1] for answer in answers.values() for each in answer.outputs]


def test_a_pause_is_complete_only_when_everything_held_was_sent_and_a_resumed_engine_holds_again() -> None:
    scheduler = Scheduler1()
    scheduler._holding.intervals["r"] = 32
    assert stepped(scheduler, 1) == []
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.has_requests(), "the engine would call the pause complete, and change its weights"
    assert stepped(scheduler, None) == [[1]]
    assert not scheduler.has_requests()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert stepped(scheduler, 2) == []


def test_an_engine_that_is_resumed_without_a_pause_holds_nothing() -> None:
    scheduler = Scheduler1()
    scheduler._holding.intervals["r"] = 32
    assert stepped(scheduler, 1) == []
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert stepped(scheduler, 2) == [[1, 2]]
    assert stepped(scheduler, 3) == [[3]]


def test_steps_are_counted_with_what_they_hold_but_for_those_in_which_weights_are_loaded() -> None:
    scheduler, at = Scheduler1(), iter([0.0, 2.0, 5.0, 9.0, 9.5])
    scheduler.costs = CostTally(3, clock=lambda: next(at))
    scheduler.schedule(4, 4)  # 2 s
    scheduler.schedule(3, 0)  # 3 s
    scheduler.schedule(3, 1)  # 4 s, with a load
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.schedule(0, 0)
    scheduler.schedule(2, 0)
    told = CostSums.model_validate_json(EngineCore.headway_step_costs(SimpleNamespace(scheduler=scheduler)))
    assert told.products[0] == (2, 7, 4)
    assert told.seconds == (5.0, 2 * 4 + 3 * 3, 8.0)


@pytest.mark.parametrize("token_ids", [[], [0], [5, 7]])
def test_an_output_that_is_not_packed_is_left_as_it_is(token_ids: list[int]) -> None:
    output = EngineCoreOutput(request_id="r", new_token_ids=list(token_ids))
    assert unpack(output) is None
    assert output.new_token_ids == token_ids


def test_the_engines_own_list_of_tokens_is_not_changed() -> None:
    tokens = [4, 5]
    sent(holding_of(r=2), output_of(tokens, lists_of([-1.0, -2.0])))
    assert tokens == [4, 5]


def test_only_requests_for_the_sampled_tokens_logprobs_in_parts_are_packed() -> None:
    ours = sampling_params(n=2, sampling=Sampling(max_tokens=4), stream_interval=32)
    assert wants_sampled_only(ours)
    others: list[SamplingParams | None] = [
        None,
        scoring_params(top=0),
        SamplingParams(),
        SamplingParams(logprobs=0, detokenize=False),
        SamplingParams(logprobs=3, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA),
        SamplingParams(logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY),
    ]
    assert not any(map(wants_sampled_only, others))


def config() -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False))


@pytest.mark.parametrize("planned", [False, True])
def test_the_scheduler_fits_the_way_of_planning(planned: bool) -> None:
    made = config()
    made.scheduler_config.async_scheduling = planned
    assert pack_outputs(made)
    name = made.scheduler_config.scheduler_cls.rpartition(".")[2]
    assert name == ("PackingAsyncScheduler" if planned else "PackingScheduler")
    assert hasattr(packing, name)


def test_another_vllm_sends_logprobs_as_it_does_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    made = config()
    with caplog.at_level(logging.WARNING):
        assert not pack_outputs(made)
    assert made.scheduler_config.scheduler_cls is None
    (record,) = caplog.records
    assert "vLLM is 0.99.0, and 0.32.0 was tried" in record.message
