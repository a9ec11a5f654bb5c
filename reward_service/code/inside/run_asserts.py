"""Runs assert statements, or functions `check(candidate)`, on a solution in another process."""

import builtins
import os
import re
import sys
import types

from reward_service.code.inside.channel import Channel, ChannelClosed, Message, Reporter, text_of
from reward_service.code.inside.faults import is_of_the_tests
from reward_service.code.inside.handles import ClassHandle
from reward_service.code.inside.peer import Missing, SolutionModule, SolutionPeer, is_claimed
from reward_service.code.inside.plain import Json

_NAME = "tests"


class AssertRun:
    """A run over the cases from `first` on."""

    def __init__(self, *, channel: Channel, start: Message) -> None:
        self._reporter = Reporter(channel=channel, nonce=str(start["nonce"]))
        self._peer = SolutionPeer(channel)
        names = _strings(start["names"])
        self._module = SolutionModule(name="solution", peer=self._peer, names=names)
        self._names = frozenset(names)
        self._entry_points = frozenset(_strings(start["entry_points"]))
        self._check = str(start["kind"]) == "check"
        self._setup = str(start["setup"])
        self._head = str(start["head"])
        self._sources = _strings(start["cases"])
        self._first = start["first"]

    def run(self) -> None:
        """All cases, each with a report."""
        sys.modules["solution"] = self._module
        try:
            setups = [
                compile(source, name, "exec") for source, name in ((self._head, "prelude"), (self._setup, "setup"))
            ]
            codes = [compile(source, f"case {number}", "exec") for number, source in enumerate(self._sources)]
            namespace = self._prepared(setups, codes)
        except ChannelClosed:
            raise
        except BaseException as error:  # noqa: BLE001  whatever ends the preparation ends the run, with a report
            touched = self._lacks_name(error) if is_of_the_tests(error) else self._peer.touched
            self._reporter.broken(text_of(error), touched=touched)
            return
        vars(self._module)["_hw_strict"] = True
        assert isinstance(self._first, int)
        for number in range(self._first, len(codes)):
            if (fault := self._run_case(number, codes[number], dict(namespace))) is not None:
                self._reporter.broken(f"case {number}: {fault}", touched=False)
                return
        self._reporter.done()

    def _prepared(self, setups: list[types.CodeType], codes: list[types.CodeType]) -> dict[str, object]:
        namespace: dict[str, object] = {"__name__": _NAME, "__builtins__": builtins}
        for name in self._exports({name for code in (*setups, *codes) for name in _names_in(code)}):
            namespace[name] = getattr(self._module, name)
        for setup in setups:
            exec(setup, namespace)
        return namespace

    def _exports(self, used: set[str]) -> frozenset[str]:
        """The names that tests without an import find: the entry points; if none is given, those that they use.

        A builtin's name is the builtin's unless it is an entry point: no solution replaces `abs` in the tests. Nor does
        one bring `math`, which the tests must import if they use it.
        """
        if self._check:
            return frozenset((self._owner(), *({"Solution"} & self._names)))
        if self._entry_points:
            return self._entry_points
        return frozenset(name for name in self._names & used if not is_claimed(name))

    def _run_case(self, number: int, code: types.CodeType, namespace: dict[str, object]) -> str | None:
        """Report a case, or return how it is broken itself."""
        self._reporter.begin(number)
        try:
            exec(code, namespace)
            if self._check:
                _call_check(namespace, self._candidate())
        except ChannelClosed:
            raise
        except BaseException as error:  # noqa: BLE001  whatever it raises, the case has failed
            if is_of_the_tests(error) and not self._lacks_name(error):
                return text_of(error)
            self._reporter.end(number, passed=False, error=text_of(error))
        else:
            self._reporter.end(number, passed=True)
        return None

    def _lacks_name(self, error: BaseException) -> bool:
        """True if what the tests lack may be what the solution was to define, so that it is to blame."""
        name = str(getattr(error, "name", None))
        if isinstance(error, ImportError) or name in self._names:
            return name == "solution"
        if self._check or self._entry_points:
            return name == "Solution" or name in map(_first, self._entry_points)
        called = re.compile(rf"\b{re.escape(name)}\s*[(.]")
        sources = (self._setup, *self._sources)
        return not is_claimed(name) and (name[:1].isupper() or any(map(called.search, sources)))

    def _owner(self) -> str:
        """The first name of the candidate's, which one in a class `Solution` has from it."""
        (entry_point,) = self._entry_points
        first = _first(entry_point)
        return "Solution" if first not in self._names and "Solution" in self._names else first

    def _candidate(self) -> object:
        (entry_point,) = self._entry_points
        names = [part.removesuffix("()") for part in entry_point.split(".")]
        found: object = self._module
        for name in names if names[0] == self._owner() else ("Solution", *names):
            owner = found() if isinstance(found, ClassHandle) else found
            found = getattr(owner, name, Missing(name, module=self._module))
        return found


def _call_check(namespace: dict[str, object], candidate: object) -> None:
    check = namespace["check"]
    assert callable(check)
    check(candidate)


def _first(entry_point: str) -> str:
    return entry_point.partition(".")[0].removesuffix("()")


def _names_in(code: types.CodeType) -> set[str]:
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _strings(given: Json) -> list[str]:
    assert isinstance(given, list)
    return [str(part) for part in given]


def main() -> None:
    """The process of the tests."""
    channel = Channel.take()
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        sys.stdout = nothing
        AssertRun(channel=channel, start=channel.receive()).run()


if __name__ == "__main__":
    main()
