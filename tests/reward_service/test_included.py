from pathlib import Path

import pytest

from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.verifier.config import CustomVerifier
from reward_service.verifier.lanes import Registry
from reward_service.verifier.submission import Score, UserError, to_score


def registry_with(*, name: str = "mine", function: str) -> Registry:
    """The registry of a service with one verifier of the user's own."""
    return build_registry(RewardServiceConfig(verifiers=(CustomVerifier(name=name, function=function),)))


def test_a_verifier_by_import_path_is_described_by_its_function() -> None:
    verifier = registry_with(function="sample_verifiers:contains_async").get("mine")
    assert verifier.description == "1 when the completion contains the word, after giving way once."
    assert verifier.arguments.model_fields.keys() == {"word"}


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
        registry_with(function=function)


def test_a_module_that_ends_the_process_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "leaving_verifier.py").write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserError, match=r"'leaving_verifier' calls sys\.exit when imported: .*line 2"):
        registry_with(function="leaving_verifier:judge")


def test_a_name_can_be_taken_only_once() -> None:
    with pytest.raises(UserError, match="two verifiers are named 'math'"):
        registry_with(name="math", function="sample_verifiers:contains")


def test_a_caller_cannot_name_an_import_path() -> None:
    with pytest.raises(UserError, match="unknown verifier"):
        build_registry(RewardServiceConfig()).get("os:getcwd")


@pytest.mark.parametrize(("value", "reward"), [(True, 1.0), (0, 0.0), (0.25, 0.25), (Score(reward=-1.0), -1.0)])
def test_a_verifier_may_return_a_bool_a_number_or_a_score(value: object, reward: float) -> None:
    assert to_score(value).reward == reward
