"""`reasoning_gym`: the score that reasoning-gym's own dataset gives to an answer.

Loaded only in worker processes: the import takes a second and 110 MB, and some scorers can run for very long.
"""

import functools
from collections.abc import Callable, Mapping

import reasoning_gym
from pydantic import JsonValue

from reward_service.verifier.submission import DataError, Score, Submission, UserError
from reward_service.verifiers.arguments import Extraction, ReasoningGymArguments
from reward_service.verifiers.extraction import last_boxed, last_tagged, strip_thinking

# Their scorers pass the completion to `eval`, or to sympy's parse_expr, which does: each was seen to run code in it.
EVALUATING_DATASETS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)

_FINDERS: Mapping[Extraction, Callable[[str], str | None]] = {
    "tag": last_tagged,
    "boxed": last_boxed,
    "whole": lambda text: text or None,
}


def sandboxed_score(submission: Submission, arguments: ReasoningGymArguments) -> Score:
    """The dataset's own score of the extracted answer; without an answer, 0."""
    if arguments.dataset in EVALUATING_DATASETS:
        raise UserError(
            f"reasoning-gym's scorer of {arguments.dataset!r} runs the completion as Python, in a process that no "
            "sandbox isolates; choose another dataset, or accept the risk with sandbox = 'unsafe'"
        )
    return unsafe_score(submission, arguments)


def unsafe_score(submission: Submission, arguments: ReasoningGymArguments) -> Score:
    """The dataset's own score of the extracted answer; without an answer, 0. Some scorers run the completion."""
    score_answer = _scorer(arguments.dataset)
    entry = _faithful_entry(score_answer=score_answer, arguments=arguments)
    text = strip_thinking(submission.completion)
    answer = next((found for place in arguments.extract if (found := _FINDERS[place](text)) is not None), None)
    if answer is None:
        return Score(reward=0.0, components={"extracted": 0.0})
    return Score(reward=float(score_answer(answer, entry)), components={"extracted": 1.0})


@functools.lru_cache(maxsize=128)
def _scorer(dataset: str) -> Callable[[object, object], float]:
    try:
        scorer: Callable[[object, object], float] = reasoning_gym.get_score_answer_fn(dataset)
    except (ValueError, AssertionError) as error:
        raise UserError(f"reasoning-gym has no dataset {dataset!r} with a scorer of its own: {error}") from error
    return scorer


def _faithful_entry(*, score_answer: Callable[[object, object], float], arguments: ReasoningGymArguments) -> object:
    """The entry in a form under which its own answer scores 1.

    JSON turns tuples into lists, and some scorers (arc_agi) then give the right answer next to nothing. An entry
    without an answer of its own cannot be checked, and is taken as it is.
    """
    entry = arguments.entry.model_dump()
    if arguments.entry.answer is None:
        return entry
    for form in (entry, {**entry, "metadata": _with_tuples(arguments.entry.metadata)}):
        if score_answer(arguments.entry.answer, form) >= 1.0:
            return form
    raise DataError(f"the scorer of {arguments.dataset!r} does not give the entry's own answer a score of 1")


def _with_tuples(value: JsonValue) -> object:
    if isinstance(value, dict):
        return {key: _with_tuples(part) for key, part in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
