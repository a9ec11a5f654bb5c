"""Runs assert statements, or functions `check(candidate)`, on a solution in another process."""

import builtins
import os
import sys
import types

from reward_service.code.harness.exchange import Channel, Gone, Message
from reward_service.code.harness.handle_kinds import ClassHandle
from reward_service.code.harness.peer import Missing, SolutionModule, SolutionPeer, is_claimed
from reward_service.code.harness.plain import Json
from reward_service.code.harness.reports import Reporter, text_of

_NAME = "tests"


class AssertRun:
    """One run over the cases from `first` on."""

    def __init__(self, *, channel: Channel, start: Message) -> None:
        self._reporter = Reporter(channel=channel, nonce=str(start["nonce"]))
        self._peer = SolutionPeer(channel)
        names = _strings(start["names"])
        self._module = SolutionModule(name="solution", peer=self._peer, names=names)
        self._names = frozenset(names)
        self._entry_points = frozenset(_strings(start["entry_points"]))
        self._check = str(start["kind"]) == "check"
        self._setup = str(start["setup"])
        self._sources = _strings(start["cases"])
        self._first = start["first"]

    def run(self) -> None:
        """All cases, each with a report."""
        sys.modules["solution"] = self._module
        try:
            setup = compile(self._setup, "setup", "exec")
            codes = [compile(source, f"case {number}", "exec") for number, source in enumerate(self._sources)]
            namespace = self._prepared(setup, codes)
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001  whatever ends the preparation ends the run, with a report
            self._reporter.broken(text_of(error), touched=self._peer.touched)
            return
        vars(self._module)["_hw_strict"] = True
        assert isinstance(self._first, int)
        for number in range(self._first, len(codes)):
            self._run_case(number, codes[number], dict(namespace))
        self._reporter.done()

    def _prepared(self, setup: types.CodeType, codes: list[types.CodeType]) -> dict[str, object]:
        namespace: dict[str, object] = {"__name__": _NAME, "__builtins__": builtins}
        for name in self._exports({name for code in (setup, *codes) for name in _names_in(code)}):
            namespace[name] = getattr(self._module, name)
        exec(setup, namespace)
        return namespace

    def _exports(self, used: set[str]) -> frozenset[str]:
        """The names that tests without an import find: the entry points; if none is given, those that they use.

        A builtin's name is the builtin's unless it is an entry point: no solution replaces `abs` in the tests. Nor does
        one bring `math`, which the tests must import if they use it.
        """
        if self._check:
            return frozenset()
        if self._entry_points:
            return self._entry_points
        return frozenset(name for name in self._names & used if not is_claimed(name))

    def _run_case(self, number: int, code: types.CodeType, namespace: dict[str, object]) -> None:
        self._reporter.begin(number)
        try:
            exec(code, namespace)
            if self._check:
                _call_check(namespace, self._candidate())
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001  whatever it raises, the case has failed
            self._reporter.end(number, passed=False, error=text_of(error))
        else:
            self._reporter.end(number, passed=True)

    def _candidate(self) -> object:
        (entry_point,) = self._entry_points
        found: object = self._module
        for name in entry_point.split("."):
            owner = found() if isinstance(found, ClassHandle) else found
            found = getattr(owner, name, Missing(name, module=self._module))
        return found


def _call_check(namespace: dict[str, object], candidate: object) -> None:
    check = namespace["check"]
    assert callable(check)
    check(candidate)


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
