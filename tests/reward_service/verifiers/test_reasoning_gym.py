import json

import pytest
import reasoning_gym

from reward_service.verifier.submission import DataError, Submission, UserError
from reward_service.verifiers.arguments import ReasoningGymArguments
from reward_service.verifiers.reasoning_gym import EVALUATING_DATASETS, sandboxed_score, unsafe_score


def arguments_for(
    dataset: str, *, index: int = 0, extract: tuple[str, ...] = ("tag", "boxed")
) -> ReasoningGymArguments:
    """The arguments as they arrive: an entry of the dataset that has gone through JSON."""
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(dataset, seed=11, size=4)[index]))
    return ReasoningGymArguments.model_validate({"dataset": dataset, "entry": entry, "extract": extract})


# The package behind arc_agi leaves its data file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("dataset", ["chain_sum", "letter_counting", "gcd", "word_sorting", "arc_agi", "mini_sudoku"])
def test_the_entrys_own_answer_earns_one_after_a_passage_through_json(dataset: str, index: int) -> None:
    arguments = arguments_for(dataset, index=index)
    completion = f"Let me see. <answer>wrong</answer> No: <answer>\n{arguments.entry.answer}\n</answer>"
    score = sandboxed_score(Submission(completion=completion), arguments)
    assert (score.reward, score.components) == (1.0, {"extracted": 1.0})


def test_the_answer_is_looked_for_where_the_arguments_say() -> None:
    arguments = arguments_for("chain_sum")
    answer = arguments.entry.answer
    whole = arguments_for("chain_sum", extract=("whole",))
    assert sandboxed_score(Submission(completion=rf"So \boxed{{{answer}}}"), arguments).reward == 1.0
    assert sandboxed_score(Submission(completion=f" {answer}\n"), whole).reward == 1.0
    missing = sandboxed_score(Submission(completion=f" {answer}\n"), arguments)
    assert (missing.reward, missing.components) == (0.0, {"extracted": 0.0})


def test_an_unknown_dataset_is_the_callers_error() -> None:
    arguments = arguments_for("chain_sum").model_copy(update={"dataset": "chain_sun"})
    with pytest.raises(UserError, match="chain_sun"):
        sandboxed_score(Submission(completion="<answer>1</answer>"), arguments)


def test_an_entry_that_its_own_answer_does_not_solve_is_an_error_and_not_a_zero() -> None:
    whole = arguments_for("puzzle24")
    spoiled = whole.model_copy(update={"entry": whole.entry.model_copy(update={"answer": "1 + 1"})})
    with pytest.raises(DataError, match="own answer"):
        unsafe_score(Submission(completion="<answer>2</answer>"), spoiled)


@pytest.mark.parametrize("dataset", sorted(EVALUATING_DATASETS))
def test_a_scorer_that_would_run_the_completion_is_refused_without_a_sandbox(dataset: str) -> None:
    arguments = arguments_for(dataset)
    with pytest.raises(UserError, match="sandbox"):
        sandboxed_score(Submission(completion=f"<answer>{arguments.entry.answer}</answer>"), arguments)
    assert unsafe_score(Submission(completion=f"<answer>{arguments.entry.answer}</answer>"), arguments).reward == 1.0
