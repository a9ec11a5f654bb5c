"""The reward service from its configuration to its end: verifiers, workers, HTTP."""

import importlib.metadata

from reward_service.app import build_app
from reward_service.config import RewardServiceConfig
from reward_service.metrics import make_metrics
from reward_service.registry import build_registry
from reward_service.scoring import Scorer
from reward_service.status import RewardServiceStatus
from services.http_server import Listener, serve_http
from services.metrics import Metrics
from services.process import Stop, run_loops
from services.status import add_status_route, recent_failures
from services.waiting import Waiting

PROCESS = "reward-service"


async def serve(config: RewardServiceConfig, stop: Stop) -> None:
    """Serve until cancelled. Raises UserError for verifiers that cannot be loaded, AddressInUse for a taken port."""
    metrics, waiting = Metrics(PROCESS), Waiting()
    registry = build_registry(custom=config.verifiers, sandbox=config.sandbox)
    with Listener(host=config.http.host, port=config.http.port) as listener, recent_failures() as failures:
        async with Scorer(registry=registry, config=config, metrics=make_metrics(metrics)) as scorer:
            app = build_app(
                config=config,
                registry=registry,
                scorer=scorer,
                metrics=metrics,
                readiness=waiting.readiness,
                version=importlib.metadata.version("headway"),
            )
            status = RewardServiceStatus(name=listener.url, scorer=scorer, most_pending=config.max_pending_items)
            add_status_route(
                app, service="reward-service", version=importlib.metadata.version("headway"), waits=waiting,
                failures=failures, stopping=lambda: stop.requested, provider=status.report,
            )  # fmt: skip
            waiting.started()
            await run_loops(http=serve_http(app, listener))
