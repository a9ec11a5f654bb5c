import pytest

from reward_service.config import CustomVerifier
from reward_service.registry import build_registry
from reward_service.verifier import Score, UserError, to_score


def custom(*, name: str = "mine", function: str) -> tuple[CustomVerifier, ...]:
    return (CustomVerifier(name=name, function=function),)


def test_a_sync_verifier_by_import_path_runs_in_workers_and_an_async_one_in_the_service() -> None:
    sync = build_registry(custom=custom(function="sample_verifiers:contains"), sandbox="required").get("mine")
    in_loop = build_registry(custom=custom(function="sample_verifiers:contains_async"), sandbox="required").get("mine")
    assert sync.function is None
    assert in_loop.function is not None
    assert in_loop.is_async
    assert in_loop.description == "1 when the completion contains the word, after giving way once."


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("sample_verifiers", "package.module:function"),
        ("no_such_module:f", "cannot import"),
        ("sample_verifiers:absent", "no function 'absent'"),
        ("sample_verifiers:one_parameter", "expected two parameters"),
        ("sample_verifiers:untyped_arguments", "pydantic model"),
    ],
)
def test_a_path_that_leads_to_no_verifier_is_refused_at_the_start(function: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        build_registry(custom=custom(function=function), sandbox="required")


def test_a_name_can_be_taken_only_once() -> None:
    with pytest.raises(UserError, match="two verifiers are named 'math'"):
        build_registry(custom=custom(name="math", function="sample_verifiers:contains"), sandbox="required")


def test_a_caller_cannot_name_an_import_path() -> None:
    with pytest.raises(UserError, match="unknown verifier"):
        build_registry(custom=(), sandbox="required").get("os:getcwd")


@pytest.mark.parametrize(("value", "reward"), [(True, 1.0), (0, 0.0), (0.25, 0.25), (Score(reward=-1.0), -1.0)])
def test_a_verifier_may_return_a_bool_a_number_or_a_score(value: object, reward: float) -> None:
    assert to_score(value).reward == reward


def test_only_verifiers_of_the_users_own_are_trusted_with_the_environment() -> None:
    registry = build_registry(custom=custom(function="sample_verifiers:contains"), sandbox="required")
    trusted = {verifier.name: verifier.trusted for verifier in registry.all()}
    assert trusted == {"exact_match": False, "math": False, "mine": True, "reasoning_gym": False}
