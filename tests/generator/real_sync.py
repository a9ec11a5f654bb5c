"""A real engine behind its real HTTP routes, and the learner's real publisher, which sends it a policy's weights."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from generator.weights.tree_download import TreeDownloads, TreeSources
from learner.weights.probe import Probe
from learner.weights.process_group import lay_out
from learner.weights.published import Snapshot
from protocol.fleet import Announcement, WeightWay
from protocol.status import Readiness
from protocol.weight_tree import TREE_ROUTE
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from tests.generator.conftest import Policy, Rig
from tests.learner.generators import announcement
from tests.learner.weights.publishing import PublishingLearner

if TYPE_CHECKING:
    from generator.weight_sync import Puller

TEXTS = ((3, 4, 5, 9, 11, 2, 30), (5, 6, 7, 8), (12, 11, 10, 9, 8))


def snapshot_of(policy: Policy, *, version: int) -> Snapshot:
    """The policy as it is now, with its own logprobs of the probe."""
    logprobs = tuple(logprob for text in TEXTS for logprob in policy.logprobs(text))
    buckets = lay_out(list(policy.tensors().items()), bucket_bytes=100_000)
    return Snapshot(version=version, buckets=buckets, probe=Probe(texts=TEXTS, logprobs=logprobs))


@dataclass(frozen=True)
class ServedRig:
    """A generator that the learner can reach."""

    name: str
    url: str
    kind: str
    world_size: int
    staging: bool
    weights: WeightWay = "broadcast"

    def announcement(self) -> Announcement:
        made = announcement(self.name, self.url)
        update = {
            "kind": self.kind, "world_size": self.world_size, "staging": self.staging, "dtype": "float32",
            "weights": self.weights,
        }  # fmt: skip
        return made.model_copy(update=update)

    def join(self, learner: PublishingLearner) -> None:
        learner.fleet.announce(self.announcement(), now=0.0)


def downloads(puller: "Puller", client: HttpClient, folder: Path, *, relays: Sequence[str] = ()) -> TreeDownloads:
    """Of the learner's tree, or of relays with a copy of it, which are waited for half a second."""
    sources = TreeSources(
        relays=relays, relay_client=client, learner=f"{puller.learner}{TREE_ROUTE}", client=client, patience_s=0.5
    )
    return TreeDownloads(sources=sources, folder=folder, dense=puller.bucket)


@asynccontextmanager
async def served(
    rig: Rig,
    learner: PublishingLearner,
    *,
    name: str = "real",
    world_size: int = 1,
    staging: bool = True,
    held: Path | None = None,
    relays: Sequence[str] = (),
) -> AsyncIterator[ServedRig]:
    """The routes of weight syncs, on a port of their own. With a folder for what is `held` it pulls."""
    from generator.routes import add_weight_routes
    from generator.serving import GeneratorMetrics, Serving
    from generator.weight_sync import Puller, WeightSync

    metrics = GeneratorMetrics(Metrics("generator"), engine=rig.engine)
    serving = Serving(
        engine=rig.engine, generator_id=name, vocabulary_size=32, max_model_len=1024, max_waiting_requests=100,
        metrics=metrics,
    )  # fmt: skip
    app = create_app(
        service="generator", version="1", token=None, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("generator"),
    )  # fmt: skip
    async with HttpClient() as client:
        puller = Puller(client=client, learner=learner.url)
        tree = None if held is None else downloads(puller, client, held, relays=relays)
        sync = WeightSync(engine=rig.engine, serving=serving, metrics=metrics, puller=puller, folder=None, tree=tree)
        add_weight_routes(app, sync=sync, instance=announcement(name, "http://nowhere").instance)
        with Listener(host="127.0.0.1", port=0) as listener:
            server = asyncio.create_task(serve_http(app, listener, finish_s=0))
            try:
                yield ServedRig(
                    name=name, url=listener.url, kind=rig.engine.kind, world_size=world_size, staging=staging,
                    weights="broadcast" if held is None else "pull",
                )  # fmt: skip
            finally:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server
