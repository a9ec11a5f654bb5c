"""A fleet of scripted generators that can be joined, stopped and spoiled, and the publisher that serves it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from learner.weights.fleet import FleetMembers
from learner.weights.probe import Probe
from learner.weights.process_group import lay_out
from learner.weights.published import (
    BaseWeights,
    JoinReport,
    PublishedWeights,
    PublisherOptions,
    PublishReport,
    Snapshot,
    add_weight_routes,
)
from learner.weights.publisher import Publisher
from learner.weights.tree import DeltaReport, add_tree_routes
from protocol.status import Readiness
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.waiting import Waiting
from tests.learner.generators import FINGERPRINTS, ScriptedGenerator, probe_logprobs

PROBE = ((3, 1, 4, 1, 5), (2, 7, 1, 8))
OPTIONS = PublisherOptions(
    incarnation=1,
    backend="gloo",
    host="127.0.0.1",
    bucket_timeout_s=1.0,
    meet_timeout_s=3.0,
    commit_timeout_s=2.0,
    pull_timeout_s=10.0,
    probe_tolerance=0.1,
    pull_backoff_s=0.01,
)


def tensors_of(version: int, *, elements: int = 3000) -> list[tuple[str, torch.Tensor]]:
    return [
        ("embedding", torch.full((elements // 3, 3), float(version))),
        ("norm", torch.arange(7, dtype=torch.bfloat16) + version),
    ]


def snapshot(version: int, *, elements: int = 3000, bucket_bytes: int = 4096) -> Snapshot:
    return Snapshot(
        version=version,
        buckets=lay_out(tensors_of(version, elements=elements), bucket_bytes=bucket_bytes),
        probe=Probe(texts=PROBE, logprobs=probe_logprobs(PROBE)),
    )


def base_weights() -> BaseWeights:
    return BaseWeights(buckets=lay_out([("layer.weight", torch.ones(400, 3))], bucket_bytes=4096), rank=2, alpha=4.0)


def adapter(version: int, *, base: BaseWeights) -> Snapshot:
    factors = [("base_model.model.layer.lora_A.weight", torch.full((2, 3), float(version))),
               ("base_model.model.layer.lora_B.weight", torch.ones(400, 2))]  # fmt: skip
    buckets = lay_out(factors, bucket_bytes=4096)
    return Snapshot(version, buckets=buckets, probe=Probe(texts=PROBE, logprobs=probe_logprobs(PROBE)), base=base)


@dataclass
class PublishingLearner:
    """A publisher and its fleet. `history` holds who served after each change."""

    options: PublisherOptions
    client: HttpClient
    silence_s: float = 60.0
    tree_folder: Path | None = None
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    shelf: PublishedWeights = field(default_factory=PublishedWeights)
    url: str = ""
    reports: list[PublishReport] = field(default_factory=list)
    joined: list[JoinReport] = field(default_factory=list)
    grown: list[DeltaReport] = field(default_factory=list)
    history: list[dict[str, str]] = field(default_factory=list)
    publishing: "asyncio.Future[None]" = field(default_factory=asyncio.Future)

    def __post_init__(self) -> None:
        self.fleet = FleetMembers(
            fingerprints=FINGERPRINTS,
            incarnation=1,
            announce_every_s=1.0,
            silence_s=self.silence_s,
            changed=self._changed,
        )
        self.publisher = Publisher(
            fleet=self.fleet,
            client=self.client,
            options=self.options,
            shelf=self.shelf,
            waits=Waiting(),
            published=self._published,
            joined=self._joined,
            tree_folder=self.tree_folder,
            grown=self.grown.append,
        )

    def _changed(self) -> None:
        self.history.append(self.serving)
        self.publisher.fleet_changed()
        self.stirred.set()

    def _published(self, report: PublishReport) -> None:
        self.reports.append(report)
        self.stirred.set()

    def _joined(self, report: JoinReport) -> None:
        self.joined.append(report)
        self.stirred.set()

    @property
    def serving(self) -> dict[str, str]:
        return {generator.generator_id: generator.policy_version for generator in self.fleet.serving()}

    def join(self, *generators: ScriptedGenerator) -> None:
        for generator in generators:
            generator.learner = self.url
            self.fleet.announce(generator.announcement(), now=0.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.stirred.clear()
                with suppress(TimeoutError):  # not all that is waited for stirs
                    await asyncio.wait_for(self.stirred.wait(), 0.05)

    async def until_served(self, **versions: int) -> None:
        expected = {name: f"1.{version}" for name, version in versions.items()}
        await self.until(lambda: self.serving == expected and bool(self.reports))

    async def publish(self, version: int, *generators: ScriptedGenerator) -> None:
        """Offers a version, and returns when these serve it, and nobody else serves."""
        self.publisher.offer(snapshot(version))
        await self.until_served(**{generator.name: version for generator in generators})


@asynccontextmanager
async def learner(
    options: PublisherOptions = OPTIONS, *, silence_s: float = 60.0, tree_folder: Path | None = None
) -> AsyncIterator[PublishingLearner]:
    async with HttpClient() as client:
        made = PublishingLearner(options=options, client=client, silence_s=silence_s, tree_folder=tree_folder)
        app = create_app(
            service="learner",
            version="1",
            token=None,
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("learner"),
        )
        add_weight_routes(app, shelf=made.shelf)
        if tree_folder is not None:
            add_tree_routes(app, folder=tree_folder)
        with Listener(host="127.0.0.1", port=0) as listener:
            made.url = listener.url
            http = asyncio.create_task(serve_http(app, listener, finish_s=0))
            made.publishing = loop = asyncio.create_task(made.publisher.run())
            try:
                yield made
            finally:
                loop.cancel()
                http.cancel()
                await asyncio.wait([loop, http], timeout=10)
                assert loop.cancelled() or loop.exception(), loop
