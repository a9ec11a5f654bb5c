"""What runs in the learner's event loop, beside the trainer's thread: HTTP, intake, fleet and publisher."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from importlib.metadata import version

from learner.config import LearnerConfig
from learner.history.journal import RunLog
from learner.intake.failures import DeadLetters
from learner.intake.intake import Intake
from learner.recovery import Recovered
from learner.reports.measures import Measures
from learner.reports.records import Records
from learner.reports.status import LearnerStatus
from learner.teachers.teachers import Teachers
from learner.terms import evaluator, intake_options, lease_terms, publisher_options
from learner.weights.fleet import Fleet
from learner.weights.generator_watch import IdleWatch
from learner.weights.publisher import Publisher
from learner.weights.reports import JoinReport, PublishReport
from learner.weights.routes import add_routes
from learner.weights.shelf import Shelf
from protocol.fingerprints import fingerprint_directory
from services.http_app import create_app
from services.http_client import HttpClient
from services.http_server import Listener, serve_http
from services.metrics import Metrics
from services.process import Stop
from services.sockets import RouterSocket
from services.status import RecentFailures, add_status_route
from services.waiting import Waiting

log = logging.getLogger(__name__)

_SILENCE_TICK_S = 1.0


class Parts:
    """The objects of the event loop, made in the order of who needs whom."""

    def __init__(
        self,
        *,
        config: LearnerConfig,
        metrics: Metrics,
        measures: Measures,
        incarnation: int,
        socket: RouterSocket,
        client: HttpClient,
        records: Records,
        recovered: Recovered,
        journal: RunLog,
        failures: RecentFailures,
    ) -> None:
        self.config = config
        self.journal = journal
        self.failures = failures
        self.records = records
        self.recovered = recovered
        self.metrics = metrics
        self.measures = measures
        self.waits = Waiting(on_waited=self.measures.waited)
        self.closing_words = ""
        self._fleet_stirred = asyncio.Event()
        self.fleet = self._make_fleet(incarnation)
        self.teachers = Teachers(
            config.teachers, tokenizer=self.fleet.fingerprints.tokenizer, waits=self.waits, metrics=metrics
        )
        self.shelf = Shelf()
        self.idle = IdleWatch(fleet=self.fleet, client=client)
        self.publisher = Publisher(
            fleet=self.fleet,
            client=client,
            options=publisher_options(config, incarnation),
            shelf=self.shelf,
            waits=self.waits,
            published=self._published,
            joined=self._joined,
        )
        self.dead_letters = DeadLetters(
            config.run.folder / "dead_letters.jsonl",
            largest_share=config.leases.max_dead_letter_share,
            failed=measures.failed_write,
        )
        self.intake = self._make_intake(incarnation, socket)
        measures.books(self.intake.books)
        measures.lag_bound(lambda: recovered.ledger.max_lag)
        self.intake.readmit(recovered.spare_groups)
        self.status = self._make_status(incarnation)

    def _make_fleet(self, incarnation: int) -> Fleet:
        return Fleet(
            fingerprints=fingerprint_directory(self.config.model),
            incarnation=incarnation,
            announce_every_s=self.config.weights.announce_every_s,
            silence_s=self.config.weights.silence_s,
            changed=self._fleet_stirred.set,
        )

    def _make_intake(self, incarnation: int, socket: RouterSocket) -> Intake:
        return Intake(
            socket=socket,
            ledger=self.recovered.ledger,
            journal=self.journal,
            fleet=self.fleet,
            evaluator=evaluator(self.config, incarnation),
            terms=lease_terms(self.config),
            dead_letters=self.dead_letters,
            waits=self.waits,
            options=intake_options(self.config, incarnation, self.fleet.fingerprints),
            refused=self.measures.refused,
            belongs=self.recovered.history.contains,
            left_out=self.measures.left_out,
            accepted=self.teachers.prefetch,
            forgotten=self.teachers.forget,
        )

    def _make_status(self, incarnation: int) -> LearnerStatus:
        return LearnerStatus(
            name=self.config.run.name,
            folder=self.config.run.folder,
            total_steps=self.config.steps,
            incarnation=incarnation,
            ledger=self.recovered.ledger,
            fleet=self.fleet,
            env_services=self.intake.env_services,
            measures=self.measures,
            teachers=self.teachers.peers,
        )

    def loops(self, listener: Listener, stop: Stop) -> dict[str, Coroutine[object, object, None]]:
        """What runs beside the trainer's thread."""
        http = self.config.http
        app = create_app(
            service="learner",
            version=version("headway"),
            token=http.token,
            readiness=self.waits.readiness,
            metrics=self.metrics,
            max_body_bytes=http.max_body_bytes,
        )
        add_routes(app, fleet=self.fleet, shelf=self.shelf)
        add_status_route(
            app, service="learner", version=version("headway"), waits=self.waits, failures=self.failures,
            stopping=lambda: stop.requested, provider=self.status.report,
        )  # fmt: skip
        return {
            "http": serve_http(app, listener),
            "intake": self.intake.receive(),
            "tick": self.intake.tick(),
            "publisher": self.publisher.run(),
            "fleet_watch": self._watch_fleet(),
            "silence": self._drop_silent(),
            "idle": self.idle.run(),
        }

    def _published(self, report: PublishReport) -> None:
        self.records.publish(report)
        self.measures.published(report)

    def _joined(self, report: JoinReport) -> None:
        self.records.join(report)
        log.info(
            "generator %s has caught up with version %d in %.1f s, probe gap %.2g nats",
            report.generator_id, report.version, report.seconds, report.probe_gap,
        )  # fmt: skip

    async def _watch_fleet(self) -> None:
        while True:
            await self._fleet_stirred.wait()
            self._fleet_stirred.clear()
            self.publisher.fleet_changed()
            await self.intake.fleet_changed()

    async def _drop_silent(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_SILENCE_TICK_S)
            away_s = time.monotonic() - began - _SILENCE_TICK_S
            if away_s > _SILENCE_TICK_S:  # this process stood still: what others said meanwhile is unread
                self.fleet.stood_still(away_s)
            for name in self.fleet.expire(now=time.monotonic()):
                log.warning("generator %s is silent for %.0f s and leaves", name, self.config.weights.silence_s)
