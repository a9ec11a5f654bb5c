"""Proofs: which generator's process has proven which policy version; what nobody has proven is not trained on.

    asked to commit ─▶ awaited ── its proof is good ──▶ proven ── later found to serve old weights ──▶ distrusted
                          └── found wrong, does not answer, leaves ──▶ unproven, as if it had never been asked

A generator stamps a version from its commit on, and its proof is judged some time later: the checksum and the logprobs
of the probe take milliseconds to seconds. What it samples in between may finish before that. So a group waits while a
version of its tokens is awaited of the process that sampled them, and is refused if that version stays unproven.

Evidence of old weights gathers over several versions. When it is believed, the process is distrusted from the version
at which it began to gather, and what is still to be trained of that is given back.

A plain record without I/O, owned by the event loop. `untold` is for the journal, so that a learner that resumes
still knows who has proven what: groups that were sampled for its former life come in after that has ended.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup

T = TypeVar("T")

MAX_PROCESSES = 4096


class InstanceMemory(Generic[T]):
    """A value for each of the newest processes, named by its instance, with or without the generator's id.

    Of more than `most` the one that was set longest ago is forgotten, as if nothing had ever been known of it.
    """

    def __init__(self, *, most: int = MAX_PROCESSES) -> None:
        self._most = most
        self._values: dict[tuple[str, ...], T] = {}

    def __contains__(self, process: tuple[str, ...]) -> bool:
        return process in self._values

    def __setitem__(self, process: tuple[str, ...], value: T) -> None:
        self._values.pop(process, None)
        self._values[process] = value
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(tuple(self._values))

    def get(self, process: tuple[str, ...]) -> T | None:
        """The value of a process; None if nothing is known of it."""
        return self._values.get(process)

    def forget(self, process: tuple[str, ...]) -> None:
        """Nothing is known of it from here on."""
        self._values.pop(process, None)


class Standing(StrEnum):
    """Standing of the versions that a group's tokens are stamped with."""

    PROVEN = "proven"
    AWAITED = "awaited"
    UNPROVEN = "unproven"


@dataclass(frozen=True)
class LoggedProof:
    """Generators' processes that proved to serve a version: the checksums of what they loaded, by instance, and the
    digest of what was sent.
    """

    version: PolicyVersion
    digest: str
    fingerprints: Mapping[str, str]


@dataclass(frozen=True)
class LoggedDistrust:
    """A generator's process, by instance, none of whose tokens of this version or a later one is to be trained."""

    instance: str
    since: PolicyVersion


@dataclass(frozen=True)
class LoadedWeights:
    """The last proof of a process: the version, the digest of what was sent, the checksum of what it loaded."""

    version: PolicyVersion
    digest: str
    fingerprint: str


class Provenance:
    """By process, as its spans are signed, and by version."""

    def __init__(self) -> None:
        self._proven: dict[PolicyVersion, dict[str, LoadedWeights]] = {}
        self._last: InstanceMemory[LoadedWeights] = InstanceMemory()
        self._awaited: set[tuple[str, PolicyVersion]] = set()
        self._distrusted: InstanceMemory[PolicyVersion] = InstanceMemory()
        self._to_repeat: InstanceMemory[None] = InstanceMemory()
        """Distrusted since the journal's segment was begun."""
        self._recall_due = False
        self._forgotten_below = 0
        self._news: list[LoggedProof | LoggedDistrust] = []

    def expect(self, instance: str, version: PolicyVersion) -> None:
        """The process is asked to commit: from now on it may stamp this version."""
        self._awaited.add((instance, version))

    def give_up(self, instance: str, version: PolicyVersion) -> None:
        """Its commit came to nothing, or its proof is not good."""
        self._awaited.discard((instance, version))

    def prove(self, instance: str, loaded: LoadedWeights) -> None:
        """Its proof is good."""
        self.give_up(instance, loaded.version)
        self._distrusted.forget((instance,))
        self._note(instance, loaded)
        self._news.append(_logged(loaded, instance))

    def _note(self, instance: str, loaded: LoadedWeights) -> None:
        self._proven.setdefault(loaded.version, {})[instance] = loaded
        self._last[instance,] = loaded

    def last(self, instance: str) -> LoadedWeights | None:
        """The last proof of a process, to this life of the learner or to a former one."""
        return self._last.get((instance,))

    def distrust(self, instance: str, *, since: PolicyVersion) -> None:
        """It may have served older weights than it said since that version."""
        since = min(since, self._distrusted.get((instance,)) or since)
        self._distrusted[instance,] = since
        for version, proven in self._proven.items():
            if version >= since:
                proven.pop(instance, None)
        self.leave(instance)
        self._recall_due = True
        self._to_repeat[instance,] = None
        self._news.append(LoggedDistrust(instance, since))

    def leave(self, instance: str) -> None:
        """The process has left: what it has not proven it will not prove."""
        self._awaited = {awaited for awaited in self._awaited if awaited[0] != instance}

    def forget(self, *, below: int) -> None:
        """Tokens of versions with a smaller number are too old to be trained, whoever sampled them."""
        self._forgotten_below = below
        self._proven = {version: proven for version, proven in self._proven.items() if version.number >= below}

    def standing(self, group: TrajectoryGroup) -> Standing:
        """The standing of all its tokens; of those that are too old to be trained anyway nothing is asked. Nobody drops
        a group for the age of its greedy answer, whose reward counts: that has to be known of any version.
        """
        unproven = self._unproven_own(group)
        if not any(self._too_old(version) for _, version in _signed(group.own_stamps)):
            unproven += self._unproven(_signed(group.greedy_stamps))
        if not unproven:
            return Standing.PROVEN
        return Standing.AWAITED if self._awaited.issuperset(unproven) else Standing.UNPROVEN

    def believed(self, instance: str, version: PolicyVersion) -> bool | None:
        """True of what a process says under a version that it has proven to serve; None while that is awaited. Of one
        too old to be known it is true, unless the process is distrusted.
        """
        since = self._since(instance)
        if since is not None and version >= since:
            return False
        if self._too_old(version) or instance in self._proven.get(version, ()):
            return True
        return None if (instance, version) in self._awaited else False

    def _unproven_own(self, group: TrajectoryGroup) -> list[tuple[str, PolicyVersion]]:
        stamps = _signed(group.own_stamps)
        return self._unproven((name, version) for name, version in stamps if not self._too_old(version))

    def _too_old(self, version: PolicyVersion) -> bool:
        return version.number < self._forgotten_below

    def _unproven(self, stamps: Iterable[tuple[str, PolicyVersion]]) -> list[tuple[str, PolicyVersion]]:
        return [(name, version) for name, version in stamps if name not in self._proven.get(version, ())]

    def fault(self, group: TrajectoryGroup) -> str:
        """The unproven tokens among its own, in words; if there are none, those of its greedy answer."""
        unproven, whose = self._unproven_own(group), "the group"
        names = {name for one in group.trajectories for turn in one.turns for name in turn.generator_ids}
        if not unproven and group.greedy_baseline is not None:
            unproven, whose = self._unproven(_signed(group.greedy_stamps)), "the greedy answer"
            names = set(group.greedy_baseline.generator_ids)
        versions = ", ".join(sorted({str(version) for _, version in unproven}))
        forgotten = any(self._too_old(version) for _, version in unproven)
        did = "may have proven to serve it, too long ago to be known" if forgotten else "did not prove to serve it"
        return (
            f"tokens of policy version {versions} were sampled by a generator that {did} ({whose} was sampled by "
            f"{', '.join(sorted(names))}): they are sampled again"
        )

    def recalled(self, groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Groups with a token of a process that is not believed any more, if one was distrusted since the last call."""
        if not self._recall_due:
            return []
        self._recall_due = False
        return [group for group in groups if is_recalled(group, self._since)]

    def _since(self, instance: str) -> PolicyVersion | None:
        return self._distrusted.get((instance,))

    def untold(self) -> Iterator[LoggedProof | LoggedDistrust]:
        """Proofs that the journal has not been told yet, those of one version together. Each is told once its successor
        is asked for: one that could not be written comes again.
        """
        self._news = _together(self._news)
        while self._news:
            yield self._news[0]
            del self._news[0]

    def tell_again(self) -> None:
        """The journal begins a segment that is to hold all that counts. It begins with copies of groups, which may have
        been made before their process was distrusted.
        """
        distrusted = [
            LoggedDistrust(instance, since)
            for (instance,) in self._to_repeat
            if (since := self._since(instance)) is not None
        ]
        self._to_repeat = InstanceMemory()
        self._news = [
            *distrusted,
            *(_logged(loaded, instance) for proven in self._proven.values() for instance, loaded in proven.items()),
            *self._news,
        ]

    def restore(self, proofs: Iterable[LoggedProof]) -> None:
        """Takes in what former lives of the learner knew, in the order in which they were told it."""
        for proof in proofs:
            for instance, fingerprint in proof.fingerprints.items():
                self._note(instance, LoadedWeights(proof.version, proof.digest, fingerprint))


def is_recalled(group: TrajectoryGroup, since_of: Callable[[str], PolicyVersion | None]) -> bool:
    """True if one of the group's tokens is of a process that is not believed since that version, or one before it."""
    signed = _signed(group.stamps)
    return any((since := since_of(instance)) is not None and version >= since for instance, version in signed)


def _signed(stamps: Iterable[tuple[str, str]]) -> set[tuple[str, PolicyVersion]]:
    """Processes that sampled tokens, each with a version."""
    return {(instance, PolicyVersion.parse(version)) for instance, version in stamps}


def _logged(loaded: LoadedWeights, instance: str) -> LoggedProof:
    return LoggedProof(loaded.version, loaded.digest, {instance: loaded.fingerprint})


def _together(news: Iterable[LoggedProof | LoggedDistrust]) -> list[LoggedProof | LoggedDistrust]:
    joined: list[LoggedProof | LoggedDistrust] = []
    for each in news:
        last = joined[-1] if joined else None
        if isinstance(each, LoggedProof) and isinstance(last, LoggedProof) and last.version == each.version:
            joined[-1] = LoggedProof(each.version, each.digest, {**last.fingerprints, **each.fingerprints})
        else:
            joined.append(each)
    return joined
