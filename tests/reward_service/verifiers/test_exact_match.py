import pytest

from reward_service.verifier.submission import Submission
from reward_service.verifiers.patterns import ExactMatchArguments, exact_match


@pytest.mark.parametrize(
    ("completion", "arguments", "reward"),
    [
        ("124", ExactMatchArguments(answer="124"), 1.0),
        ("125", ExactMatchArguments(answer="124"), 0.0),
        (" 124\n", ExactMatchArguments(answer="124"), 1.0),
        (" 124\n", ExactMatchArguments(answer="124", strip=False), 0.0),
        ("Paris", ExactMatchArguments(answer="paris"), 0.0),
        ("PARIS", ExactMatchArguments(answer="paris", case=False), 1.0),
        ("STRASSE", ExactMatchArguments(answer="Straße", case=False), 1.0),
        ("", ExactMatchArguments(answer="124"), 0.0),
        ("The answer is 124", ExactMatchArguments(answer="124"), 0.0),
    ],
)
def test_the_completion_is_compared_as_the_arguments_say(
    completion: str, arguments: ExactMatchArguments, reward: float
) -> None:
    assert exact_match(Submission(completion=completion), arguments).reward == reward
