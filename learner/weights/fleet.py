"""The generators that the learner knows: who is there, what each serves, and who was sent away.

A plain record without I/O; the learner's event loop owns it. Time is passed in, in seconds of a monotonic clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.fleet import Announcement, AnnouncementAnswer, Fingerprints
from protocol.messages import ServingGenerator
from protocol.versions import PROTOCOL_VERSION, PolicyVersion


class JoinRefused(Exception):
    """A generator that must not serve this run. The text names what differs, on both sides."""


@dataclass
class Member:
    """A generator that announces itself. `serving` is what it serves now, None until its first commit."""

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


@dataclass
class Fleet:
    """Members by id. `changed` is called after every change of members or of what one serves."""

    fingerprints: Fingerprints
    incarnation: int
    announce_every_s: float
    silence_s: float
    changed: Callable[[], None]
    _members: dict[str, Member] = field(default_factory=dict)
    _expelled: dict[str, str] = field(default_factory=dict)

    def announce(self, announcement: Announcement, *, now: float) -> AnnouncementAnswer:
        """Takes a generator in, or notes that it is still there. Raises JoinRefused."""
        self._check(announcement)
        member = self._members.get(announcement.generator_id)
        if member is None or _rank_shape(member.announcement) != _rank_shape(announcement):
            self._members[announcement.generator_id] = Member(announcement=announcement, last_seen=now)
            self.changed()
        else:
            member.last_seen = now
            if announcement.serving_version is None and member.serving is not None:
                # It was started afresh between two announcements: it holds nothing that we sent.
                self._members[announcement.generator_id] = Member(announcement=announcement, last_seen=now)
                self.changed()
        return AnnouncementAnswer(incarnation=self.incarnation, announce_every_s=self.announce_every_s)

    def _check(self, announcement: Announcement) -> None:
        name = announcement.generator_id
        if name in self._expelled:
            raise JoinRefused(f"generator {name} was expelled: {self._expelled[name]}. Restart it under a new id.")
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

    def lost(self, generator_id: str) -> None:
        """The generator is gone, or holds no whole weights. It may announce itself again."""
        if self._members.pop(generator_id, None) is not None:
            self.changed()

    def expel(self, generator_id: str, *, reason: str) -> None:
        """The generator serves something else than it was sent. It is not taken back under this id."""
        self._expelled[generator_id] = reason
        self.lost(generator_id)

    def expire(self, *, now: float) -> list[str]:
        """Drops members that were silent for longer than `silence_s`; returns their ids."""
        silent = [name for name, member in self._members.items() if now - member.last_seen > self.silence_s]
        for name in silent:
            self.lost(name)
        return silent


def _rank_shape(announcement: Announcement) -> tuple[str, str, int]:
    """What a process keeps for its life; with another one, it is another process under the same id."""
    return announcement.url, announcement.backend, announcement.world_size
