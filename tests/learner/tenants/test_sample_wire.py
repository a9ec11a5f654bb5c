"""Samples on their way to generators and back: fields by name, stops, places of which nothing is known."""

from typing import Any

import numpy as np
import pytest

from learner.tenants.sample_wire import answer_to_client, asked_of_generator, fault_of_answer
from protocol.adapters import AdapterSampleAnswer, AdapterSequence, AdapterSpan, LikeliestTokens
from protocol.tinker.sampling import SampleRequest
from protocol.tinker.tensors import TinkerWireError

NAN = float("nan")


def ask(**more: Any) -> SampleRequest:
    return SampleRequest(**{"prompt": (1, 2, 3, 4), **more})


def sequence(**more: Any) -> AdapterSequence:
    spans = (AdapterSpan(version=0, start=0, end=2),)
    usual = {"token_ids": (5, 6), "logprobs": (-1.0, -2.0), "spans": spans, "finish_reason": "length"}
    return AdapterSequence(**{**usual, **more})


def answer(*sequences: AdapterSequence, **more: Any) -> AdapterSampleAnswer:
    return AdapterSampleAnswer(generator_id="g", sequences=sequences or (sequence(),), **more)


@pytest.mark.parametrize(
    ("stop", "ids", "texts", "ignore_ends"),
    [
        (None, (), (), False),
        ((), (), (), True),
        ((7, 8), (7, 8), (), True),
        (("\n", "end"), (), ("\n", "end"), True),
    ],
)
def test_stops(stop: Any, ids: Any, texts: Any, ignore_ends: bool) -> None:
    asked = asked_of_generator(ask(stop=stop), None, namespace="s")
    assert (asked.stop_token_ids, asked.stop_texts, asked.ignore_ends) == (ids, texts, ignore_ends)


def test_any_seed_of_a_client_is_one_for_generators() -> None:
    assert asked_of_generator(ask(seed=7), None, namespace="s").seed == 7
    assert asked_of_generator(ask(seed=-1), None, namespace="s").seed == 2**63 - 1
    assert asked_of_generator(ask(seed=2**64), None, namespace="s").seed == 0


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"topk_prompt": 129}, "topk_prompt_logprobs"),
        ({"topk_sample": 1000}, "topk_sample_logprobs"),
        ({"temperature": 2.5}, "sampling_params.temperature"),
        ({"top_k": 2**31}, "sampling_params.top_k"),
        ({"stop": ("",)}, "sampling_params.stop"),
        ({"prompt": (-1,)}, "prompt"),
    ],
)
def test_what_no_generator_takes_is_named_as_the_client_named_it(more: Any, field: str) -> None:
    with pytest.raises(TinkerWireError, match=f"^{field}: "):
        asked_of_generator(ask(**more), None, namespace="s")


def test_the_likeliest_tokens_that_are_asked_for_are_bounded_by_the_answer_that_a_learner_takes() -> None:
    most = {"samples": 64, "max_tokens": 1 << 12, "topk_sample": 32}
    assert asked_of_generator(ask(**most), None, namespace="s").top_of_samples == 32
    for more in ({"samples": 65}, {"max_tokens": (1 << 12) + 1}, {"topk_sample": 33}):
        with pytest.raises(TinkerWireError, match=r"^topk_sample_logprobs: .* in several requests"):
            asked_of_generator(ask(**{**most, **more}), None, namespace="s")


@pytest.mark.parametrize(("last_n", "unknown"), [(None, 1), (2, 2), (1, 3)])
def test_nothing_is_said_of_the_first_token_and_of_those_before_the_last_n(last_n: int | None, unknown: int) -> None:
    given = answer(prompt_logprobs=(-1.0, -2.0, -3.0))
    found = answer_to_client(ask(prompt_logprobs=True, last_n=last_n), given, policy_version=int).prompt_logprobs
    np.testing.assert_array_equal(found, [NAN] * unknown + [0.0, -1.0, -2.0, -3.0][unknown:])


def test_a_prompt_of_one_token_has_a_blank_alone() -> None:
    nothing = LikeliestTokens(token_ids=(), logprobs=())
    found = answer_to_client(
        ask(prompt=(1,), prompt_logprobs=True, topk_prompt=2), answer(top_of_prompt=nothing), policy_version=int
    )
    np.testing.assert_array_equal(found.prompt_logprobs, [NAN])
    assert found.topk_prompt is not None
    np.testing.assert_array_equal(found.topk_prompt.logprobs, [[NAN, NAN]])


def test_the_likeliest_tokens_of_the_prompt_come_below_a_blank_row() -> None:
    top = LikeliestTokens(token_ids=((3, 4),) * 3, logprobs=((-0.5, -0.75),) * 3)
    found = answer_to_client(ask(topk_prompt=2), answer(top_of_prompt=top), policy_version=int).topk_prompt
    assert found is not None
    assert found.token_ids.tolist() == [[0, 0]] + [[3, 4]] * 3
    np.testing.assert_array_equal(found.logprobs, [[NAN, NAN]] + [[-0.5, -0.75]] * 3)


def test_the_likeliest_tokens_before_the_last_n_are_blank_too() -> None:
    top = LikeliestTokens(token_ids=((3,),) * 3, logprobs=((-0.5,),) * 3)
    asked = ask(prompt_logprobs=True, topk_prompt=1, last_n=1)
    given = answer(prompt_logprobs=(-1.0,) * 3, top_of_prompt=top)
    found = answer_to_client(asked, given, policy_version=int).topk_prompt
    assert found is not None
    np.testing.assert_array_equal(found.logprobs, [[NAN]] * 3 + [[-0.5]])


def test_each_token_has_the_version_of_its_span() -> None:
    spans = (AdapterSpan(version=10, start=0, end=1), AdapterSpan(version=12, start=1, end=2))
    found = answer_to_client(ask(), answer(sequence(spans=spans)), policy_version=lambda version: version // 2)
    assert found.sequences[0].versions == [5, 6]
    assert not found.sequences[0].stopped


@pytest.mark.parametrize(
    ("request_", "given", "fault"),
    [
        ({"samples": 2}, answer(), "expected 2 sequences, got 1"),
        ({"prompt_logprobs": True}, answer(prompt_logprobs=(-1.0,)), "expected 3 logprobs of the prompt, got 1"),
        ({"topk_prompt": 2}, answer(), "the 2 likeliest tokens at 3 places"),
        ({"topk_sample": 1}, answer(), "the 1 likeliest tokens at each of 2 tokens"),
        ({}, answer(sequence(logprobs=(-1.0,))), "2 tokens and 1 logprobs"),
        ({}, answer(sequence(spans=())), "do not cover"),
        ({}, answer(sequence(spans=(AdapterSpan(version=0, start=1, end=2),))), "do not cover"),
        ({}, answer(sequence(finish_reason="abort")), "cut off"),
        ({}, answer(), ""),
        ({"prompt_logprobs": True}, answer(prompt_logprobs=(-1.0,) * 3), ""),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for(request_: Any, given: AdapterSampleAnswer, fault: str) -> None:
    found = fault_of_answer(asked_of_generator(ask(**request_), None, namespace="s"), given)
    assert fault in found
    assert bool(found) == bool(fault)
