"""Test files for pytest."""

from collections.abc import Awaitable, Callable

import pytest

from reward_service.verifier.submission import DataError, Score

Judged = Callable[..., Awaitable[Score]]

pytestmark = pytest.mark.asyncio(loop_scope="module")

LRU = """
from collections import OrderedDict

class LRUCache:
    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("capacity must be positive")
        self._items, self._capacity = OrderedDict(), capacity

    def get(self, key):
        if key not in self._items:
            return -1
        self._items.move_to_end(key)
        return self._items[key]

    def put(self, key, value):
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._capacity:
            self._items.popitem(last=False)
"""
TESTS = """
import unittest

import pytest

import cache
from cache import LRUCache
from made import numbers


@pytest.fixture
def small():
    return LRUCache(2)


def test_get_and_put(small):
    small.put(1, 1)
    small.put(2, 2)
    assert small.get(1) == 1
    small.put(3, 3)
    assert small.get(2) == -1


@pytest.mark.parametrize("key", numbers())
def test_missing(small, key):
    assert small.get(key) == -1


class TestCapacity:
    def test_must_be_positive(self):
        with pytest.raises(ValueError, match="positive"):
            cache.LRUCache(0)


class Old(unittest.TestCase):
    def setUp(self):
        self.cache = LRUCache(1)

    def test_overwrites(self):
        self.cache.put(1, 1)
        self.cache.put(1, 2)
        self.assertEqual(self.cache.get(1), 2)
"""
FILES = {"test_cache.py": TESTS, "made.py": "def numbers():\n    return range(3)\n"}
SUITE: dict[str, object] = {"kind": "pytest", "module": "cache", "files": FILES}


def suite(source: str, **more: object) -> dict[str, object]:
    return {"kind": "pytest", "files": {"test_it.py": source}, **more}


async def test_a_right_class_gets_the_full_reward(judge: Judged) -> None:
    score = await judge(LRU, SUITE)
    assert score.reward == 1.0
    assert score.components["cases"] == 6.0


async def test_a_wrong_class_gets_the_share_of_the_tests_that_pass(judge: Judged) -> None:
    score = await judge(LRU.replace("        self._items.move_to_end(key)\n        return", "        return"), SUITE)
    assert score.reward == pytest.approx(5 / 6)
    assert score.components["wrong"] == 1.0


async def test_tests_count_by_the_weight_of_their_name_or_id(judge: Judged) -> None:
    weights = {"test_missing": 2.0, "test_cache.py::Old::test_overwrites": 4.0, "test_cache.py::test_missing[0]": 1.0}
    wrong = LRU.replace("return -1", "return None")
    score = await judge(wrong, {**SUITE, "weights": weights})
    # Of 1 + (1 + 2 + 2) + 1 + 4, those that ask for a missing key fail.
    assert score.reward == pytest.approx(5 / 11)


async def test_prints_are_captured_and_inputs_patched(judge: Judged) -> None:
    source = (
        "from solution import ask\ndef test_it(capsys, monkeypatch):\n"
        "    monkeypatch.setattr('builtins.input', lambda prompt='': '4')\n    ask()\n"
        "    assert capsys.readouterr().out == '16\\n'\n"
    )
    assert (await judge("def ask():\n    print(int(input('n? ')) ** 2)", suite(source))).reward == 1.0


async def test_names_of_the_solution_are_patched(judge: Judged) -> None:
    source = (
        "import solution\nfrom unittest.mock import patch\ndef test_patch(monkeypatch):\n"
        "    monkeypatch.setattr(solution, 'rate', 3)\n    assert solution.price(2) == 6\n"
        "def test_mock():\n    with patch('solution.fetch', return_value=5):\n        assert solution.total() == 5\n"
        "    assert solution.total() == 1\n"
        "def test_unpatched():\n    assert solution.price(2) == 4\n"
    )
    code = "rate = 2\ndef price(n): return n * rate\ndef fetch(): return 1\ndef total(): return fetch()"
    score = await judge(code, suite(source))
    assert score.reward == 1.0, score


async def test_a_missing_name_fails_its_own_tests_alone(judge: Judged) -> None:
    source = "from solution import f, g\ndef test_f():\n    assert f() == 1\ndef test_g():\n    assert g() == 1\n"
    score = await judge("def f(): return 1", suite(source))
    assert score.reward == 0.5


async def test_skipped_tests_do_not_count_but_those_that_skip_themselves_fail(judge: Judged) -> None:
    source = (
        "import pytest\nfrom solution import f\ndef test_f():\n    assert f() == 1\n"
        "@pytest.mark.skip\ndef test_skipped():\n    assert False\n"
        "@pytest.mark.xfail\ndef test_expected():\n    assert f() == 2\n"
        "def test_skips():\n    pytest.skip('no')\n"
    )
    score = await judge("def f(): return 1", suite(source))
    assert (score.components["cases"], score.components["passed"]) == (2.0, 1.0)


@pytest.mark.parametrize("code", ["while True: pass", "import os; os._exit(0)", "raise SystemExit(0)"])
async def test_a_test_that_goes_wrong_costs_that_test_alone(judge: Judged, code: str) -> None:
    source = "import pytest\nfrom solution import f\n@pytest.mark.parametrize('x', [1, 0, 2])\n"
    source += "def test_f(x):\n    assert f(x) == x\n"
    timeout_s = 3.0 if code.startswith("while True") else 10.0  # that of an endless loop is waited out
    score = await judge(f"def f(x):\n    if x == 0:\n        {code}\n    return x", suite(source), timeout_s=timeout_s)
    assert (score.components["cases"], score.components["passed"]) == (3.0, 2.0), score


async def test_a_solution_that_breaks_the_collection_gets_nothing(judge: Judged) -> None:
    source = "import solution\nvalue = solution.f()\ndef test_f():\n    assert value == 1\n"
    for code in ("def f(): raise ValueError", "import os\ndef f(): os._exit(0)", "raise ValueError"):
        assert (await judge(code, suite(source))).reward == 0.0


@pytest.mark.parametrize(
    "source", ["def test_f(:", "import missing_module", "", "1 / 0", "import pytest\npytest.exit('no')"]
)
async def test_broken_tests_are_an_error_of_the_data(judge: Judged, source: str) -> None:
    with pytest.raises(DataError, match="the tests"):
        await judge("def f(): return 1", suite(source))


@pytest.mark.parametrize("name", ["/test_f.py", "../test_f.py", "a/../../test_f.py", ""])
async def test_a_test_file_lies_in_the_folder_of_the_tests(judge: Judged, name: str) -> None:
    with pytest.raises(DataError, match="relative path"):
        await judge("def f(): return 1", {"kind": "pytest", "files": {name: "def test_f(): pass"}})
