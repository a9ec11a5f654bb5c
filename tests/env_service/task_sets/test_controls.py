"""Controls fail where tests are run as they should be, and look like those that count."""

import random
import unittest
from typing import Any

import pytest

from env_service.task_sets.controls import names_of_tests, with_controls

TESTS = '''"""Some tests."""
import unittest


def test_sum():
    assert 1 + 1 == 2, "a reason"  # said


class TestMore:
    def test_list(self):
        found = sorted([2, 1])
        assert [1, 2] == sorted(found)


class Old(unittest.TestCase):
    def test_dict(self):
        self.assertEqual(dict(a=1), {"a": 1})

    def test_names(self):
        expected = 3
        self.assertEqual(len("abc"), expected)


def test_without_values():
    assert "a" in "abc"
'''
ALTERED = ("test_sum", "TestMore::test_list", "Old::test_dict", "Old::test_names", "test_without_values")


def run(text: str, name: str) -> str:
    """End of a test of a file."""
    space: dict[str, Any] = {}
    exec(compile(text, "tests.py", "exec"), space)
    place, _, method = name.rpartition("::")
    try:
        if not place:
            space[method]()
        elif issubclass(space[place], unittest.TestCase):
            getattr(space[place](method), method)()
        else:
            getattr(space[place](), method)()
    except (AssertionError, KeyError):
        return "failed"
    return "passed"


@pytest.mark.parametrize("seed", range(20))
def test_every_control_fails_and_every_test_goes_on_to_pass(seed: int) -> None:
    made = with_controls(TESTS, random.Random(seed), altered=ALTERED)

    assert len(made.names) == 3 + 4, "of one there is no value to change"
    assert {run(made.text, name) for name in made.names} == {"failed"}
    assert {run(made.text, name) for name in ALTERED} == {"passed"}


def test_a_test_is_altered_in_its_place_with_a_value_of_the_same_type() -> None:
    made = with_controls(TESTS, random.Random(1), altered=("test_sum", "Old::test_dict", "Old::test_names"))

    whole = made.text.replace("\n\n", "\n")
    assert f"    def {made.names[0].removeprefix('Old::')}(self):" in whole or made.names[0].startswith("test_")
    (altered,) = [line for line in made.text.splitlines() if "1 + 1 ==" in line and "said" not in line]
    assert altered.strip().startswith("assert 1 + 1 == ")
    assert altered.strip().endswith(", 'a reason'")
    assert "self.assertEqual(len('abc'), type('Other'" in made.text
    assert "# said" in made.text, "the rest of the file is as it was"


def test_tests_that_are_expected_to_fail_are_not_altered() -> None:
    text = "import pytest\n\n\n@pytest.mark.xfail\ndef test_a():\n    assert 1 == 2\n"

    assert len(with_controls(text, random.Random(1), altered=("test_a",)).names) == 3


def test_controls_count_as_failed_only_if_all_of_them_are_told_of_as_such() -> None:
    made = with_controls("", random.Random(1))
    one, two, three = (f"t.py::{name}" for name in made.names)
    failed = dict.fromkeys((one, two, three), "failed")

    assert made.have_failed("t.py", failed)
    assert made.have_failed("t.py", {two: "failed", three: "failed", f"{one}[a-1]": "failed", f"{one}[b]": "failed"})
    assert not made.have_failed("t.py", {**failed, two: "passed"})
    assert not made.have_failed("t.py", {**failed, two: "skipped"})
    assert not made.have_failed("t.py", {one: "failed", two: "failed"})
    assert not made.have_failed("t.py", {**failed, f"{one}[a-1]": "passed"})
    assert made.own("t.py", f"{one}[a]")
    assert not made.own("t.py", "t.py::test_a")


@pytest.mark.parametrize("case", ["", "[a-1]"])
def test_wrong_code_that_gives_the_altered_value_by_chance_has_not_cheated_and_what_equals_both_has(case: str) -> None:
    text = "class Old:\n    def test_a(self):\n        assert f(1) == 2\n"
    made = with_controls(text, random.Random(1), altered=("Old::test_a",))
    twin, *others = (f"t.py::{name}" for name in made.names)
    told = {**dict.fromkeys(others, "failed"), twin + case: "passed"}

    assert made.have_failed("t.py", {**told, f"t.py::Old::test_a{case}": "failed"})
    assert not made.have_failed("t.py", {**told, f"t.py::Old::test_a{case}": "passed"})
    assert not made.have_failed("t.py", told), "a test that is not told of"
    assert not made.have_failed("t.py", {**told, others[0]: "passed", f"t.py::Old::test_a{case}": "failed"})


def test_a_file_that_this_python_cannot_read_has_controls_all_the_same() -> None:
    made = with_controls("print 'of another Python'", random.Random(1), altered=("test_a",))

    assert made.text.startswith("print 'of another Python'\n\n\ndef ")
    assert len(made.names) == 3


def test_names_of_tests_are_those_that_pytest_finds() -> None:
    text = f"{TESTS}\n\ndef helper():\n    pass\n\n\nclass Helper:\n    def test_none(self):\n        pass\n"

    assert names_of_tests(text) == (
        "test_sum",
        "TestMore::test_list",
        "Old::test_dict",
        "Old::test_names",
        "test_without_values",
    )


def test_names_are_drawn_anew() -> None:
    assert with_controls("", random.Random(1)).names != with_controls("", random.Random(2)).names


def test_form_feeds_and_separators_within_a_file_move_no_control_and_change_no_test() -> None:
    text = (
        'import re\n\x0c\ndef test_a():\n    assert len("a\u2028b\x85") == 4\n\x0c\n\n'
        "class TestB:\n    def test_b(self):\n        assert 1 == 1\n"
    )

    made = with_controls(text, random.Random(3), altered={"test_a", "TestB::test_b"})

    assert set(made.altered.values()) == {"test_a", "TestB::test_b"}
    assert set(names_of_tests(made.text)) == {"test_a", "TestB::test_b", *made.names}
    space: dict[str, Any] = {}
    exec(compile(made.text, "tests.py", "exec"), space)
    space["test_a"]()
