"""Rows of published data sets as tasks for the verifier `code`. Nothing that a row holds is run.

HumanEval and HumanEval+, MBPP and MBPP+, APPS and TACO, LiveCodeBench: each is known by the fields of its rows.
"""

import ast
import base64
import binascii
import json
import pickletools
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from services.lines import lines_of
from services.python_syntax import module_of

Row = Mapping[str, JsonValue]
Object = dict[str, JsonValue]

_FLOAT = re.compile(r"(?<![\w.])[+-]?(?:\d+\.\d*|\.\d+|\d+(?:\.\d*)?[eE][+-]?\d+)(?![\w.])")
_MODULE = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\.[A-Za-z_]")
# What a problem of some hundred long inputs takes when it is unpacked.
_MAX_UNPACKED = 1 << 30

# What the graders of these data sets put before a function, whose published beginning uses `List` without an import. A
# star import must not hide `pow` or `open`; the depth is the one that LiveCodeBench grants.
_BEFORE_FUNCTIONS = """\
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
sys.setrecursionlimit(50000)
"""
# Functions for which more than what the published solution returns is right: any zero of a polynomial (HumanEval/32).
_MANY_RIGHT = {"find_zero": "abs(poly(*given, got)) <= 1e-4"}
_FENCED = "Write a Python program. Answer with the whole program in one block of code."


class UnknownRow(ValueError):
    """A row that cannot become a task; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices that the rows leave open. `reference`: with the published solution, which the service then tries
    first.
    """

    reference: bool = False
    extract: Literal["last", "first", "whole"] = "last"
    reward: Literal["fraction", "all"] = "all"


def task_of(row: Row, choices: Choices) -> Object:
    """The line of a task file. Raises UnknownRow."""
    for fields, convert in _SHAPES:
        if fields <= row.keys():
            prompt, tests, more = convert(row)
            break
    else:
        raise UnknownRow(f"of no data set that is known, by its fields {', '.join(sorted(row)) or '(none)'}")
    arguments: Object = {"tests": tests, "reward": choices.reward, "extract": choices.extract, **more}
    if not choices.reference:
        arguments.pop("reference", None)
    return {"prompt": prompt, "verifier": "code", "arguments": arguments}


_Task = tuple[str, Object, Object]


def _human_eval(row: Row) -> _Task:
    prompt, entry_point = _text(row, "prompt"), _text(row, "entry_point")
    solution = _text(row, "canonical_solution")
    more: Object = {"prelude": prompt, "reference": solution}
    if "test" in row and "plus_input" not in row:
        code, setup = _text(row, "test"), ""
    else:
        code, setup = _compared(row), f"{prompt}{solution}\nreference = {entry_point}\n"
    case: Object = {"code": code}
    tests: Object = {"kind": "check", "entry_point": entry_point, "cases": [case], "setup": setup}
    return f"Complete this Python function. Answer with the whole function.\n\n```python\n{prompt}```", tests, more


def _compared(row: Row) -> str:
    """A `check` for rows with inputs alone: what is right is what the published solution returns for them."""
    inputs = [*_list(row, "base_input"), *_list(row, "plus_input")]
    tolerance = row.get("atol") or 0
    right = _MANY_RIGHT.get(_text(row, "entry_point"), "same(got, reference(*copy.deepcopy(given)))")
    return f"""import copy, json, math

def same(got, right):
    if isinstance(right, float) and isinstance(got, (int, float)):
        return got == right or math.isclose(got, right, rel_tol=1e-07, abs_tol={tolerance!r} or 1e-06)
    if isinstance(right, (list, tuple)) and isinstance(got, (list, tuple)):
        return len(got) == len(right) and all(map(same, got, right))
    return got == right

def check(candidate):
    for given in json.loads({json.dumps(inputs)!r}):
        got = candidate(*copy.deepcopy(given))
        assert {right}
"""


def _mbpp(row: Row) -> _Task:
    code = _text(row, "code")
    listed = [_string(test, "test_list") for test in _list(row, "test_list")]
    imports = "\n".join(_string(part, "test_imports") for part in _list(row, "test_imports"))
    setup = "\n".join(part for part in (imports, str(row.get("test_setup_code") or "")) if part)
    told = str(row.get("prompt") or row.get("text") or "")
    if not told or not listed:
        raise UnknownRow("a row of MBPP has a text and at least one test")
    challenge = [_string(test, "challenge_test_list") for test in _list(row, "challenge_test_list")]
    codes = [_text(row, "test")] if "test" in row else [*listed, *challenge]
    cases: list[JsonValue] = [{"code": test} for test in codes]
    tests: Object = {
        "kind": "assert",
        "cases": cases,
        "setup": _with_imports(setup, codes),
        "entry_points": [*_used_functions(code, codes)],
    }
    prompt = f"{told.strip()}\nYour code should pass these tests:\n\n" + "\n".join(listed)
    return prompt, tests, {"reference": code}


def _used_functions(code: str, tests: Sequence[str]) -> list[str]:
    """Names that a published solution defines and its tests use."""
    try:
        defined = [node.name for node in module_of(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    except (SyntaxError, ValueError) as error:
        raise UnknownRow(f"its code is no Python: {error}") from error
    return [name for name in dict.fromkeys(defined) if any(re.search(rf"\b{name}\b", test) for test in tests)]


def _with_imports(setup: str, tests: Sequence[str]) -> str:
    """With the modules of the standard library that tests use and, relying on the solution, do not import."""
    used = {name for test in tests for name in _MODULE.findall(test)} & sys.stdlib_module_names
    told = "\n".join((setup, *tests))
    missing = [f"import {name}" for name in sorted(used) if not re.search(rf"\bimport\b.*\b{name}\b", told)]
    return "\n".join(part for part in (*missing, setup) if part)


def _apps(row: Row) -> _Task:
    given = _parsed(row, "input_output")
    if not isinstance(given, dict) or not isinstance(given.get("inputs"), list):
        raise UnknownRow("its input_output holds no inputs and outputs")
    inputs, outputs = _list(given, "inputs"), _list(given, "outputs")
    if not inputs or len(inputs) != len(outputs):
        raise UnknownRow(f"it has {len(inputs)} inputs and {len(outputs)} outputs; expected as many, and at least one")
    starter = str(row.get("starter_code") or "")
    name = given.get("fn_name")
    tests = (
        _called(str(name), inputs, outputs)
        if name
        else _printed(zip(map(_lines, inputs), map(_lines, outputs), strict=True))
    )
    solutions = _parsed(row, "solutions") if row.get("solutions") else []
    more: Object = {"reference": solutions[0]} if isinstance(solutions, list) and solutions else {}
    if name:
        more["prelude"] = _BEFORE_FUNCTIONS
    return _asked(_text(row, "question"), starter), tests, more


def _called(name: str, inputs: Sequence[JsonValue], outputs: Sequence[JsonValue]) -> Object:
    # Most rows wrap each result in a list of its own.
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    cases: list[JsonValue] = []
    for arguments, output in zip(inputs, outputs, strict=True):
        if not isinstance(arguments, list):
            raise UnknownRow("the arguments of a call are no list")
        expected = output[0] if wrapped and isinstance(output, list) else output
        cases.append({"arguments": arguments, "expected": expected})
    return {"kind": "call", "entry_point": name, "cases": cases, "tolerance": {}}


def _printed(pairs: "zip[tuple[str, str]]") -> Object:
    cases: list[JsonValue] = []
    compare = "tokens"
    for stdin, stdout in pairs:
        cases.append({"stdin": stdin, "stdout": stdout})
        compare = "numbers" if _FLOAT.search(stdout) else compare
    return {"kind": "stdio", "cases": cases, "compare": compare}


def _live_code_bench(row: Row) -> _Task:
    listed = [*_cases(row, "public_test_cases"), *_cases(row, "private_test_cases")]
    kinds = {str(case.get("testtype")) for case in listed}
    starter, more = str(row.get("starter_code") or ""), Object()
    if kinds == {"stdin"}:
        tests = _printed(zip((_text(c, "input") for c in listed), (_text(c, "output") for c in listed), strict=True))
    elif kinds == {"functional"}:
        metadata = _parsed(row, "metadata")
        name = metadata.get("func_name") if isinstance(metadata, dict) else None
        if not isinstance(name, str):
            raise UnknownRow("its metadata names no func_name")
        inputs: list[JsonValue] = [[_json(line, "input") for line in lines_of(_text(c, "input"))] for c in listed]
        outputs: list[JsonValue] = [[_json(_text(c, "output"), "output")] for c in listed]
        tests, more = _called(name, inputs, outputs), {"prelude": _BEFORE_FUNCTIONS}
    else:
        raise UnknownRow(f"its tests have the types {sorted(kinds)}; expected either stdin or functional")
    return _asked(_text(row, "question_content"), starter), tests, more


def _cases(row: Row, field: str) -> list[Object]:
    """Test cases as JSON, or packed as the private ones are: base64 of zlib of a pickled string of JSON."""
    given = row.get(field)
    if isinstance(given, str) and not given.lstrip().startswith("["):
        given = _unpacked(given, field) if given else "[]"
    found = _json(given, field) if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(case, dict) for case in found):
        raise UnknownRow(f"its {field} hold no list of cases")
    return [case for case in found if isinstance(case, dict)]


def _unpacked(given: str, field: str) -> str:
    """The one string of a pickle, which is read and never loaded."""
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(given, validate=True), _MAX_UNPACKED)
        if not unpacking.eof:
            raise UnknownRow(f"its {field} are cut, or larger than {_MAX_UNPACKED} bytes")
        strings = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UnknownRow(f"its {field} are neither JSON nor packed JSON: {error}") from error
    if len(strings) != 1:
        raise UnknownRow(f"its {field} hold {len(strings)} strings; expected one with the cases as JSON")
    return strings[0]


def _asked(question: str, starter: str) -> str:
    head = f"\n\nUse this beginning:\n\n```python\n{starter.rstrip()}\n```" if starter.strip() else ""
    how = head or " It reads standard input and writes standard output."
    return f"{question.strip()}\n\n{_FENCED}{how}"


def _lines(given: JsonValue) -> str:
    """Some rows hold a list of lines."""
    if isinstance(given, list):
        return "".join(f"{line}\n" for line in given)
    return _string(given, "input_output")


def _text(row: Row, field: str) -> str:
    return _string(row.get(field), field)


def _string(value: JsonValue, field: str) -> str:
    if not isinstance(value, str):
        raise UnknownRow(f"its {field}: got {type(value).__name__}, expected a string")
    return value


def _list(row: Row, field: str) -> list[JsonValue]:
    value = row.get(field)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnknownRow(f"its {field}: got {type(value).__name__}, expected a list")
    return value


def _parsed(row: Row, field: str) -> JsonValue:
    """A field that holds JSON, as a text or as it is."""
    value = row.get(field)
    return _json(value, field) if isinstance(value, str) else value


def _json(text: str, field: str) -> JsonValue:
    try:
        found: JsonValue = json.loads(text)
    except ValueError as error:
        raise UnknownRow(f"its {field} are no JSON: {error}") from error
    return found


# In this order: a row belongs to the first whose fields it has.
_SHAPES: Sequence[tuple[frozenset[str], Callable[[Row], _Task]]] = (
    (frozenset({"prompt", "entry_point", "canonical_solution", "test"}), _human_eval),
    (frozenset({"prompt", "entry_point", "canonical_solution", "plus_input"}), _human_eval),
    (frozenset({"code", "test_list"}), _mbpp),
    (frozenset({"question", "input_output"}), _apps),
    (frozenset({"question_content", "public_test_cases"}), _live_code_bench),
)
