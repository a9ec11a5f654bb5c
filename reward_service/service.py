"""The reward service from its configuration to its end: verifiers, workers, HTTP."""

import importlib.metadata

from reward_service.app import build_app
from reward_service.config import RewardServiceConfig
from reward_service.metrics import make_metrics
from reward_service.registry import build_registry
from reward_service.scoring import Scorer
from services.http_server import Listener, serve_http
from services.metrics import Metrics
from services.process import Stop, run_loops
from services.waiting import Waiting

PROCESS = "reward-service"


async def serve(config: RewardServiceConfig, stop: Stop) -> None:
    """Serve until cancelled. Raises UserError for verifiers that cannot be loaded, AddressInUse for a taken port."""
    metrics, waiting = Metrics(PROCESS), Waiting()
    registry = build_registry(custom=config.verifiers, sandbox=config.sandbox)
    with Listener(host=config.http.host, port=config.http.port) as listener:
        async with Scorer(registry=registry, config=config, metrics=make_metrics(metrics)) as scorer:
            app = build_app(
                config=config,
                registry=registry,
                scorer=scorer,
                metrics=metrics,
                readiness=waiting.readiness,
                version=importlib.metadata.version("headway"),
            )
            waiting.started()
            await run_loops(http=serve_http(app, listener))
