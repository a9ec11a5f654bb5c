"""The filter, run by a small interpreter of its own: what it answers to which call."""

import struct

import pytest

from services.isolation.faults import CannotIsolate
from services.isolation.seccomp import ARCHITECTURES, assemble

ALLOW, KILL, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50061


def answer(machine: str, number: int, argument: int = 0, *, audit: int | None = None) -> int:
    """The filter's return value for a call on a machine."""
    architecture = ARCHITECTURES[machine].audit if audit is None else audit
    data = struct.pack("<IIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    program = list(struct.iter_unpack("=HBBI", assemble(machine)))
    place = accumulator = 0
    while True:
        code, yes, no, value = program[place]
        place += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        else:
            taken = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += yes if taken else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_listed_calls_are_refused_and_others_allowed(machine: str) -> None:
    calls = ARCHITECTURES[machine].calls
    refused = {name for name, number in calls.items() if answer(machine, number) == EPERM}
    assert refused == set(calls) - {"clone", "clone3", "socket"}
    allowed = set(range(460)) - set(calls.values())
    assert {answer(machine, number) for number in allowed} == {ALLOW}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_threads_and_forks_are_allowed_and_new_namespaces_are_not(machine: str) -> None:
    calls = ARCHITECTURES[machine].calls
    assert answer(machine, calls["clone"], 0x3D0F00) == ALLOW
    assert answer(machine, calls["clone"], 17) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, calls["clone"], flag | 17) == EPERM
    assert answer(machine, calls["clone3"]) == ENOSYS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_sockets_are_of_the_usual_families(machine: str) -> None:
    calls = ARCHITECTURES[machine].calls
    assert {answer(machine, calls["socket"], family) for family in (1, 2, 10)} == {ALLOW}
    assert {answer(machine, calls["socket"], family) for family in (0, 16, 17, 38, 40)} == {EAFNOSUPPORT}


def test_the_table_of_another_architecture_ends_the_process() -> None:
    assert answer("x86_64", 20, audit=0x40000003) == KILL
    assert answer("x86_64", 0x40000000 | 1) == KILL
    assert answer("aarch64", 20, audit=0x40000028) == KILL


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(CannotIsolate, match="x86_64, aarch64, and not of sparc"):
        assemble("sparc")
