from pydantic import BaseModel

from reward_service.verifier import Submission


class Arguments(BaseModel):
    answer: str


def digits(submission: Submission, arguments: Arguments) -> float:
    """The share of digits that are right."""
    pairs = zip(submission.completion, arguments.answer, strict=False)
    return sum(written == right for written, right in pairs) / len(arguments.answer)
