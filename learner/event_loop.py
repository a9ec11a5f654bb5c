"""The parts in the learner's event loop, beside the trainer's thread: HTTP, intake, fleet and publisher, each with its
options from the configuration.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from learner.config import LearnerConfig
from learner.journal.checkpoints import oldest_open_lease
from learner.journal.journal import RunLog
from learner.journal.run_folder import run_name
from learner.leases.admission import GroupRules
from learner.leases.curriculum import FILE as CURRICULUM_FILE
from learner.leases.curriculum import Curriculum, CurriculumRules, LevelLog, MakeCurriculum
from learner.leases.dead_letters import DEAD_LETTERS, DeadLetters
from learner.leases.evaluation_leases import Evaluator
from learner.leases.filters import GroupFilter
from learner.leases.granting import LeaseTerms
from learner.leases.intake import Intake
from learner.leases.options import IntakeEvents, IntakeOptions
from learner.leases.part_turns import FILE as TURNS_FILE
from learner.leases.part_turns import MakeTurns, PartTurns
from learner.leases.run_rows import RunRows
from learner.leases.task_draws import FILE as DRAWS_FILE
from learner.leases.task_draws import DrawRules, MakeDraws, TaskDraws
from learner.leases.task_priors import TaskPriors, read_priors
from learner.ledger import LedgerConfig
from learner.page.files import PAGE_PATHS
from learner.page.routes import RunPage, ShownRun, shown_machines, shown_processes
from learner.page.store import TrajectoryStore
from learner.page.what_if_routes import WhatIfSettings
from learner.recovery import RecoveryPoint
from learner.releases.making import make_feedback, make_releases
from learner.releases.metrics import ReleaseMetrics
from learner.releases.releases import Releases
from learner.releases.routes import FleetsByChannel, ShelvesByVersion, add_feedback_routes, add_release_routes
from learner.reports.run_monitor import RunMonitor
from learner.reports.run_records import Records
from learner.reports.status import LearnerMetrics, LearnerStatus
from learner.reports.webhook import Webhook
from learner.teachers.limits import TeachingLimits
from learner.teachers.teachers import PolicyFleet, Teachers
from learner.trust.evidence import Suspicion, TrustTest
from learner.trust.watch import TrustWatch
from learner.weights.fleet import FleetMembers, IdleWatch, TrustedUrls
from learner.weights.proofs import TOLERANCES
from learner.weights.published import JoinReport, PublishedWeights, PublisherOptions, PublishReport, add_routes
from learner.weights.publisher import Publisher
from learner.weights.tree import TREE_FOLDER, add_tree_routes, tree_readers
from learner.what_if_form import checked, form_of
from protocol.fleet import Fingerprints
from protocol.generation import Sampling
from protocol.model import PolicyVersion
from protocol.status import Status
from protocol.trajectories import TrajectoryGroup
from services.diagnosis.verdict import RunVerdict
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.status import RecentFailures, add_status_route
from services.http.tls import client_tls
from services.http.waiting import Waiting
from services.model_folder import fingerprint_directory, positions, vocabulary_size, with_size
from services.process import Stop
from services.zmq.sockets import RouterSocket

logger = logging.getLogger(__name__)
_SILENCE_TICK_S = 1.0
_COMMIT_S = 20.0
_MOST_AHEAD = 64
"""Tasks that are drawn at once, and written down with one sync of the disk, at most those of a step."""
_LOADS_EVERY_S = 20.0
_STARTING = "the ranks load the model and make their optimizer, which takes minutes for a large one"


def ledger_config(config: LearnerConfig) -> LedgerConfig:
    """The rules of leases and lag."""
    return LedgerConfig(
        groups_per_step=config.fresh_per_step,
        max_lag=config.max_lag,
        on_lag=config.lag.on_lag,
        straggler_timeout_s=config.lag.straggler_timeout_s,
        max_drops_per_lease=config.lag.max_drops_per_lease,
        lease_timeout_s=config.leases.timeout_s,
        longest_attempt_s=config.leases.longest_attempt_s,
        longest_wait_s=config.leases.longest_wait_s,
        infrastructure_retries=config.leases.infrastructure_retries,
        data_retries=config.leases.data_retries,
        reused_per_step=config.reused_per_step,
        reuse_priority=config.reuse.priority,
        max_reuses=config.reuse.max_reuses,
        reuse_seed=config.seed,
        max_lag_of_reused=config.reuse.max_lag,
    )


def publisher_options(config: LearnerConfig, incarnation: int) -> PublisherOptions:
    """Options for publishing weights."""
    weights, training = config.weights, config.training
    merged = training.lora.rank > 0 and training.publish_dtype != "float32"
    if training.dtype == "float32" != training.publish_dtype:
        logger.warning(
            "weights are trained in float32 but published in %s, which loses what a step moves by less than 0.2 %% of "
            "a weight: generators sample with other weights than the learner's; set learner.training.dtype to the "
            "same, or publish float32 to generators of engine.dtype float32",
            training.publish_dtype,
        )
    return PublisherOptions(
        incarnation=incarnation,
        backend=weights.backend,
        host=weights.host,
        port=weights.port,
        bucket_timeout_s=weights.bucket_timeout_s,
        meet_timeout_s=weights.meet_timeout_s,
        commit_timeout_s=commit_limit_s(config),
        pull_timeout_s=weights.pull_timeout_s,
        parallel_pulls=weights.parallel_pulls,
        slowest_pull_bytes_per_s=weights.pull_mb_per_s * 1e6,
        anchor_every=weights.anchor_every,
        most_behind=min(config.max_lag, max(1, config.max_lag // 2)),
        probe_tolerance=weights.probe_tolerance,
        dtype=training.publish_dtype,
        slices=weights.slices,
        as_computed=training.dtype == training.publish_dtype and not merged,
    )


def commit_limit_s(config: LearnerConfig) -> float:
    """Seconds that a generator has for a commit: it goes through the weights once to load them, and once for the
    probe.
    """
    given = config.weights.commit_timeout_s
    return given if given is not None else with_size(with_size(_COMMIT_S, config.model), config.model)


def evaluator(config: LearnerConfig, incarnation: int) -> Evaluator:
    """Held-out evaluation."""
    return Evaluator(
        config=config.evaluation,
        max_tokens=config.rollouts.max_tokens,
        timeout_s=config.leases.timeout_s,
        longest_attempt_s=config.leases.longest_attempt_s,
        longest_wait_s=config.leases.longest_wait_s,
        incarnation=incarnation,
        stop_token_ids=config.rollouts.stop_token_ids,
    )


def group_filter(config: LearnerConfig) -> GroupFilter:
    """The filter of groups; of those without spread the algorithm judges where the configuration is silent."""
    rollouts = config.rollouts
    wanted = rollouts.drop_uniform_groups
    return GroupFilter(
        drop_uniform=config.algo.wants_spread if wanted is None else wanted,
        min_mean_reward=rollouts.min_mean_reward,
        max_mean_reward=rollouts.max_mean_reward,
        rounds=rollouts.filter_rounds,
        greedy_baseline=config.algo.greedy_baseline,
    )


def intake_options(
    config: LearnerConfig,
    incarnation: int,
    fingerprints: Fingerprints,
    *,
    may_write: Callable[[], None],
    served: Callable[[], Iterable[int]] = tuple,
    refused: Callable[[str], int | None] = lambda name: None,
) -> IntakeOptions:
    """Options of the exchange with env_services; reads the model's directory. `may_write` as of a LevelLog, `served`
    and `refused` as of TeachingLimits.
    """
    rollouts = config.rollouts
    return IntakeOptions(
        run=run_name(config.run.folder),
        incarnation=incarnation,
        environment=rollouts.environment,
        heartbeat_every_s=config.leases.heartbeat_every_s,
        lease_timeout_s=config.leases.timeout_s,
        tokenizer=fingerprints.tokenizer,
        chat_template=fingerprints.chat_template,
        rules=GroupRules(
            vocabulary_size=vocabulary_size(config.model),
            min_group_size=rollouts.min_group_size,
            filters=group_filter(config),
            max_reward=rollouts.max_reward,
            greedy_baseline=config.algo.greedy_baseline,
            teaching=TeachingLimits(
                config.teachers,
                top=_teacher_top(config),
                served=served,
                refused=refused,
                positions=positions(config.model),
            ),
        ),
        pacing=config.lag.pacing,
        make_curriculum=curriculum_of(config, may_write=may_write),
        make_draws=draws_of(config, may_write=may_write) if rollouts.tasks.by == "signal" else None,
        make_turns=turns_of(config, may_write=may_write),
    )


def _teacher_top(config: LearnerConfig) -> int:
    return config.preset().candidates if config.teachers else 0


def curriculum_of(config: LearnerConfig, *, may_write: Callable[[], None]) -> MakeCurriculum:
    """Makes the curriculum, once it is known how many levels there are."""
    given = config.rollouts.curriculum
    rules = CurriculumRules(
        start=given.start,
        window=given.window,
        raise_at=given.raise_at,
        lower_at=given.lower_at,
        success_reward=config.evaluation.success_reward,
    )
    record = LevelLog(config.run.folder / CURRICULUM_FILE, run=run_name(config.run.folder), may_write=may_write)
    return lambda levels: Curriculum(levels=levels, rules=rules, record=record)


def turns_of(config: LearnerConfig, *, may_write: Callable[[], None]) -> MakeTurns:
    """Makes the turns of a mix's parts, once these are known."""
    folder = config.run.folder
    rows = RunRows(folder / TURNS_FILE, run=run_name(folder), may_write=may_write)
    needed_from = partial(oldest_open_lease, folder, keep=config.checkpoint.keep)
    return lambda parts: PartTurns(parts=parts, seed=config.rollouts.seed, rows=rows, needed_from=needed_from)


def draws_of(config: LearnerConfig, *, may_write: Callable[[], None]) -> MakeDraws:
    """Makes the draws of tasks, once it is known how many there are. The file of priors is read at once: raises
    PriorsFault.
    """
    given, folder = config.rollouts.tasks, config.run.folder
    rules = DrawRules(
        seed=config.rollouts.seed,
        candidates=given.candidates,
        floor=given.floor,
        half_life_steps=given.half_life_steps,
        success_reward=config.evaluation.success_reward,
        ahead=min(config.fresh_per_step, _MOST_AHEAD),
    )
    rows = RunRows(folder / DRAWS_FILE, run=run_name(folder), may_write=may_write)
    needed_from = partial(oldest_open_lease, folder, keep=config.checkpoint.keep)
    priors = priors_of(config)
    return lambda places, plain: TaskDraws(
        places=places, rules=rules, plain=plain, rows=rows, needed_from=needed_from, priors=priors
    )


def priors_of(config: LearnerConfig) -> TaskPriors | None:
    """The priors of the tasks' pass rates, if there are any. An evaluation by itself, which may be what writes them,
    reads none. Raises PriorsFault.
    """
    given = config.rollouts.tasks
    if given.priors is None or config.evaluation.only:
        return None
    return read_priors(
        given.priors,
        weight=given.prior_weight,
        success_reward=config.evaluation.success_reward,
        environment=config.rollouts.environment,
    )


def lease_terms(config: LearnerConfig) -> LeaseTerms:
    """The terms that every training lease states."""
    rollouts = config.rollouts
    return LeaseTerms(
        group_size=rollouts.group_size,
        sampling=Sampling(
            temperature=config.training.temperature,
            max_tokens=rollouts.max_tokens,
            stop_token_ids=rollouts.stop_token_ids,
        ),
        seed=rollouts.seed,
        timeout_s=config.leases.timeout_s,
        total_groups=0 if config.evaluation.only else config.steps * config.fresh_per_step,
        greedy_baseline=config.algo.greedy_baseline,
    )


class EventLoopParts:
    """The objects of the event loop, made in the order of who needs whom."""

    def __init__(
        self,
        *,
        config: LearnerConfig,
        registry: Metrics,
        metrics: LearnerMetrics,
        incarnation: int,
        socket: RouterSocket,
        client: HttpClient,
        records: Records,
        recovered: RecoveryPoint,
        journal: RunLog,
        failures: RecentFailures,
    ) -> None:
        self.config = config
        self.journal = journal
        self.failures = failures
        self.records = records
        self.recovered = recovered
        self.registry = registry
        self.metrics = metrics
        self.waits = Waiting(start=_STARTING, on_waited=self.metrics.waited)
        self.closing_words = ""
        self._fleet_stirred = asyncio.Event()
        self.fleet = self._make_fleet(incarnation)
        self.fleet.provenance.restore(recovered.proofs)
        self.teachers = self._make_teachers(client)
        self.shelf = PublishedWeights()
        self.samples = self._make_samples()
        self.trust = self._make_trust()
        self.idle = IdleWatch(fleet=self.fleet, client=client)
        self.publisher = self._make_publisher(client, incarnation)
        self.releases = self._make_releases(client, incarnation)
        self.dead_letters = DeadLetters(
            config.run.folder / DEAD_LETTERS,
            largest_share=config.leases.max_dead_letter_share,
            failed=metrics.failed_write,
            may_write=records.may_write,
        )
        self.intake = self._make_intake(incarnation, socket)
        metrics.begins(recovered.version, last_step=0 if config.evaluation.only else config.steps)
        metrics.books(self.intake.books)
        metrics.lag_bound(lambda: recovered.ledger.max_lag, configured=config.max_lag)
        metrics.level(lambda: self.intake.level)
        self.intake.readmit(recovered.spare_groups())
        self.intake.keep_used(recovered.used_groups())
        self.status = self._make_status(incarnation)
        self.monitor: RunMonitor | None = None
        webhook = config.verdict.webhook
        self.webhook = None if webhook is None else Webhook(webhook, run=config.run.name, outcome=metrics.news)
        metrics.fleet(self.status.generator_states, expulsions=lambda: self.fleet.expulsions)
        metrics.env_services(lambda: len(self.intake.env_services()))
        samples = self.samples
        metrics.folder(config.run.folder, unseen=lambda: 0 if samples is None else samples.left_out_trajectories)

    def _make_teachers(self, client: HttpClient) -> Teachers:
        config = self.config
        return Teachers(
            config.teachers,
            tokenizer=self.fleet.fingerprints.tokenizer,
            waits=self.waits,
            registry=self.registry,
            top=_teacher_top(config),
            fleet=PolicyFleet(
                serving=lambda: [each.url for each in self.fleet.serving()],
                client=client,
                believed=lambda instance, version: self.fleet.provenance.believed(
                    instance, PolicyVersion.parse(version)
                ),
            ),
            tls=client_tls(config.http.tls),
        )

    def _make_publisher(self, client: HttpClient, incarnation: int) -> Publisher:
        return Publisher(
            fleet=self.fleet,
            client=client,
            options=publisher_options(self.config, incarnation),
            shelf=self.shelf,
            waits=self.waits,
            published=self._published,
            joined=self._joined,
            tree_folder=self.config.run.folder / TREE_FOLDER,
            grown=self.metrics.grown,
            may_write=self.records.may_write,
        )

    def _make_samples(self) -> TrajectoryStore | None:
        given = self.config.samples
        if not given.enabled or self.config.evaluation.only:
            return None
        return TrajectoryStore(
            self.config.run.folder,
            budget_bytes=given.budget_mb << 20,
            share=given.time_share,
            may_write=self.records.may_write,
        )

    def _make_trust(self) -> TrustWatch | None:
        given = self.config.trust
        if not given.enabled or self.config.evaluation.only:
            return None
        training = self.config.training
        test = TrustTest(
            threshold=given.evidence,
            tolerance=given.tolerance,
            dtype=training.dtype if training.dtype == training.publish_dtype else "",
            # Of which type a generator's numbers are, the test does not know.
            alone=self.config.weights.probe_tolerance or TOLERANCES[""],
        )
        return TrustWatch(test, measured=self.metrics.distrust, suspected=self._suspected)

    def _suspected(self, found: Suspicion) -> None:
        quarantined = self.config.trust.quarantine
        self.records.suspicion(found, version=self.recovered.ledger.version, quarantined=quarantined)
        if quarantined:
            self.fleet.quarantine(found.name, found.instance, reason=found.text)

    def _make_releases(self, client: HttpClient, incarnation: int) -> Releases | None:
        config = self.config
        if not config.release.enabled or config.evaluation.only:
            return None
        self.release_metrics = ReleaseMetrics(self.registry)
        return make_releases(
            config.release,
            run=config.run.folder,
            success=config.evaluation.success_reward,
            secret_key_file=config.leases.secret_key_file,
            may_write=self.records.may_write,
            make_fleet=lambda changed: self._make_fleet(incarnation, changed=changed),
            client=client,
            options=publisher_options(config, incarnation),
            metrics=self.release_metrics,
            settings=config.made_with(),
        )

    def _make_fleet(self, incarnation: int, *, changed: Callable[[], None] | None = None) -> FleetMembers:
        return FleetMembers(
            fingerprints=fingerprint_directory(
                self.config.model, self.config.run.chat_template, self.config.run.chat_template_kwargs
            ),
            incarnation=incarnation,
            announce_every_s=self.config.weights.announce_every_s,
            silence_s=self.config.weights.silence_s,
            changed=changed or self._fleet_stirred.set,
            url_fault=TrustedUrls(
                hosts=self.config.weights.generator_hosts, by_certificate=self.config.http.tls_ca_file is not None
            ).fault,
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
            options=intake_options(
                self.config,
                incarnation,
                self.fleet.fingerprints,
                may_write=self.records.may_write,
                served=self.fleet.served_lengths,
                refused=self.teachers.refused_tokens,
            ),
            events=self._events(),
            belongs=self.recovered.history.contains,
        )

    def _events(self) -> IntakeEvents:
        told = IntakeEvents(
            refused=self.metrics.refused,
            left_out=self.metrics.left_out,
            masked=self.metrics.masked,
            forgotten=self._forgotten,
            filtered=self._filtered,
            failed_write=self.metrics.failed_write,
        )
        return replace(told, accepted=self.teachers.prefetch) if self.config.teachers else told

    def _make_status(self, incarnation: int) -> LearnerStatus:
        return LearnerStatus(
            name=self.config.run.name,
            folder=self.config.run.folder,
            total_steps=self.config.steps,
            incarnation=incarnation,
            ledger=self.recovered.ledger,
            fleet=self.fleet,
            env_services=self.intake.env_services,
            metrics=self.metrics,
            waits=self.waits,
            teachers=self.teachers.peers,
            distrusted=lambda: () if self.trust is None else self.trust.notes,
            min_cosine=self.config.lag.min_cosine,
            released=tuple if self.releases is None else self.releases.notes,
        )

    def loops(self, listener: Listener, stop: Stop) -> dict[str, Coroutine[object, object, None]]:
        """The loops beside the trainer's thread."""
        http = self.config.http
        app = create_app(
            service="learner",
            version=version("headway"),
            token=http.token,
            readiness=self.waits.readiness,
            metrics=self.registry,
            max_body_bytes=http.max_body_bytes,
            readers=tree_readers(self.config.weights.tree_token),
            open_paths=PAGE_PATHS,
        )
        run = self.config.run
        shown = ShownRun(run.name, run.folder, self._processes, self._machines)
        page = RunPage([shown], token=http.token, what_ifs=WhatIfSettings(form_of, checked))
        page.add_routes(app)
        asks = "" if http.token is None else ", and asks for http.token"
        logger.info("the run's page is at %s/%s", listener.url, asks)
        releases = self.releases
        shelves = (self.shelf, *(() if releases is None else releases.shelves))
        add_routes(app, fleet=FleetsByChannel(self.fleet, releases), shelf=ShelvesByVersion(shelves))
        if releases is not None:
            add_release_routes(app, releases=releases)
            store = make_feedback(
                self.config.release, releases=releases, run=run.folder, may_write=self.records.may_write
            )
            add_feedback_routes(app, store=store, counted=self.release_metrics.rated)
        add_tree_routes(app, folder=run.folder / TREE_FOLDER)
        own = add_status_route(
            app, service="learner", version=version("headway"), waits=self.waits, failures=self.failures,
            stopping=lambda: stop.requested, provider=self.status.report,
        )  # fmt: skip
        self.monitor = monitor = self._make_monitor(own, listener.url)
        return {
            **({} if self.webhook is None else {"webhook": self.webhook.run()}),
            "load": self.status.load.run(gpus=self.metrics.gpus.show),
            "monitor": monitor.run(),
            "loads": self._note_loads(monitor),
            "http": serve_http(app, listener),
            "page": page.run(),
            "intake": self.intake.receive(),
            "tick": self.intake.tick(),
            "publisher": self.publisher.run(),
            "fleet_watch": self._watch_fleet(),
            "silence": self._drop_silent(),
            "idle": self.idle.run(),
            **({} if releases is None else {"releases": releases.run()}),
        }

    def _make_monitor(self, own: Callable[[], Status], url: str) -> RunMonitor:
        return RunMonitor(
            own=own,
            url=url,
            fleet=self.fleet,
            notes=self.intake.notes,
            changed=self._judged,
            token=self.config.weights.generator_token,
            tls=self.config.http.tls,
        )

    async def _note_loads(self, monitor: RunMonitor) -> None:
        while True:
            await asyncio.sleep(_LOADS_EVERY_S)
            load = monitor.generators_load()
            if load is not None:
                self.records.load(load, version=self.recovered.ledger.version)

    def _judged(self, verdict: RunVerdict) -> None:
        version = self.recovered.ledger.version
        self.records.verdict(verdict, version=version)
        if self.webhook is not None:
            self.webhook.tell(verdict, step=version)

    def _machines(self) -> list[dict[str, Any]]:
        return shown_machines(() if self.monitor is None else self.monitor.procs)

    def _processes(self) -> dict[str, Any]:
        return shown_processes(
            self.status.report(),
            waits=self.waits.status(),
            failures=self.failures.newest_first(),
            rates=self.idle.rates,
            rewards=self.records.rewards_seen.shown(),
            verdict=None if self.monitor is None else self.monitor.verdict,
            standing_s=None if self.monitor is None else self.monitor.standing_s,
        )

    def _forgotten(self, group: TrajectoryGroup, why: str) -> None:
        self._filtered(group, why)
        if self.config.teachers:
            self.teachers.forget(group)

    def _filtered(self, group: TrajectoryGroup, why: str) -> None:
        if self.samples is not None:
            self.samples.put_left_out(group, step=self.recovered.ledger.version + 1, why=why)

    def _published(self, report: PublishReport) -> None:
        self.records.publish(report)
        self.metrics.published(report)

    def _joined(self, report: JoinReport) -> None:
        self.records.join(report)
        self.metrics.joined()
        logger.info(
            "generator %s has caught up with version %d in %.1f s, probe gap %.2g nats",
            report.generator_id, report.version, report.seconds, report.probe_gap,
        )  # fmt: skip

    async def _watch_fleet(self) -> None:
        known: dict[str, str] = {}
        while True:
            await self._fleet_stirred.wait()
            self._fleet_stirred.clear()
            present = {member.generator_id: member.instance for member in self.fleet.members()}
            for gone in sorted(known.keys() - present.keys()):
                why = self.fleet.expelled(gone, known[gone])
                self.records.leave(gone, version=self.recovered.ledger.version, expelled=why)
            known = present
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
                logger.warning(
                    "no heartbeat from generator %s for %.0f s: removed from the fleet",
                    name,
                    self.config.weights.silence_s,
                )
