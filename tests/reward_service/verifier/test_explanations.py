"""Explanations that verifiers give of their rewards, for people who look at samples."""

import pytest

from protocol.rewards import ScoreResult
from reward_service.code.arguments import NOTHING_EXTRACTED, Case, CaseVerdict, score_of
from reward_service.verifier.submission import Score, Submission, load_function, to_score
from reward_service.verifier.worker import answer
from reward_service.verifier.worker_pool import VerifierJob
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.mathematics.math_answer import math_answer
from reward_service.verifiers.numeric import NumericArguments, numeric


@pytest.mark.parametrize(
    ("completion", "right", "said"),
    [
        (r"so \boxed{7/2}", "3.5", "read '7/2', right is '3.5'"),
        (r"so \boxed{4}", ["3", "5"], "read '4', right is '3 or 5'"),
        ("", "3", "no answer was found, right is '3'"),
        (r"\boxed{9^{9^{9^{9}}}}", "3", "read '9^{9^{9^{9}}}', right is '3'; beyond the limits"),
    ],
)
def test_math_says_which_answers_it_compared(completion: str, right: str | list[str], said: str) -> None:
    arguments = MathArguments.model_validate({"answer": right})
    assert math_answer(Submission(completion=completion), arguments).explanation == said


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("it is 12 %", "read 12 %, right is 0.5"),
        ("none", "no number was found"),
        ("it is " + "9" * 400, "read a number of more than 308 digits, right is 0.5"),
    ],
)
def test_numeric_says_which_numbers_it_compared(completion: str, said: str) -> None:
    arguments = NumericArguments.model_validate({"answer": 0.5})
    assert numeric(Submission(completion=completion), arguments).explanation == said


def test_code_says_which_cases_failed_and_how() -> None:
    verdicts = [CaseVerdict.PASSED, CaseVerdict.WRONG, CaseVerdict.SKIPPED, CaseVerdict.TIMEOUT]
    score = score_of([Case(verdict=verdict) for verdict in verdicts], reward="all")
    assert score.explanation == "case 2: wrong, case 3: skipped, case 4: timeout"
    assert score_of([Case(verdict=CaseVerdict.PASSED)], reward="all").explanation == "all cases passed"
    many = score_of([Case(verdict=CaseVerdict.ERROR)] * 30, reward="all").explanation
    assert many.endswith("case 20: error, and 10 more")
    assert NOTHING_EXTRACTED.explanation == "no program was found"


def test_an_explanation_is_bounded_and_can_be_sent_and_leaves_old_answers_as_they_were() -> None:
    said = to_score(Score(reward=1.0, explanation="\ud800" + "x" * 100_000)).explanation
    assert said == "?" + "x" * 999
    plain = ScoreResult(id="a", verifier="v", reward=1.0, latency_s=0.0)
    assert "explanation" not in plain.model_dump()
    assert ScoreResult.model_validate_json(plain.model_copy(update={"explanation": said}).model_dump_json()).explanation


def test_a_worker_passes_it_on() -> None:
    verifier = load_function("tests.reward_service.sample_verifiers:explained")
    reply = answer(verifier=verifier, job=VerifierJob(completion="abc", prompt="", arguments={}))
    assert (reply.reward, reply.explanation) == (3.0, "3 characters")
