"""`exact_match`: the completion is the answer."""

from pydantic import BaseModel, ConfigDict

from reward_service.verifier import Score, Submission


class ExactMatchArguments(BaseModel):
    """`strip`: white space around either text does not count. `case`: upper and lower case differ."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    answer: str
    strip: bool = True
    case: bool = True


def exact_match(submission: Submission, arguments: ExactMatchArguments) -> Score:
    """1 when the completion equals the answer, else 0."""
    completion, answer = submission.completion, arguments.answer
    if arguments.strip:
        completion, answer = completion.strip(), answer.strip()
    if not arguments.case:
        completion, answer = completion.casefold(), answer.casefold()
    return Score(reward=1.0 if completion == answer else 0.0)
