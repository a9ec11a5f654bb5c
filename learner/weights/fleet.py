"""The generators that the learner knows: who is there, what each serves, who was sent away, how long they were idle.

A plain record without I/O; the learner's event loop owns it. Time is passed in, in seconds of a monotonic clock.

An announced address is where weights and prompts are sent, so it must be one that is trusted.

    announce ──▶ catching up (serving None) ──committed──▶ serving ──suspend──▶ catching up
                      └───────────── lost, expel, silence ─────┴──▶ gone
"""

import asyncio
import fnmatch
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from learner.weights.provenance import InstanceMemory, LoadedWeights, Provenance
from protocol.fleet import TOLD_ALIKE, Announcement, AnnouncementAnswer, Fingerprints, SliceLayout, WeightForm
from protocol.generation import GeneratorState
from protocol.messages import MAX_GENERATORS, ServingGenerator
from protocol.model import PROTOCOL_VERSION, PolicyVersion
from services.http.client import HttpClient, ServiceError
from services.network import is_loopback, is_own_address

logger = logging.getLogger(__name__)

_SUPERSEDED = "generator {}: a process that started later announces itself under this id; give each its own"
_ROUNDS_HEARD = 3
_EVERY_S = 5.0
_ASKED_A_SECOND = 50


class JoinRefused(Exception):
    """A generator that must not serve this run. The text names what differs, on both sides; `kind` is for the wire."""

    def __init__(self, text: str, *, kind: str = "join_refused") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(eq=False)
class FleetMember:
    """A process that announces itself. `serving` is what it serves, None while it has to catch up."""

    announcement: Announcement
    last_seen: float
    serving: PolicyVersion | None = None
    fingerprint: str | None = None
    form: WeightForm = "whole"
    """Of what it was sent last."""
    base: str = ""
    """Digest of the base weights that it holds, to which adapters alone can be sent; empty if it holds none."""
    slices: SliceLayout | None = None
    """The parts of the weights that its workers read, if they have told."""
    sent_bytes: int | None = None
    """Bytes of what it was sent last, if they are not those of its form."""
    doubted: str | None = None
    """Reason why its weights may be wrong, if they may: it serves nothing, and is sent nothing."""

    @property
    def generator_id(self) -> str:
        return self.announcement.generator_id

    @property
    def instance(self) -> str:
        return self.announcement.instance

    @property
    def url(self) -> str:
        return self.announcement.url.rstrip("/")

    @property
    def able(self) -> bool:
        """True if it can take weights now."""
        return self.announcement.condition == "able" and self.doubted is None

    @property
    def pulls(self) -> bool:
        """True if it takes part in no broadcast, and gets each version by a download of its own."""
        return self.announcement.weights == "pull"


@dataclass
class FleetMembers:
    """Members by id. `changed` is called after every change of members, of what one serves or is able to."""

    fingerprints: Fingerprints
    incarnation: int
    announce_every_s: float
    silence_s: float
    changed: Callable[[], None]
    url_fault: Callable[[str], str | None] = lambda url: None
    provenance: Provenance = field(default_factory=Provenance)
    """Proofs of versions by processes; it is told of every commit, proof and departure."""
    expulsions: int = 0
    """Number of generators that were expelled so far."""
    _members: dict[str, FleetMember] = field(default_factory=dict)
    _expelled: InstanceMemory[str] = field(default_factory=InstanceMemory)
    _superseded: InstanceMemory[str] = field(default_factory=InstanceMemory)

    def announce(self, announcement: Announcement, *, now: float) -> AnnouncementAnswer:
        """Takes a generator in, or notes that it is still there. Raises JoinRefused."""
        self._check(announcement)
        self._check_order(announcement, now=now)
        self._check_room(announcement)
        member = self._members.get(announcement.generator_id)
        if member is None or _process(member.announcement) != _process(announcement):
            self._take_in(announcement, instead_of=member, now=now)
        else:
            self._heard_of(member, announcement, now=now)
        return AnnouncementAnswer(incarnation=self.incarnation, announce_every_s=self.announce_every_s)

    def _check_order(self, announcement: Announcement, *, now: float) -> None:
        """Refuses what a predecessor said before its end: it may arrive after the first word of its successor. Clocks
        of two machines may differ, so a successor that has gone silent keeps nobody out.
        """
        member = self._members.get(announcement.generator_id)
        if member is None or member.instance == announcement.instance:
            return
        is_heard = now - member.last_seen <= _ROUNDS_HEARD * self.announce_every_s
        if is_heard and 0 < announcement.started_at < member.announcement.started_at:
            raise JoinRefused(_SUPERSEDED.format(announcement.generator_id), kind="superseded")

    def _check_room(self, announcement: Announcement) -> None:
        if announcement.generator_id not in self._members and len(self._members) >= MAX_GENERATORS:
            raise JoinRefused(
                f"generator {announcement.generator_id}: the fleet has {len(self._members)} generators, and a learner "
                f"takes at most {MAX_GENERATORS}: start fewer, or larger ones",
                kind="fleet_full",
            )

    def _take_in(self, announcement: Announcement, *, instead_of: FleetMember | None, now: float) -> None:
        if instead_of is not None and instead_of.instance != announcement.instance:
            self._superseded[instead_of.generator_id, instead_of.instance] = announcement.instance
            self.provenance.leave(instead_of.instance)
        self._members[announcement.generator_id] = FleetMember(announcement=announcement, last_seen=now)
        self.changed()

    def _heard_of(self, member: FleetMember, announcement: Announcement, *, now: float) -> None:
        before, member.announcement, member.last_seen = member.announcement, announcement, now
        if announcement.serving_version is None and member.serving is not None:
            # It holds no whole weights, or cannot use them: what was sent to it has to be sent again.
            member.serving, member.base = None, ""
            self.changed()
        elif before.condition != announcement.condition:
            self.changed()

    def _check(self, announcement: Announcement) -> None:
        name, process = announcement.generator_id, (announcement.generator_id, announcement.instance)
        if (why := self._expelled.get(process)) is not None:
            reason = f"generator {name} was expelled: {why}. Restart it to have it checked again."
            raise JoinRefused(reason, kind="expelled")
        if process in self._superseded:
            raise JoinRefused(_SUPERSEDED.format(name), kind="superseded")
        if announcement.protocol_version != PROTOCOL_VERSION:
            raise JoinRefused(
                f"generator {name} speaks protocol version {announcement.protocol_version}, the learner "
                f"{PROTOCOL_VERSION}: run the same release on both."
            )
        if (fault := self.url_fault(announcement.url)) is not None:
            raise JoinRefused(f"generator {name}: {fault}", kind="untrusted_url")
        for what in ("model", "tokenizer", "chat_template"):
            theirs, ours = getattr(announcement.fingerprints, what), getattr(self.fingerprints, what)
            if theirs != ours:
                told = TOLD_ALIKE if what == "chat_template" else ""
                raise JoinRefused(
                    f"generator {name} has another {what.replace('_', ' ')}: its fingerprint is {theirs}, "
                    f"the learner's is {ours}. Start both from the same model directory{told}."
                )

    def members(self) -> list[FleetMember]:
        """Everybody who is there, by id."""
        return [self._members[name] for name in sorted(self._members)]

    def holds(self, member: FleetMember) -> bool:
        """True if this very process is still a member; a later one under its id is another."""
        return self._members.get(member.generator_id) is member

    def serving(self) -> list[ServingGenerator]:
        """Generators that can take requests, for env_services."""
        return [
            ServingGenerator(generator_id=member.generator_id, url=member.url, policy_version=str(member.serving))
            for member in self.members()
            if member.serving is not None
        ]

    def served_lengths(self) -> list[int]:
        """The longest text of each generator that can take requests, in tokens."""
        return [each.announcement.max_model_len for each in self.members() if each.serving is not None]

    @property
    def served(self) -> int | None:
        """The oldest policy version number that a serving generator holds; None if nobody serves."""
        return min((member.serving.number for member in self._members.values() if member.serving), default=None)

    def asked_to_commit(self, member: FleetMember, version: PolicyVersion) -> None:
        """The generator may stamp `version` from now on; whether rightly is known when its proof is judged."""
        if self.holds(member):
            self.provenance.expect(member.instance, version)

    def not_committed(self, member: FleetMember, version: PolicyVersion) -> None:
        """Its commit failed, or its proof is not good: what it stamped with `version` since does not count."""
        self.provenance.give_up(member.instance, version)
        self.changed()

    def committed(
        self, generator_id: str, *, version: PolicyVersion, fingerprint: str, digest: str = "", base: str = ""
    ) -> None:
        """The generator has proven that it serves `version` now, whose weights have this digest, and that it holds the
        base weights of that digest.
        """
        member = self._members.get(generator_id)
        if member is not None:
            self.provenance.prove(member.instance, LoadedWeights(version, digest, fingerprint))
            member.serving = version
            member.fingerprint, member.base = fingerprint, base
            self.changed()

    def suspend(self, member: FleetMember) -> None:
        """The member missed new weights: it serves nothing until it has caught up."""
        if self.holds(member) and member.serving is not None:
            member.serving = None
            self.changed()

    def distrust(self, instance: str, *, since: PolicyVersion) -> None:
        """Distrusts samples of that process under `since` and later versions: they may be of other weights, and
        does not count.
        """
        self.provenance.distrust(instance, since=since)
        self.changed()

    def quarantine(self, generator_id: str, instance: str, *, reason: str) -> None:
        """Nothing of that process is believed, of whatever version, and it is expelled, or not taken back if it is away
        just now: what it sampled and is not trained yet is sampled again.
        """
        self.distrust(instance, since=PolicyVersion(1, 0))
        self._expelled[generator_id, instance] = reason
        for member in self.members():
            if member.instance == instance:
                self.expel(member.generator_id, reason=reason)

    def doubt(self, generator_id: str, *, reason: str) -> None:
        """The generator may serve something else than it was sent; whether it does is known when others are right."""
        member = self._members.get(generator_id)
        if member is not None:
            member.serving, member.doubted = None, reason
            self.changed()

    def expel_doubted(self) -> dict[str, str]:
        """Others are right, so the doubted are wrong. Returns who was expelled, and why."""
        doubted = {name: member.doubted for name, member in self._members.items() if member.doubted is not None}
        for name, reason in doubted.items():
            self.expel(name, reason=reason)
        return doubted

    @property
    def all_doubted(self) -> bool:
        """True if there is somebody, and nobody who is not doubted."""
        return bool(self._members) and all(member.doubted is not None for member in self._members.values())

    def lost(self, generator_id: str) -> None:
        """The generator does not answer. It may announce itself again."""
        member = self._members.pop(generator_id, None)
        if member is not None:
            self.provenance.leave(member.instance)
            self.changed()

    def expel(self, generator_id: str, *, reason: str) -> None:
        """The generator serves something else than it was sent. Its process is not taken back; the next one may be."""
        member = self._members.get(generator_id)
        if member is not None:
            self._expelled[generator_id, member.instance] = reason
            self.expulsions += 1
            self.lost(generator_id)

    def expelled(self, generator_id: str, instance: str) -> str | None:
        """The reason for which a process was expelled; None for one that was not."""
        return self._expelled.get((generator_id, instance))

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
    """The identity that a process keeps for its life; with another one, it is another process under the same id."""
    return announcement.instance, announcement.url, announcement.backend, announcement.world_size


class IdleWatch:
    """Sums idle and passed seconds over all serving generators, between `begin` and `end`."""

    def __init__(self, *, fleet: FleetMembers, client: HttpClient) -> None:
        self._fleet = fleet
        self._client = client
        self._last: dict[str, GeneratorState] = {}
        self.rates: dict[str, dict[str, float]] = {}
        """Of each serving generator in the last seconds: `tokens_per_s`, `idle_share`, and its `running` requests."""
        self._counting = False
        self._idle_s = 0.0
        self._passed_s = 0.0

    @property
    def share(self) -> float | None:
        """Idle time over passed time; None if nothing was measured."""
        return self._idle_s / self._passed_s if self._passed_s > 0 else None

    @property
    def pause_s(self) -> float:
        """Until all are asked again: what they count adds up, so the more there are, the more seldom."""
        return max(_EVERY_S, len(self._last) / _ASKED_A_SECOND)

    async def begin(self) -> None:
        """Training begins: count from now."""
        await self._ask_all()
        self._counting = True

    async def end(self) -> None:
        """Training has ended: count until now."""
        await self._ask_all()
        self._counting = False

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            await asyncio.sleep(self.pause_s)
            await self._ask_all()

    async def _ask_all(self) -> None:
        """All at the same time: silent ones must not add up."""
        serving = self._fleet.serving()
        for gone in self._last.keys() - {generator.generator_id for generator in serving}:
            del self._last[gone]
            self.rates.pop(gone, None)
        async with asyncio.TaskGroup() as tasks:
            for generator in serving:
                tasks.create_task(self._ask(generator))

    async def _ask(self, generator: ServingGenerator) -> None:
        try:
            state = await self._client.get(f"{generator.url}/v1/state", GeneratorState, deadline_s=5.0)
        except ServiceError as error:
            logger.debug("no state of generator %s: %s", generator.generator_id, error)
            return
        before = self._last.get(generator.generator_id)
        self._last[generator.generator_id] = state
        if before is not None and (passed_s := state.uptime_s - before.uptime_s) > 0:
            self.rates[generator.generator_id] = {
                "tokens_per_s": max(0.0, (state.tokens_generated - before.tokens_generated) / passed_s),
                "idle_share": min(1.0, max(0.0, (state.idle_s - before.idle_s) / passed_s)),
                "running": state.running,
            }
        if self._counting and before is not None and state.uptime_s >= before.uptime_s:
            self._idle_s += state.idle_s - before.idle_s
            self._passed_s += state.uptime_s - before.uptime_s


@dataclass(frozen=True)
class TrustedUrls:
    """Addresses on this machine, those whose host fits an entry of `hosts`, and, with `by_certificate`, every https://
    one: whoever answers there must show a certificate of our own CA. An entry is a host, a pattern such as
    `*.gpu.example`, or a network such as `10.0.0.0/8`.
    """

    hosts: tuple[str, ...] = ()
    by_certificate: bool = False

    def fault(self, url: str) -> str | None:
        """Reason why nothing is sent to a URL; None if it is trusted."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https") or parts.username or parts.query or parts.fragment:
            return f"{url!r} is no address of a generator: expected http://host:port or https://host:port"
        if port == 0 or not self._is_trusted(host, scheme=parts.scheme):
            return (
                f"its address {url} is not one that this learner sends weights and prompts to: add {host} to "
                "weights.generator_hosts, or give both sides certificates and the learner http.tls_ca_file"
            )
        return None

    def _is_trusted(self, host: str, *, scheme: str) -> bool:
        if is_loopback(host) or host.lower() == socket.gethostname().lower() or is_own_address(host):
            return True
        if self.by_certificate and scheme == "https":
            return True
        return any(_fits(host, entry) for entry in self.hosts)


def _fits(host: str, entry: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return fnmatch.fnmatchcase(host.lower(), entry.lower())
