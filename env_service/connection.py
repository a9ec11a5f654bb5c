"""The conversation with the learner.

    learner ──Welcome, Fleet, Granted, Acknowledged, Cancelled──▶ receive ─▶ fleet, running leases, outbox
    learner ◀─Hello, Heartbeat, Finished, Failed, Goodbye──────── tick, report

Two loops. `receive` waits for messages of the learner, for as long as there are none. `tick` waits for the clock, or
for a welcome: it says hello until it is welcomed, and again whenever the learner has been silent, since it may have
been started anew; it heartbeats, and sends again what is unacknowledged. A finished rollout sends its outcome itself.

Between a hello and its welcome nothing else is said: a learner that was started anew must know from the hello what runs
here before it grants, and one of another run must hear nothing of the old run's leases, whose numbers are also its own.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from env_service.checkpoints.records import LeaseRecords
from env_service.leases.outbox import Outbox
from env_service.leases.running import RunningLeases
from env_service.rollouts.fleet import GeneratorFleet
from env_service.rollouts.outcomes import Outcome, RolloutMetrics
from protocol.codec import MalformedMessage, MessageTooLarge
from protocol.lease_keys import LeaseKey, key_of
from protocol.messages import (
    MAX_LEASES,
    Fleet,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseCancellation,
    LeaseGrant,
    Message,
    OutcomeReceipt,
    PeerRefusal,
    RunningLease,
    StatusNote,
    Welcome,
)
from services.logs import Occasionally
from services.zmq.sockets import DealerSocket, SendTimeout

logger = logging.getLogger(__name__)

_HELLO_EVERY_S = 1.0
_RAREST_HELLO = 5
"""Hellos to an absent learner queue up in the socket, and all arrive when it starts: they come ever more rarely, at
last this many times the first interval apart.
"""
_GOODBYE_S = 1.0
_NOTE_DEADLINE_S = 2.0
_UNKNOWN_PEER = "unknown_peer"
"""The reason by which a learner refuses what comes before a hello."""
_AT_EACH_HELLO = ("hello", "name_taken", "namesake")
"""Reasons that come again with each hello, of this process or of a namesake."""
_UNREADABLE = (MessageTooLarge.reason, MalformedMessage.reason)
"""Reasons that come again each time that the same message is sent."""
_COMPLAIN_EVERY_S = 30.0
_SILENT_HEARTBEATS = 5
"""A learner that says nothing for so many heartbeats is greeted anew, which an idle one answers with a welcome; after
twice as many it counts as gone.
"""


class LearnerLink:
    """Speaks with one learner, through all of its restarts. `clock` is in seconds.

    `records` are of the leases that the next process of this name can go on with. `refusal` is why the learner has not
    taken this process in, in its words; None if it has, or has not said so.
    """

    def __init__(
        self,
        *,
        connection: DealerSocket,
        hello: Hello,
        fleet: GeneratorFleet,
        outbox: Outbox,
        metrics: RolloutMetrics,
        clock: Callable[[], float] = time.monotonic,
        hello_every_s: float = _HELLO_EVERY_S,
        records: LeaseRecords | None = None,
    ) -> None:
        self._connection = connection
        self._hello = hello
        self._fleet = fleet
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._hello_every_s = hello_every_s
        self._welcome: Welcome | None = None
        self._must_greet = True
        self._records = records
        self._run = "" if records is None else records.run
        self._last_heard = clock()
        self._unheard = True
        self._unanswered_hellos = 0
        self._fleet_heard = 0
        self._changed = asyncio.Event()
        self._may_complain = Occasionally(every_s=_COMPLAIN_EVERY_S)
        self.refusal: str | None = None
        metrics.unacknowledged.set_function(lambda: len(outbox))

    @property
    def name(self) -> str:
        """The name of this process, by which the learner knows it."""
        return self._hello.env_id

    @property
    def welcomed(self) -> bool:
        """True if the learner has accepted this process, and has not been silent since."""
        return self._welcome is not None

    @property
    def silence_s(self) -> float | None:
        """Seconds since the learner last said something; None if it never did."""
        return None if self._unheard else self._clock() - self._last_heard

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; it is looked at after each message of the learner and each tick."""
        while not condition():
            await self._changed.wait()

    async def report(self, outcome: Outcome) -> None:
        """Keep an outcome until it is acknowledged, and send it if the learner is there."""
        self._outbox.add(outcome)
        if not self._must_greet:
            await self._send_due()

    async def receive(self, running: RunningLeases) -> None:
        """Take the learner's messages until cancelled."""
        while True:
            message = await self._connection.receive()
            self._last_heard, self._unheard = self._clock(), False
            await self._handle(message, running)
            self._stir()

    async def tick(self, running: RunningLeases) -> None:
        """Hello, heartbeats and re-sending, until cancelled."""
        while True:
            await self._speak(running)
            self._stir()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s()):
                    await self._until_welcome_changes()

    async def note(self, note: StatusNote) -> None:
        """Tell the learner how this process is, whether it has welcomed it or not."""
        await self._send(note, deadline_s=_NOTE_DEADLINE_S)

    async def leave(self, reason: str, *, within_s: float) -> None:
        """Wait for acknowledgements for up to `within_s` seconds, then say goodbye."""
        if self._outbox and self.welcomed:
            logger.info("%d groups are not acknowledged yet: waiting for up to %g s", len(self._outbox), within_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.wait_for(lambda: len(self._outbox) == 0)
        await self._send(Goodbye(reason=reason, keeps=self._recorded()), deadline_s=_GOODBYE_S)

    def _recorded(self) -> tuple[RunningLease, ...]:
        """The leases that the next process of this name goes on with."""
        keys = () if self._records is None else self._records.keys()[:MAX_LEASES]
        return tuple(RunningLease(**key._asdict()) for key in keys)

    def _interval_s(self) -> float:
        if self._welcome is not None:
            return self._welcome.heartbeat_every_s
        return self._hello_every_s * max(1, min(self._unanswered_hellos, _RAREST_HELLO))

    async def _until_welcome_changes(self) -> None:
        before = self._welcome
        await self.wait_for(lambda: self._welcome is not before)

    async def _speak(self, running: RunningLeases) -> None:
        silence = self._silent_heartbeats()
        if self._welcome is not None and silence > 2 * _SILENT_HEARTBEATS:
            logger.warning("the learner does not answer; rollouts go on, their groups are kept for it")
            self._welcome = None
        if self._welcome is None or silence > _SILENT_HEARTBEATS:
            self._must_greet = True
        if self._must_greet:
            self._metrics.hellos.inc()
            self._unanswered_hellos += 1
            await self._send(self._greeting(running))
        else:
            held = self._held(running)
            for start in range(0, max(1, len(held)), MAX_LEASES):
                await self._send(Heartbeat(running=held[start : start + MAX_LEASES], fleet=self._fleet_heard))
            await self._send_due()

    def _greeting(self, running: RunningLeases) -> Hello:
        return self._hello.model_copy(update={"run": self._run, "running": self._held(running)[:MAX_LEASES]})

    def _held(self, running: RunningLeases) -> tuple[RunningLease, ...]:
        ended = self._outbox.held()
        known = {key_of(lease) for lease in ended}
        return (*ended, *(lease for lease in running.report_progress() if key_of(lease) not in known))

    def _silent_heartbeats(self) -> float:
        """Number of heartbeats since the learner last said something."""
        return 0.0 if self._welcome is None else (self._clock() - self._last_heard) / self._welcome.heartbeat_every_s

    async def _handle(self, message: Message, running: RunningLeases) -> None:
        match message:
            case Welcome():
                self._on_welcome(message, running)
            case Fleet():
                self._fleet_heard = message.number
                self._fleet.replace(message.generators)
                self._metrics.generator_failures.present({each.generator_id for each in message.generators})
            case LeaseGrant():
                await self._on_granted(message, running)
            case OutcomeReceipt():
                self._outbox.acknowledge(key_of(message))
                self._forget_records(key_of(message))
            case LeaseCancellation():
                self._on_cancelled(message, running)
            case PeerRefusal():
                self._on_refused(message)
            case Goodbye():
                logger.info("the learner says goodbye: %s", message.reason)
                self._forget_welcome()
            case _:
                logger.warning("the learner sent a %s, which is not for an env_service", message.kind)

    def _on_welcome(self, welcome: Welcome, running: RunningLeases) -> None:
        known, self._welcome = self._welcome, welcome
        self._unanswered_hellos = self._fleet_heard = 0
        self._must_greet = False
        self.refusal = None
        if welcome.run != self._run:
            self._begin_run(welcome.run, running)
        if known is None or known.incarnation != welcome.incarnation:
            logger.info("connected to the learner (incarnation %d)", welcome.incarnation)
            self._outbox.make_due()

    def _begin_run(self, run: str, running: RunningLeases) -> None:
        """The leases of the run before have the same numbers as those of this one, and nobody waits for them."""
        if self._run:
            logger.info("the learner is of another run: the leases of the one before are given up")
        running.cancel_all()
        self._outbox.clear()
        self._run = run
        if self._records is not None:
            self._records.begin_run(run)

    async def _on_granted(self, granted: LeaseGrant, running: RunningLeases) -> None:
        for lease in granted.leases:
            key = key_of(lease)
            if key in self._outbox:
                self._outbox.make_due(key)
            else:
                await running.start(lease)

    def _on_cancelled(self, cancelled: LeaseCancellation, running: RunningLeases) -> None:
        """Keeps what has finished already until it is acknowledged: the learner may want it after all."""
        keys = [key_of(lease) for lease in cancelled.leases]
        running.cancel(keys)
        self._forget_records(*(key for key in keys if key not in self._outbox))

    def _forget_records(self, *keys: LeaseKey) -> None:
        if self._records is not None:
            for key in keys:
                self._records.remove(key)

    def _on_refused(self, refused: PeerRefusal) -> None:
        """Greets a learner again that does not know this process any more, and gives up groups that cannot be read; to
        other refusals there is no answer.
        """
        self._metrics.refusals.labels(reason=refused.reason).inc()
        if refused.reason in _AT_EACH_HELLO:
            if refused.reason != "namesake":
                self.refusal = refused.message
            if self._may_complain():
                logger.warning("the learner says: %s", refused.message)
        elif refused.reason != _UNKNOWN_PEER:
            logger.warning("the learner refused a message (%s): %s", refused.reason, refused.message)
            if refused.reason in _UNREADABLE:
                self._give_up_unreadable()
        elif self._welcome is not None:  # not said of every message that was under way to a learner that has restarted
            logger.info("the learner does not know this process: saying hello again")
            self._forget_welcome()

    def _give_up_unreadable(self) -> None:
        for failed in self._outbox.replace_unreadable():
            logger.error("lease %d comes to nothing: %s", failed.lease_id, failed.reason)
            self._metrics.failures.labels(kind="data").inc()

    def _forget_welcome(self) -> None:
        self._welcome = None
        self._must_greet = True

    async def _send_due(self) -> None:
        for outcome, again in self._outbox.take_due():
            self._metrics.resent.inc(again)
            await self._send(outcome)

    async def _send(self, message: Message, *, deadline_s: float = 5.0) -> None:
        """Send, or let it be: what matters is said again at a later tick."""
        try:
            await self._connection.send(message, deadline_s=deadline_s)
        except SendTimeout as error:
            logger.warning("could not send a %s: %s", message.kind, error)

    def _stir(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
