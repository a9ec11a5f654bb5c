"""Parameters of requests to vLLM, and its outputs as answers of ours."""

import logging
from collections.abc import Sequence
from typing import TypeVar

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from generator.engine.records import ScoredSequence
from generator.weights.routing_capture import ASKED, FROM
from protocol.adapters import AdapterSampleAnswer, AdapterSampleRequest, AdapterSequence, AdapterSpan, LikeliestTokens
from protocol.generation import GeneratePart, Sampling
from protocol.routed_experts import RoutedExperts
from protocol.trajectories import FinishReason, VersionSpan

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PART_BYTES = 32 << 20
"""Of a part's routed experts, packed: in base64 they are a third more, and a client takes a line of 64 MiB."""


def sampling_params(
    *, n: int, sampling: Sampling, stream_interval: int, routed_experts: bool = False, routed_experts_from: int = 0
) -> SamplingParams:
    """Parameters of a request of `n` completions, whose logprobs are of the distribution that `sampling` makes, and
    whose tokens' experts are told from the token `routed_experts_from` on if `routed_experts` asks for them.

    With `n` completions and a seed, the completion of index i draws with seed + i.
    """
    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=stream_interval,
        extra_args={**ASKED, FROM: routed_experts_from} if routed_experts else None,
        skip_clone=True,
    )


def adapter_sampling_params(request: AdapterSampleRequest) -> SamplingParams:
    """Parameters of a request with an adapter. Logprobs of sampled tokens are of the distribution that they are drawn
    from, those of the prompt at temperature 1.

    Completions at temperature 0 are all the same, and vLLM makes no more than one.
    """
    scores_prompt = request.prompt_logprobs or request.top_of_prompt > 0
    return SamplingParams(
        n=request.n if request.temperature else 1,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop=list(request.stop_texts) or None,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_ends,
        include_stop_str_in_output=True,
        logprobs=request.top_of_samples,
        prompt_logprobs=request.top_of_prompt if scores_prompt else None,
        flat_logprobs=True,
        detokenize=bool(request.stop_texts),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def adapter_answer(
    output: RequestOutput, request: AdapterSampleRequest, *, generator_id: str, version: int = 0
) -> AdapterSampleAnswer:
    """The answer to a request of the completions that have ended. `version` is that of weights that were the same from
    its first token to its last; the engine says those of an adapter.
    """
    ended = [_adapter_sequence(each, request, version) for each in sorted(output.outputs, key=lambda one: one.index)]
    return AdapterSampleAnswer(
        generator_id=generator_id,
        sequences=tuple(ended if request.temperature else ended * request.n),
        prompt_logprobs=_first_of_rows(output.prompt_logprobs, skip=1) if request.prompt_logprobs else (),
        top_of_prompt=_likeliest(output.prompt_logprobs, skip=1) if request.top_of_prompt else None,
    )


def _adapter_sequence(completion: CompletionOutput, request: AdapterSampleRequest, version: int) -> AdapterSequence:
    token_ids = tuple(completion.token_ids)
    whole = (AdapterSpan(version=version, start=0, end=len(token_ids)),) if token_ids else ()
    is_stamped = request.adapter is not None and request.adapter.rank > 0
    return AdapterSequence(
        token_ids=token_ids,
        logprobs=_first_of_rows(completion.logprobs),
        spans=completion.adapter_spans if is_stamped else whole,
        finish_reason=_finish_reason(completion.finish_reason) or "abort",
        top=_likeliest(completion.logprobs) if request.top_of_samples else None,
    )


def _rows(logprobs: FlatLogprobs, skip: int = 0) -> list[tuple[int, int]]:
    return list(zip(logprobs.start_indices[skip:], logprobs.end_indices[skip:], strict=True))


def _first_of_rows(logprobs: FlatLogprobs | None, skip: int = 0) -> tuple[float, ...]:
    """The logprobs of the tokens themselves, which stand before the likeliest ones."""
    return () if logprobs is None else tuple(logprobs.logprobs[start] for start, _ in _rows(logprobs, skip))


def _likeliest(logprobs: FlatLogprobs | None, skip: int = 0) -> LikeliestTokens | None:
    if logprobs is None:
        return None
    return LikeliestTokens(
        token_ids=_after_the_first(logprobs.token_ids, logprobs, skip),
        logprobs=_after_the_first(logprobs.logprobs, logprobs, skip),
    )


def _after_the_first(values: Sequence[T], logprobs: FlatLogprobs, skip: int) -> tuple[tuple[T, ...], ...]:
    """Of each row of `values` all but the first, which is the token's own; the others are the likeliest ones', the
    likeliest first.
    """
    return tuple(tuple(values[start + 1 : end]) for start, end in _rows(logprobs, skip))


def generate_part(completion: CompletionOutput, *, instance: str, oldest_cache: str) -> GeneratePart:
    """A part of one completion: its new tokens, and the version spans of all of it so far, signed by `instance`. No
    keys and values of its prompt are older than version `oldest_cache`, or than any of its tokens if that is empty.
    """
    spans = completion.weight_versions or ()
    return GeneratePart(
        index=completion.index,
        token_ids=tuple(completion.token_ids),
        behavior_logprobs=_sampled(completion.logprobs),
        version_spans=tuple(
            VersionSpan(
                version=span.version,
                start=span.start,
                end=span.end,
                instance=instance,
                cache=None if oldest_cache in ("", span.version) else oldest_cache,
            )
            for span in spans
        ),
        finish_reason=_finish_reason(completion.finish_reason),
        routed_experts=_routed_experts(completion),
    )


def _routed_experts(completion: CompletionOutput) -> RoutedExperts | None:
    """The rows that a part tells. More than a client takes in a line are left out: it would refuse the part's tokens,
    too, at every attempt.
    """
    routed = None if completion.untold is None else completion.untold.take(completion.token_ids)
    if routed is None:
        return None
    told = RoutedExperts.of([routed])
    if told.packed.nbytes <= MAX_PART_BYTES:
        return told
    logger.warning(
        "the routed experts of %d tokens are %d MiB, and %d are the most that a part tells: the learner routes these "
        "tokens itself", told.tokens, told.packed.nbytes >> 20, MAX_PART_BYTES >> 20,
    )  # fmt: skip
    return None


def _sampled(logprobs: FlatLogprobs | list[float] | None) -> tuple[float, ...]:
    """The logprobs of a part's sampled tokens: a list where they came packed (`packing`), else as vLLM has them."""
    if logprobs is None:
        return ()
    return tuple(logprobs if isinstance(logprobs, list) else logprobs.logprobs)


def _finish_reason(reason: str | None) -> FinishReason | None:
    """The reason in our words, None while the completion goes on; any other of vLLM's is an abort to us."""
    match reason:
        case None | "stop" | "length":
            return reason
        case _:
            return "abort"


def scoring_params(*, top: int) -> SamplingParams:
    """Parameters of a request for the logprobs of a prompt alone, which the prefix cache must not answer: it holds no
    logits.

    vLLM gives those of a prompt at temperature 1, whatever the sampling.
    """
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=top,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scored_sequence(output: RequestOutput, *, length: int, top: int, entered_under: str) -> ScoredSequence | None:
    """The scores that `scoring_params` brings for a prompt of `length` tokens, which came in under a version; None if
    it was ended before it was scored.

    vLLM stamps the token that it samples after the prompt, in the step that ends the prompt.
    """
    found = output.prompt_logprobs
    stamps = {span.version for span in output.outputs[0].weight_versions or ()}
    if found is None or len(found) != length or not stamps:
        return None
    return ScoredSequence(
        logprobs=_first_of_rows(found, 1),
        top_token_ids=_after_the_first(found.token_ids, found, 1) if top else (),
        top_logprobs=_after_the_first(found.logprobs, found, 1) if top else (),
        version=entered_under if stamps == {entered_under} else None,
    )
