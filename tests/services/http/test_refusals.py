"""The words of a refusal for a body that does not fit."""

from typing import Annotated

import pytest
from pydantic import BaseModel, Field, ValidationError

from protocol.model import WireModel
from services.http.refusals import RequestRefused, refusal_of


class Inner(WireModel):
    max_tokens: int = 1


class Outer(WireModel):
    name: Annotated[str, Field(max_length=3)]
    inner: Inner = Inner()


class CountedRepr:
    """A value that counts how often somebody asks for its repr."""

    asked = 0

    def __repr__(self) -> str:
        CountedRepr.asked += 1
        return "told"


def refused(model: type[BaseModel], body: object) -> RequestRefused:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return refusal_of(caught.value.errors(include_url=False, include_context=False), model)


def test_an_unknown_field_is_told_the_nearest_one_of_any_part() -> None:
    refusal = refused(Outer, {"name": "a", "inner": {"max_token": 2}})
    assert refusal.problem.field == "inner.max_token"
    assert refusal.problem.message.endswith("; did you mean max_tokens?")
    assert "did you mean" not in refused(Outer, {"name": "a", "zebra": 2}).problem.message


def test_what_was_got_is_shown_by_its_beginning() -> None:
    assert refused(Outer, {"name": "four"}).problem.got == "'four'"
    got = refused(Outer, {"name": "x" * 1000}).problem.got
    assert isinstance(got, str)
    assert got.startswith("'xxx")
    assert len(got) <= 200


def test_a_whole_body_that_lacks_a_field_is_not_written_out() -> None:
    values = [CountedRepr() for _ in range(1000)]
    CountedRepr.asked = 0
    got = refused(Outer, {"inner": {}, "other": values}).problem
    assert got.field == "other"
    body = {"inner": {}, **{f"k{index}": values for index in range(50)}}
    lacking = [{"type": "missing", "loc": ("name",), "msg": "Field required", "input": body}]
    shown = refusal_of(lacking, Outer).problem  # type: ignore[arg-type]
    assert (shown.field, shown.expected) == ("name", "Field required")
    assert isinstance(shown.got, str)
    assert shown.got.startswith("{'inner': {}, 'k0': [told, ")
    assert len(shown.got) <= 200
    assert CountedRepr.asked < 100
