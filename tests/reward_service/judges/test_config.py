"""Refusals of a judge's configuration."""

import pytest

from reward_service.judges.config import JudgeConfig


def config(**settings: object) -> JudgeConfig:
    return JudgeConfig.model_validate({"name": "judge", "url": "http://host/v1", "model": "m", **settings})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"template": "{prompt}"}, r"the template lacks \{completion\}"),
        ({"template": "{completion} {answer}"}, r"placeholder \{answer\}, and those of kind score are \{prompt\}"),
        ({"template": "{completion}", "kind": "pairwise"}, r"placeholder \{completion\}, and those of kind pairwise"),
        ({"template": "{first}", "kind": "pairwise"}, r"the template lacks \{second\}"),
        ({"template": "{completion}", "template_file": "t.txt"}, "template and template_file are both set"),
        ({"votes": 3}, "3 votes at temperature 0 are one vote"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"kind": "poem"}, "kind"),
        ({"limits": {"requests_per_s": 0}}, "requests_per_s"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**settings)


def test_several_votes_need_a_temperature() -> None:
    assert config(votes=3, temperature=0.7).votes == 3
    assert config(votes=3, temperature="default").temperature == "default"
