"""Policy versions as text and as an order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from protocol.model import PolicyVersion, VersionText

PARTS = st.integers(0, 999_999_999)
TEXT = TypeAdapter(VersionText)


@given(incarnation=PARTS, number=PARTS)
def test_a_version_reads_back_what_it_writes(incarnation: int, number: int) -> None:
    version = PolicyVersion(incarnation=incarnation, number=number)
    assert PolicyVersion.parse(TEXT.validate_python(str(version))) == version


@pytest.mark.parametrize(
    "text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "01.2", "1.02", "1.2\n", " 1.2", "1,2", "1.²", "a.b"]
)
def test_text_of_another_form_is_refused_on_the_wire(text: str) -> None:
    with pytest.raises(ValidationError):
        TEXT.validate_python(text)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "1.²", "a.b"])
def test_parsing_another_form_names_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form incarnation\.number"):
        PolicyVersion.parse(text)


def test_a_later_incarnation_is_newer_whatever_its_number() -> None:
    assert PolicyVersion(2, 0) > PolicyVersion(1, 99) > PolicyVersion(1, 98)
