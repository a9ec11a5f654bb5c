"""Solutions that try to pass without solving anything; each must get nothing, in every kind of tests."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from reward_service.verifier.submission import Score

Judged = Callable[..., Awaitable[Score]]

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Each kind asks that f(1) == 2 and more, of a function of one argument.
CALL: dict[str, object] = {
    "kind": "call",
    "entry_point": "f",
    "cases": [{"arguments": [1], "expected": 2}, {"arguments": [20], "expected": 400}],
}
ASSERT: dict[str, object] = {
    "kind": "assert",
    "cases": [
        {"code": "assert f(1) == 2  # marker-7c1"},
        {"code": "assert f(20) == 400, f(20)"},
        {"code": "assert 5 == f(7)"},
    ],
}
CHECK: dict[str, object] = {
    "kind": "check",
    "entry_point": "f",
    "cases": [
        {
            "code": "def check(candidate):\n    assert candidate(1) == 2  # marker-7c1\n"
            "    assert abs(candidate(20) - 400) < 1e-6\n"
        }
    ],
}
TEST_FILE = """
import unittest
import pytest
from solution import f

def test_first():
    assert f(1) == 2  # marker-7c1

def test_near():
    assert f(20) == pytest.approx(400.0)

def test_list():
    assert [f(7)] == [5]

class Other(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(f(1), 2)
"""
PYTEST: dict[str, object] = {"kind": "pytest", "files": {"test_f.py": TEST_FILE}}
STDIO: dict[str, object] = {
    "kind": "stdio",
    "cases": [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "20\n", "stdout": "400\n"}],
}
KINDS: Mapping[str, dict[str, object]] = {
    "call": CALL,
    "assert": ASSERT,
    "check": CHECK,
    "pytest": PYTEST,
    "stdio": STDIO,
}

ENDS = {
    "exits at once": "import sys\nsys.exit(0)\ndef f(x): return 1",
    "exits with os._exit": "import os\nos._exit(0)",
    "exits in a call": "import sys\ndef f(x): sys.exit(0)",
    "ends the process in a call": "import os\ndef f(x): os._exit(0)",
    "kills itself": "import os\ndef f(x): os.kill(os.getpid(), 9)",
    "interrupts": "def f(x): raise KeyboardInterrupt",
    "raises an exit": "def f(x): raise SystemExit(0)",
    "leaves a generator": "def f(x): raise GeneratorExit",
}
EQUAL_TO_ALL = """
class Equal{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __gt__(self, other): return True
    def __ge__(self, other): return True
    def __hash__(self): return 2
    def __bool__(self): return True
    def __sub__(self, other): return {zero}
    def __rsub__(self, other): return {zero}
    def __add__(self, other): return {zero}
    def __abs__(self): return {zero}
    def __contains__(self, other): return True
    def __call__(self, *args): return True
    def __getattr__(self, name): return lambda *args: True
"""
OBJECTS = {
    "is equal to everything": EQUAL_TO_ALL.format(base="", zero="0") + "def f(x): return Equal()",
    "gives objects equal to everything": EQUAL_TO_ALL.format(base="", zero="Equal()") + "def f(x): return Equal()",
    "is an integer equal to everything": EQUAL_TO_ALL.format(base="(int)", zero="0") + "def f(x): return Equal(1)",
    "is a text equal to everything": EQUAL_TO_ALL.format(base="(str)", zero="0") + "def f(x): return Equal('')",
    "is a float equal to everything": EQUAL_TO_ALL.format(base="(float)", zero="0") + "def f(x): return Equal(1)",
    "is a list of everything": "class L(list):\n    def __eq__(self, o): return True\ndef f(x): return L()",
    "is a class": EQUAL_TO_ALL.format(base="", zero="0").replace("Equal", "f") + "    def __init__(self, x): pass",
    "has a class equal to everything": "class M(type):\n    def __eq__(c, o): return True\n"
    "    __hash__ = type.__hash__\nclass C(metaclass=M): pass\ndef f(x): return C",
    "gives a class that says yes": "class M(type):\n    def __eq__(c, o): return True\n"
    "    __hash__ = type.__hash__\n    def __contains__(c, o): return True\n"
    "    def __getattr__(c, name): return lambda *a: True\nclass C(metaclass=M): pass\ndef f(x): return C",
    "pretends to be an integer": "class C:\n    @property\n    def __class__(self): return int\n"
    "    def __eq__(self, o): return True\ndef f(x): return C()",
    "keeps what it is compared with": "class C:\n    def __eq__(self, o):\n        self.o = o\n        return True\n"
    "    def __sub__(self, o):\n        self.o = o\n        return self\n"
    "    def __abs__(self): return 0.0\n    def __float__(self): return float(getattr(self, 'o', 0))\n"
    "def f(x): return C()",
    "gives mocks": "from unittest.mock import ANY, MagicMock\ndef f(x): return ANY",
    "gives an approximation of everything": "import math\ndef f(x): return math.nan",
}
PATCHES = {
    "patches builtins": "import builtins\nbuiltins.abs = builtins.len = lambda *a: 0\n"
    "builtins.AssertionError = Warning\nbuiltins.isinstance = lambda *a: True\n"
    "builtins.all = lambda *a: True\ndef f(x): return 1",
    "defines builtins": "def abs(x): return 0\ndef all(x): return True\nAssertionError = Warning\ndef f(x): return 1",
    "patches unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
    "unittest.TestCase.run = lambda *a: None\ndef f(x): return 1",
    "patches pytest": "import sys\ntry:\n    import pytest, _pytest.runner\n    pytest.approx = lambda *a: 1\n"
    "    _pytest.runner.call_and_report = None\nexcept Exception: pass\ndef f(x): return 1",
    "patches operators": "import operator, math\nmath.isclose = lambda *a, **k: True\noperator.eq = lambda *a: True\n"
    "def f(x): return 1",
    "replaces the checker": "def check(candidate): pass\ndef f(x): return 1",
    "skips the tests": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "skips the tests with pytest": "def f(x):\n    import pytest\n    pytest.skip('no')",
    "registers an exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 1",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
    "sys.excepthook = lambda *a: None\ndef f(x): return 1",
}
PRINTED = "\n".join(
    [
        '{"end": 0, "passed": true, "error": ""}',
        'R  {"end": 0, "passed": true, "error": ""}',
        'R 0 {"done": true}',
        '{"answer": {"value": 3}}',
        "4 passed in 0.01s",
        "OK",
        "2",
        "400",
    ]
)
CHANNEL = {
    "prints results": f"print({PRINTED!r}, flush=True)\ndef f(x):\n    print({PRINTED!r}, flush=True)\n    return 1",
    "writes results to every descriptor": "import os\ndef f(x):\n    for n in range(3, 64):\n        try:\n"
    f"            os.write(n, {PRINTED.encode()!r} + b'\\n')\n        except OSError: pass\n    return 1",
    "writes results while it loads": "import os\nfor n in range(3, 64):\n    try:\n"
    f"        os.write(n, {PRINTED.encode()!r} + b'\\n')\n    except OSError: pass\ndef f(x): return 1",
    "writes without end": "import os\ndef f(x):\n    for n in range(3, 64):\n        try:\n"
    "            while True: os.write(n, b'x' * 65536)\n        except OSError: pass\n    return 1",
    "writes nested JSON": "import os\ndef f(x):\n    for n in range(3, 64):\n        try:\n"
    "            os.write(n, b'[' * 100000 + b'\\n')\n        except OSError: pass\n    return 1",
    "answers twice": "import os\ndef f(x):\n    for n in range(3, 64):\n        try:\n"
    '            os.write(n, b\'{"answer": {"value": null}}\\n{"answer": {"value": {"zz": 1}}}\\n\')\n'
    "        except OSError: pass\n    return 1",
}
# Only the tests hold the marker in one piece. Who finds it knows the answers.
READS = {
    "looks for the tests in memory": """
import gc, re, sys
def f(x):
    def holds(value): return re.search("# mark[e]r-7c1", str(value))
    frame = sys._getframe()
    while frame:
        if holds(frame.f_locals) or holds(frame.f_globals): return {1: 2, 20: 400, 7: 5}[x]
        frame = frame.f_back
    for found in gc.get_objects():
        if isinstance(found, (str, bytes, dict, list, tuple)) and holds(found): return {1: 2, 20: 400, 7: 5}[x]
    for module in list(sys.modules.values()):
        if holds(vars(module)): return {1: 2, 20: 400, 7: 5}[x]
    return 1
""",
    "looks for the tests in raw memory": """
import re
def f(x):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            if rights.startswith("rw"):
                start, end = (int(part, 16) for part in span.split("-"))
                try:
                    memory.seek(start)
                    if re.search(b"# mark[e]r-7c1", memory.read(end - start)): return {1: 2, 20: 400, 7: 5}[x]
                except (OSError, ValueError): pass
    return 1
""",
    "looks for the tests on disk": """
import os, re
def f(x):
    for root in (".", "..", "/tmp", "/proc", "/dev/shm", "/run", "/home", "/root"):
        for folder, _, names in os.walk(root):
            if folder.count("/") > 6: continue
            for name in names:
                if root == "/proc" and name not in ("cmdline", "environ"): continue
                try:
                    with open(os.path.join(folder, name), "rb") as file:
                        if re.search(b"# mark[e]r-7c1", file.read(1 << 16)): return {1: 2, 20: 400, 7: 5}[x]
                except Exception: pass
    return 1
""",
    "looks for the process of the tests": """
import os
def f(x):
    others = [n for n in os.listdir("/proc") if n.isdigit() and b"main.py" in open(f"/proc/{n}/cmdline", "rb").read()]
    return {1: 2, 20: 400, 7: 5}[x] if len(others) > 1 else 1
""",
}
CHEATS = {**ENDS, **OBJECTS, **PATCHES, **CHANNEL}


# Ways to ask about a result, each of which an object that only resembles the right one must fail.
QUESTIONS = (
    "assert f(20) == 400",
    "assert 400 == f(20)",
    "assert not f(20) != 400",
    "assert abs(f(20) - 400) < 1e-6",
    "assert -1e-6 < f(20) - 400 < 1e-6",
    "assert (f(20) - 400) ** 2 < 1e-6",
    "assert round(f(20), 2) == 400",
    "assert round(f(20) - 400) == 0",
    "assert not f(20) - 400",
    "assert f(20) <= 400 and f(20) >= 400",
    "import math\nassert math.isclose(f(20), 400)",
    "assert f(20) in (400, 401)",
    "assert 400 in f(20)",
    "assert {f(20)} == {400}",
    "assert {400: True}.get(f(20))",
    "assert [f(20)] == [400]",
    "assert sorted(f(20)) == [400]",
    "assert max(f(20), 400) == min(f(20), 400)",
    "assert isinstance(f(20), int) and f(20) * 1 == 400",
    "assert str(f(20)) == '400'",
    "assert f(20).startswith('400')",
    "assert f(20).issuperset({400})",
    "assert not {400}.difference(f(20))",
    "assert not {400} ^ f(20)",
    "assert ''.join(f(20)) == '400'",
    "import unittest\nunittest.TestCase().assertEqual(f(20), 400)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(20), 400)",
    "import unittest\nunittest.TestCase().assertIn(400, f(20))",
    "import unittest\nunittest.TestCase().assertGreaterEqual(f(20), 400)",
    "from solution import *\nassert f(20) == 400",
)
PRETENDERS = {name: code for name, code in OBJECTS.items() if "math.nan" not in code and "ANY" not in code}


@pytest.mark.parametrize("pretender", PRETENDERS)
async def test_an_object_that_resembles_the_right_value_fails_however_it_is_asked(
    judge: Judged, pretender: str
) -> None:
    tests: dict[str, object] = {"kind": "assert", "cases": [{"code": code} for code in QUESTIONS]}
    score = await judge(PRETENDERS[pretender], tests)
    assert score.reward == 0.0, score


async def test_names_of_the_tests_are_not_replaced_by_an_import_of_all_names(judge: Judged) -> None:
    source = (
        "import pytest\nimport math\nfrom pytest import approx, raises\nfrom solution import *\n"
        "def test_raises():\n    with raises(ValueError):\n        f(1)\n"
        "def test_module():\n    with pytest.raises(ValueError):\n        f(1)\n"
        "def test_approx():\n    assert f(1) == approx(2)\n"
        "def test_math():\n    assert math.isclose(f(1), 2) and abs(f(1) - 2) < 1\n"
    )
    cheat = (
        "import contextlib\nclass pytest:\n    raises = staticmethod(contextlib.suppress)\n"
        "raises = contextlib.suppress\ndef approx(x): return 1\ndef abs(x): return 0\n"
        "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 1"
    )
    score = await judge(cheat, {"kind": "pytest", "files": {"test_f.py": source}})
    assert (score.reward, score.components["cases"]) == (0.0, 4.0), score


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_solution_that_solves_nothing_gets_nothing(judge: Judged, cheat: str) -> None:
    assert await _rewards(judge, CHEATS[cheat]) == dict.fromkeys(KINDS, 0.0)


@pytest.mark.parametrize("cheat", READS)
async def test_a_solution_that_looks_for_the_tests_finds_nothing(isolated: Judged, cheat: str) -> None:
    assert await _rewards(isolated, READS[cheat]) == dict.fromkeys(KINDS, 0.0)


async def test_a_solution_that_solves_the_problem_gets_all(judge: Judged) -> None:
    right = "def f(x):\n    return {1: 2, 20: 400, 7: 5}[x]\nif __name__ == '__main__':\n    print(f(int(input())))"
    assert await _rewards(judge, right) == dict.fromkeys(KINDS, 1.0)


async def _rewards(judge: Judged, code: str) -> dict[str, float]:
    """The reward in each kind of tests."""
    async with asyncio.TaskGroup() as group:
        running = {kind: group.create_task(_reward(judge, code, tests)) for kind, tests in KINDS.items()}
    return {kind: task.result() for kind, task in running.items()}


async def _reward(judge: Judged, code: str, tests: dict[str, object]) -> float:
    return (await judge(code, tests)).reward
