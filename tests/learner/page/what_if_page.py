"""A run of the real trainer for the page's what-ifs: with its journal, and with the trajectories of its first steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from learner.page.files import PAGE_PATHS
from learner.page.routes import RunPage, ShownRun
from learner.page.store import TrajectoryStore
from learner.page.what_if_routes import WhatIfSettings
from learner.training.ranks import CommandChannel
from learner.what_if_form import checked, form_of
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from tests.learner.page.made_run import taken
from tests.learner.page.untrained_run import NARROW
from tests.learner.what_if_run import STEPS, TrainedRun, sampled, trained_run

WIDE = ["algo.clip_high=1e6", "algo.clip_low=1"]
KEPT_STEPS = STEPS - 1
DEADLINE_S = 500.0


def kept_run(directory: Path, model: Path, commands: CommandChannel, **tables: Any) -> TrainedRun:
    """Trained with a narrow clip, two groups a step; of the last step no trajectory is kept."""
    run = trained_run(directory, model, commands, **{**NARROW, **tables})
    with TrajectoryStore(run.folder, budget_bytes=1 << 30, share=1.0) as store:
        for step in range(1, KEPT_STEPS + 1):
            store.put(taken(step, *(sampled(2 * step - 2 + n, version=0) for n in range(2))))
            store.wait_idle()
    return run


@asynccontextmanager
async def served(folder: Path, *, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """The page of a run's files over HTTP on loopback, as `headway view` serves it, and a client of it."""
    secret = None if token is None else SecretStr(token)
    page = RunPage([ShownRun("one", folder)], token=secret, what_ifs=WhatIfSettings(form_of, checked))
    app = create_app(
        service="view", version="1", token=secret, readiness=lambda: Readiness(ready=True), metrics=Metrics("view"),
        open_paths=PAGE_PATHS,
    )  # fmt: skip
    page.add_routes(app)
    with Listener(host="127.0.0.1", port=0) as listener:
        loops = [asyncio.create_task(serve_http(app, listener)), asyncio.create_task(page.run())]
        async with httpx.AsyncClient(base_url=listener.url, timeout=60) as client:
            yield client
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)


async def ended(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """The what-if as it is listed once it no longer runs."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            listed: list[dict[str, Any]] = (await client.get("/page/data/what_ifs")).json()
            (found,) = [each for each in listed if each["name"] == name]
            if found["state"] != "running":
                return found
            await asyncio.sleep(0.1)
