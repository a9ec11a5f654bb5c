"""Serves the Tinker API in a process of its own, for tests: `serve.py FOLDER --port N`.

With `--faults P` that share of the requests is answered with 503 or 408 after it was carried out.
"""

import argparse
import asyncio
import random
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from learner.page.files import PAGE_PATHS
from learner.page.tenants_page import ServedProcesses, TenantsPage
from learner.tenants.keys import Tenant, TenantKeys, hash_of
from learner.tenants.listings import TenantListings
from learner.tenants.routes import PREFIX_PATH, add_tenant_routes
from learner.tenants.service import ServedBase, TenantService, TenantSettings
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from tests.learner.tenants.scripted import ScriptedSampler, ScriptedTenantTrainer

NAMES = ("a", "b", "probe", "kill")
MAX_TOKENS = 4096
TOKEN = SecretStr("sees all of the page")
_AGAIN_MS = 20
"""After a planned fault the SDK asks again so soon; it would wait for up to 10 s."""


class Faults:
    """Answers a share of the requests with an error after they were carried out."""

    def __init__(self, app: ASGIApp, *, share: float) -> None:
        self._app, self._share, self._random = app, share, random.Random(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        spoiled = scope["type"] == "http" and scope["method"] == "POST" and self._random.random() < self._share
        if not spoiled or scope["path"].endswith(("/config", "create_session")):
            await self._app(scope, receive, send)
            return

        async def swallow(message: Message) -> None:
            """Nobody gets the answer."""

        await self._app(scope, receive, swallow)
        again = {"retry-after-ms": str(_AGAIN_MS)}
        await JSONResponse({"error": "a planned fault"}, self._random.choice((503, 408)), again)(scope, receive, send)


def parse_nothing(body: Any) -> Any:
    raise ValueError(f"this trainer has no custom losses: {body.name}")


def scripted(_: argparse.Namespace) -> tuple[Any, Any, ServedBase, Any]:
    return ScriptedTenantTrainer(), ScriptedSampler(), ServedBase("tiny/bigram", MAX_TOKENS), parse_nothing


def adapters(args: argparse.Namespace) -> tuple[Any, Any, ServedBase, Any]:
    from tests.learner.tenants.tiny import tiny_service_parts  # torch, which the others do without

    return tiny_service_parts(args.models, args.model)


async def serve(args: argparse.Namespace) -> None:
    keys = TenantKeys([Tenant(name=name, sha256=hash_of(f"tml-{name}")) for name in NAMES])
    with Listener(host="127.0.0.1", port=args.port) as listener:
        trainer, sampler, base, parse_graph = (adapters if args.model else scripted)(args)
        service = TenantService(
            folder=args.folder,
            keys=keys,
            base=base,
            trainer=trainer,
            sampler=sampler,
            parse_graph=parse_graph,
            settings=TenantSettings(snapshot_every=args.snapshot_every),
        )
        app = create_app(
            service="tenants",
            version="0",
            token=TOKEN,
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("tenants"),
            open_paths=PAGE_PATHS | {f"{PREFIX_PATH}/"},
        )
        add_tenant_routes(app, service, TenantListings(service, secret=b"secret"))
        TenantsPage(service, name="tests", token=TOKEN, processes=ServedProcesses).add_routes(app)
        async with asyncio.TaskGroup() as loops:
            loops.create_task(service.run())
            loops.create_task(serve_http(Faults(app, share=args.faults), listener))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.0)
    parser.add_argument("--snapshot-every", type=int, default=16)
    parser.add_argument("--models", type=Path, default=Path())
    parser.add_argument("--model", default="")
    asyncio.run(serve(parser.parse_args()))
