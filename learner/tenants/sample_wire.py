"""A client's sample as generators are asked for it, and their answer as the client gets it."""

import uuid
from collections.abc import Callable, Sequence

import numpy as np
from pydantic import ValidationError

from learner.tenants.prompt_scores import PromptExtras
from protocol.adapters import (
    AdapterSampleAnswer,
    AdapterSampleRequest,
    AdapterSequence,
    LikeliestTokens,
    OfferedAdapter,
)
from protocol.codec import describe
from protocol.tinker.sampling import BestTokens, SampleAnswer, SampledTokens, SampleRequest
from protocol.tinker.tensors import TinkerWireError

_CLIENTS_NAMES = {
    "prompt_token_ids": "prompt",
    "n": "num_samples",
    "stop_texts": "sampling_params.stop",
    "stop_token_ids": "sampling_params.stop",
    "top_of_prompt": "topk_prompt_logprobs",
    "top_of_samples": "topk_sample_logprobs",
}
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_SEEDS = 1 << 63
_NAN = float("nan")
_NO_EXTRAS = PromptExtras()


def asked_of_generator(
    request: SampleRequest, adapter: OfferedAdapter | None, *, namespace: str
) -> AdapterSampleRequest:
    """The request under a name of its own. Raises TinkerWireError, which names the client's field.

    Stops that a client names take the place of the model's own ends.
    """
    stop = request.stop or ()
    try:
        return AdapterSampleRequest(
            request_id=uuid.uuid4().hex,
            adapter=adapter,
            namespace=namespace,
            prompt_token_ids=request.prompt,
            n=request.samples,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(0, request.top_k),
            seed=None if request.seed is None else request.seed % _SEEDS,
            stop_token_ids=tuple(each for each in stop if isinstance(each, int)),
            stop_texts=tuple(each for each in stop if isinstance(each, str)),
            ignore_ends=request.stop is not None,
            prompt_logprobs=request.prompt_logprobs,
            top_of_prompt=request.topk_prompt,
            top_of_samples=request.topk_sample,
        )
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        name = f"sampling_params.{field}" if field in _PARAMETERS else _CLIENTS_NAMES.get(field, field)
        raise TinkerWireError(f"{name}: {describe(error)}") from error


def fault_of_answer(asked: AdapterSampleRequest, answer: AdapterSampleAnswer) -> str:
    """The way in which the answer is not what was asked for; empty if it is."""
    places = len(asked.prompt_token_ids) - 1
    if len(answer.sequences) != asked.n:
        return f"expected {asked.n} sequences, got {len(answer.sequences)}"
    if asked.prompt_logprobs and len(answer.prompt_logprobs) != places:
        return f"expected {places} logprobs of the prompt, got {len(answer.prompt_logprobs)}"
    if asked.top_of_prompt and not _fits(answer.top_of_prompt, places, asked.top_of_prompt):
        return f"expected the {asked.top_of_prompt} likeliest tokens at {places} places of the prompt"
    return next(filter(None, (_fault_of_sequence(asked, each) for each in answer.sequences)), "")


def _fault_of_sequence(asked: AdapterSampleRequest, sequence: AdapterSequence) -> str:
    count = len(sequence.token_ids)
    if sequence.finish_reason == "abort":
        return "a sequence was cut off"
    if len(sequence.logprobs) != count:
        return f"a sequence has {count} tokens and {len(sequence.logprobs)} logprobs"
    if [0, *(span.end for span in sequence.spans)] != [*(span.start for span in sequence.spans), count]:
        return f"the spans of a sequence of {count} tokens do not cover them"
    if asked.top_of_samples and not _fits(sequence.top, count, asked.top_of_samples):
        return f"expected the {asked.top_of_samples} likeliest tokens at each of {count} tokens"
    return ""


def _fits(top: LikeliestTokens | None, places: int, count: int) -> bool:
    if top is None:
        return False
    return [*map(len, top.token_ids)] == [*map(len, top.logprobs)] == [count] * places


def answer_to_client(
    request: SampleRequest,
    answer: AdapterSampleAnswer,
    *,
    policy_version: Callable[[int], int],
    extras: PromptExtras = _NO_EXTRAS,
) -> SampleAnswer:
    """The answer. `policy_version` tells what a generator's version stands for; `extras` are of others."""
    return SampleAnswer(
        tuple(_sampled(each, policy_version) for each in answer.sequences),
        prompt_logprobs=_prompt_logprobs(request, answer.prompt_logprobs) if request.prompt_logprobs else None,
        topk_prompt=_below_blanks(request, answer.top_of_prompt) if request.topk_prompt else None,
        targets=extras.targets,
        alternatives=extras.alternatives,
    )


def _sampled(sequence: AdapterSequence, policy_version: Callable[[int], int]) -> SampledTokens:
    versions = [policy_version(span.version) for span in sequence.spans for _ in range(span.start, span.end)]
    top = None if sequence.top is None else _best(sequence.top)
    stopped = sequence.finish_reason != "length"
    return SampledTokens(sequence.token_ids, sequence.logprobs, versions, stopped=stopped, top=top)


def _prompt_logprobs(request: SampleRequest, given: Sequence[float]) -> list[float]:
    whole, unknown = [_NAN, *given], _unknown(request)
    return [_NAN] * unknown + whole[unknown:]


def _below_blanks(request: SampleRequest, top: LikeliestTokens | None) -> BestTokens:
    """A row for each token of the prompt."""
    assert top is not None, "the answer was checked"
    places, count, unknown = len(request.prompt), request.topk_prompt, _unknown(request)
    ids, logprobs = np.zeros((places, count), np.int32), np.full((places, count), _NAN, np.float32)
    if unknown < places:
        ids[unknown:], logprobs[unknown:] = top.token_ids[unknown - 1 :], top.logprobs[unknown - 1 :]
    return BestTokens(ids, logprobs)


def _unknown(request: SampleRequest) -> int:
    """Number of tokens of the prompt of which nothing is said: the first one, and all before the last n."""
    return 1 if request.last_n is None else len(request.prompt) - request.last_n


def _best(top: LikeliestTokens) -> BestTokens:
    return BestTokens(np.array(top.token_ids, np.int32), np.array(top.logprobs, np.float32))
