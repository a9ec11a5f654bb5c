"""The generators that the learner knows: who is there, what each serves, and who was sent away.

A plain record without I/O; the learner's event loop owns it. Time is passed in, in seconds of a monotonic clock.

    announce ──▶ catching up (serving None) ──committed──▶ serving ──suspend──▶ catching up
                      └───────────── lost, expel, silence ─────┴──▶ gone
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.fleet import Announcement, AnnouncementAnswer, Fingerprints
from protocol.messages import ServingGenerator
from protocol.versions import PROTOCOL_VERSION, PolicyVersion


class JoinRefused(Exception):
    """A generator that must not serve this run. The text names what differs, on both sides; `kind` is for the wire."""

    def __init__(self, text: str, *, kind: str = "join_refused") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(eq=False)
class Member:
    """One process that announces itself. `serving` is what it serves, None while it has to catch up."""

    announcement: Announcement
    last_seen: float
    serving: PolicyVersion | None = None
    fingerprint: str | None = None

    @property
    def generator_id(self) -> str:
        return self.announcement.generator_id

    @property
    def url(self) -> str:
        return self.announcement.url.rstrip("/")

    @property
    def able(self) -> bool:
        """Whether it can take weights now."""
        return self.announcement.condition == "able"


@dataclass
class Fleet:
    """Members by id. `changed` is called after every change of members, of what one serves or is able to."""

    fingerprints: Fingerprints
    incarnation: int
    announce_every_s: float
    silence_s: float
    changed: Callable[[], None]
    _members: dict[str, Member] = field(default_factory=dict)
    _expelled: dict[tuple[str, str], str] = field(default_factory=dict)
    _superseded: set[tuple[str, str]] = field(default_factory=set)

    def announce(self, announcement: Announcement, *, now: float) -> AnnouncementAnswer:
        """Takes a generator in, or notes that it is still there. Raises JoinRefused."""
        self._check(announcement)
        member = self._members.get(announcement.generator_id)
        if member is None or _process(member.announcement) != _process(announcement):
            self._take_in(announcement, instead_of=member, now=now)
        else:
            self._heard_of(member, announcement, now=now)
        return AnnouncementAnswer(incarnation=self.incarnation, announce_every_s=self.announce_every_s)

    def _take_in(self, announcement: Announcement, *, instead_of: Member | None, now: float) -> None:
        if instead_of is not None and instead_of.announcement.instance != announcement.instance:
            self._superseded.add((instead_of.generator_id, instead_of.announcement.instance))
        self._members[announcement.generator_id] = Member(announcement=announcement, last_seen=now)
        self.changed()

    def _heard_of(self, member: Member, announcement: Announcement, *, now: float) -> None:
        before, member.announcement, member.last_seen = member.announcement, announcement, now
        if announcement.serving_version is None and member.serving is not None:
            # It holds no whole weights, or cannot use them: what was sent to it has to be sent again.
            member.serving = None
            self.changed()
        elif before.condition != announcement.condition:
            self.changed()

    def _check(self, announcement: Announcement) -> None:
        name, process = announcement.generator_id, (announcement.generator_id, announcement.instance)
        if process in self._expelled:
            reason = f"generator {name} was expelled: {self._expelled[process]}. Restart it to have it checked again."
            raise JoinRefused(reason, kind="expelled")
        if process in self._superseded:
            reason = f"generator {name}: a process that started later announces itself under this id; give each its own"
            raise JoinRefused(reason, kind="superseded")
        if announcement.protocol_version != PROTOCOL_VERSION:
            raise JoinRefused(
                f"generator {name} speaks protocol version {announcement.protocol_version}, the learner "
                f"{PROTOCOL_VERSION}: run the same release on both."
            )
        for what in ("model", "tokenizer", "chat_template"):
            theirs, ours = getattr(announcement.fingerprints, what), getattr(self.fingerprints, what)
            if theirs != ours:
                raise JoinRefused(
                    f"generator {name} has another {what.replace('_', ' ')}: its fingerprint is {theirs}, "
                    f"the learner's is {ours}. Start both from the same model directory."
                )

    def members(self) -> list[Member]:
        """Everybody who is there, by id."""
        return [self._members[name] for name in sorted(self._members)]

    def holds(self, member: Member) -> bool:
        """Whether this very process is still a member; a later one under its id is another."""
        return self._members.get(member.generator_id) is member

    def serving(self) -> list[ServingGenerator]:
        """Who can take requests, as env_services are told."""
        return [
            ServingGenerator(generator_id=member.generator_id, url=member.url, policy_version=str(member.serving))
            for member in self.members()
            if member.serving is not None
        ]

    @property
    def served(self) -> int | None:
        """The oldest policy version number that a serving generator holds; None if nobody serves."""
        return min((member.serving.number for member in self._members.values() if member.serving), default=None)

    def committed(self, generator_id: str, *, version: PolicyVersion, fingerprint: str) -> None:
        """The generator serves `version` now."""
        member = self._members.get(generator_id)
        if member is not None:
            member.serving = version
            member.fingerprint = fingerprint
            self.changed()

    def suspend(self, member: Member) -> None:
        """The member missed new weights: it serves nothing until it has caught up."""
        if self.holds(member) and member.serving is not None:
            member.serving = None
            self.changed()

    def lost(self, generator_id: str) -> None:
        """The generator does not answer. It may announce itself again."""
        if self._members.pop(generator_id, None) is not None:
            self.changed()

    def expel(self, generator_id: str, *, reason: str) -> None:
        """The generator serves something else than it was sent. Its process is not taken back; the next one may be."""
        member = self._members.get(generator_id)
        if member is not None:
            self._expelled[generator_id, member.announcement.instance] = reason
            self.lost(generator_id)

    def stood_still(self, seconds: float) -> None:
        """The learner itself was away for so long, and could hear nobody: that silence is not the generators'."""
        for member in self._members.values():
            member.last_seen += seconds

    def expire(self, *, now: float) -> list[str]:
        """Drops members that were silent for longer than `silence_s`; returns their ids."""
        silent = [name for name, member in self._members.items() if now - member.last_seen > self.silence_s]
        for name in silent:
            self.lost(name)
        return silent


def _process(announcement: Announcement) -> tuple[str, str, str, int]:
    """What a process keeps for its life; with another one, it is another process under the same id."""
    return announcement.instance, announcement.url, announcement.backend, announcement.world_size
