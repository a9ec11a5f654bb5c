"""Logprobs between the engine's process and the generator's: packed behind the tokens, bit for bit, and only where a
request wants no others.
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
from protocol.generation import Sampling


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
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    from generator.engine import packing
    from generator.engine.packing import pack, pack_outputs, unpack, wants_sampled_only
    from generator.engine.records import sampling_params, scoring_params

TOKENS = st.lists(
    st.tuples(st.integers(0, (1 << 31) - 1), st.floats(width=32, allow_nan=False)), min_size=1, max_size=5
)


def output_of(token_ids: list[int], logprobs: list[float], *, others: int = 0) -> EngineCoreOutput:
    """As the scheduler makes it; beside each sampled token stand `others` that another request of the step wanted."""
    rows = np.array([[logprob, *[-9.0] * others] for logprob in logprobs], dtype=np.float32)
    lists = LogprobsLists(np.zeros(rows.shape, dtype=np.int32), rows, np.zeros(len(rows), dtype=np.int32))
    return EngineCoreOutput(request_id="r", new_token_ids=token_ids, new_logprobs=lists)


@given(tokens=TOKENS, others=st.integers(0, 2))
def test_tokens_and_the_bits_of_their_logprobs_come_through_vllms_encoding(
    tokens: list[tuple[int, float]], others: int
) -> None:
    ids, logprobs = [token for token, _ in tokens], [logprob for _, logprob in tokens]
    sent = output_of(list(ids), logprobs, others=others)
    pack(sent)
    assert sent.new_logprobs is None
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineCoreOutput)
    taken = unpack(received)
    assert received.new_token_ids == ids
    assert np.array(taken, dtype=np.float32).tobytes() == np.array(logprobs, dtype=np.float32).tobytes()


@pytest.mark.parametrize("token_ids", [[], [0], [5, 7]])
def test_an_output_that_is_not_packed_is_left_as_it_is(token_ids: list[int]) -> None:
    output = EngineCoreOutput(request_id="r", new_token_ids=list(token_ids))
    assert unpack(output) is None
    assert output.new_token_ids == token_ids


def test_the_engines_own_list_of_tokens_is_not_changed() -> None:
    tokens = [4, 5]
    pack(output_of(tokens, [-1.0, -2.0]))
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
