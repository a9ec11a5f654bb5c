"""The reward service from its configuration to its end: verifiers, workers, HTTP."""

import asyncio
import gc
import importlib.metadata
import logging
import socket

from reward_service.app import build_app
from reward_service.config import RewardServiceConfig
from reward_service.metrics import make_metrics
from reward_service.registry import build_registry
from reward_service.sandbox.execution import open_execution
from reward_service.sandbox.opening import open_sandboxes
from reward_service.scoring import Scorer
from reward_service.status import RewardServiceStatus
from services.http_server import Listener, serve_http
from services.metrics import Metrics
from services.process import Stop
from services.status import add_status_route, recent_failures
from services.waiting import Waiting

logger = logging.getLogger(__name__)

PROCESS = "reward-service"


async def serve(config: RewardServiceConfig, stop: Stop) -> None:
    """Serve until a stop is requested, then finish what runs.

    Raises UserError for verifiers and reward models that cannot be loaded and for a sandbox that cannot be had,
    AddressInUse for a taken port.
    """
    metrics, waiting = Metrics(PROCESS), Waiting()
    registry = build_registry(config)
    with Listener(host=config.http.host, port=config.http.port) as listener, recent_failures() as failures:
        service_id = config.id or f"{socket.gethostname()}:{listener.port}"
        async with (
            open_sandboxes(kind=config.sandbox, config=config.execution) as sandboxes,
            open_execution(sandboxes, config.execution) as execution,
            Scorer(
                registry=registry,
                config=config,
                metrics=make_metrics(metrics),
                service_id=service_id,
                sandbox=None if sandboxes is None else sandboxes.programs,
            ) as scorer,
        ):
            app = build_app(
                config=config,
                registry=registry,
                scorer=scorer,
                metrics=metrics,
                readiness=waiting.readiness,
                version=importlib.metadata.version("headway"),
                execution=execution,
            )
            status = RewardServiceStatus(name=listener.url, scorer=scorer, most_pending=config.max_pending_items)
            add_status_route(
                app, service="reward-service", version=importlib.metadata.version("headway"), waits=waiting,
                failures=failures, stopping=lambda: stop.requested, provider=status.report,
            )  # fmt: skip
            # What is loaded by now stays: without this, each full collection looks at all of it and holds up requests.
            gc.freeze()
            async with asyncio.TaskGroup() as tasks:
                http = tasks.create_task(serve_http(app, listener), name="http")
                loading = tasks.create_task(_load(scorer, waiting), name="loading")
                await stop.wait()
                loading.cancel()
                with waiting.wait("its last items to be scored", quiet_s=0.5):
                    if not await scorer.drain(timeout_s=config.drain_s):
                        logger.warning("some items were not scored within %g s and are given up", config.drain_s)
                http.cancel()


async def _load(scorer: Scorer, waiting: Waiting) -> None:
    with waiting.wait("its reward models to be loaded", quiet_s=0.5):
        await scorer.loaded()
    waiting.started()
