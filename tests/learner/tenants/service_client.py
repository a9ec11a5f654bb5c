"""The service of tenants in the test's own process, and what its clients do, for tests without the SDK."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from learner.tenants.keys import Tenant, TenantKeys, hash_of
from learner.tenants.listings import TenantListings
from learner.tenants.routes import PREFIX_PATH, add_tenant_routes
from learner.tenants.service import ServedBase, TenantService, TenantSettings
from protocol.status import Readiness
from protocol.tinker.messages import MESSAGES
from protocol.tinker.tensors import write_tensor
from services.http.app import OPEN_PATHS, create_app
from services.http.metrics import Metrics
from tests.learner.tenants.scripted import ScriptedSampler, ScriptedTenantTrainer
from tests.learner.tenants.serve import parse_nothing

BASE = "tiny/bigram"
ADAM = {"learning_rate": 1e-2}


class Client:
    """A tenant that talks to the service by HTTP; `key` is shown at each request."""

    def __init__(self, app: Any, name: str) -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(
            transport=transport, base_url=f"http://127.0.0.1{PREFIX_PATH}", headers={"X-API-Key": f"tml-{name}"}
        )
        self.session_id = ""

    async def post(self, route: str, /, status: int = 200, **body: Any) -> Any:
        answer = await self.http.post(f"/{route}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.http.get(f"/{path}")
        assert answer.status_code == status, answer.text
        return answer.json()

    async def session(self) -> str:
        self.session_id = (await self.post("create_session", tags=[], sdk_version="0.38"))["session_id"]
        return self.session_id

    async def model(self, number: int = 0, rank: int = 2, **more: Any) -> str:
        session = self.session_id or await self.session()
        lora = {"rank": rank, "seed": 1}
        accepted = await self.post(
            "create_model", session_id=session, model_seq_id=number, base_model=BASE, lora_config=lora, **more
        )
        return str((await self.result(accepted))["model_id"])

    async def train(
        self, model_id: str, seq_id: int, tokens: Sequence[int] = (1, 2, 3), *, status: int = 200, **claim: Any
    ) -> Any:
        return await self.send(forward_backward(model_id, seq_id, tokens, **claim), status)

    async def send(self, body: bytes, status: int = 200) -> Any:
        headers = {"Content-Type": "application/x-protobuf"}
        answer = await self.http.post("/forward_backward", content=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def step(self, model_id: str, seq_id: int, **more: Any) -> Any:
        return await self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=ADAM, **more)

    async def result(self, accepted: Any) -> Any:
        """JSON, or the metrics of a protobuf answer."""
        answer = await self.http.post("/retrieve_future", json={"request_id": accepted["request_id"]})
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return dict(MESSAGES["ForwardBackwardOutput"].FromString(answer.content).metrics)
        return answer.json()

    async def loss(self, model_id: str, seq_id: int) -> float:
        return float((await self.result(await self.train(model_id, seq_id)))["loss:sum"])


def forward_backward(
    model_id: str,
    seq_id: int,
    tokens: Sequence[int] = (1, 2, 3),
    *,
    sequence_id: str = "",
    prompt: int = 0,
    preset: Mapping[str, str] | None = None,
    logprobs: Sequence[float] = (),
) -> bytes:
    """A datum of tokens, each the target of its place; claims to be `prompt` tokens of a sequence and its sample.

    `preset`: settings of a loss of our own, by the `logprobs` of the last tokens, which have advantages.
    """
    loss = "cross_entropy" if preset is None else "importance_sampling"
    request = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn=loss)
    for name, value in (preset or {}).items():
        request.loss_fn_config_v2[name].text = value
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].dtype = 2
    datum.loss_fn_inputs["target_tokens"].dense = np.array(tokens[1:], "<i8").tobytes()
    if preset is not None:
        row = np.concatenate([np.zeros(len(tokens) - 1 - len(logprobs)), logprobs])
        datum.loss_fn_inputs["logprobs"].CopyFrom(write_tensor(row))
        datum.loss_fn_inputs["advantages"].CopyFrom(write_tensor((row < 0).astype(np.float32)))
    if sequence_id:
        row = len(tokens) - 1
        for spans, offset, count in ((datum.model_input_spans, 0, prompt), (datum.loss_fn_input_spans, 1, prompt - 1)):
            spans.add().prompt_tokens.CopyFrom(MESSAGES["Span"](sequence_id=sequence_id, offset=offset, length=count))
            sampled = MESSAGES["Span"](sequence_id=sequence_id, offset=0, length=row - count)
            spans.add().sampled_tokens.CopyFrom(sampled)
    return bytes(request.SerializeToString())


class Served:
    """A service that runs, with its parts."""

    def __init__(
        self,
        folder: Path,
        *,
        long_poll_s: float,
        settings: TenantSettings,
        limits: dict[str, Any],
        keys: TenantKeys | None,
    ) -> None:
        self.trainer, self.sampler = ScriptedTenantTrainer(), ScriptedSampler()
        if keys is None:
            keys = TenantKeys([Tenant(name=name, sha256=hash_of(f"tml-{name}"), **limits) for name in ("a", "b")])
        self.service = TenantService(
            folder=folder,
            keys=keys,
            base=ServedBase(BASE, 256),
            trainer=self.trainer,
            sampler=self.sampler,
            parse_graph=parse_nothing,
            settings=settings,
        )
        self.app = create_app(
            service="tenants", version="0", token=None, readiness=lambda: Readiness(ready=True),
            metrics=Metrics("tenants"), open_paths=OPEN_PATHS | {f"{PREFIX_PATH}/"}, known_as=("127.0.0.1",),
        )  # fmt: skip
        listings = TenantListings(self.service, secret=b"x")
        add_tenant_routes(self.app, self.service, listings, long_poll_s=long_poll_s)

    def client(self, name: str = "a") -> Client:
        return Client(self.app, name)


@asynccontextmanager
async def served(
    folder: Path,
    *,
    long_poll_s: float = 5.0,
    snapshot_every: int = 4,
    max_resident: int = 100,
    round_s: float = 1.0,
    all_weights: bool = False,
    keys: TenantKeys | None = None,
    **limits: Any,
) -> AsyncIterator[Served]:
    settings = TenantSettings(
        snapshot_every=snapshot_every, max_resident=max_resident, round_s=round_s, all_weights=all_weights
    )
    parts = Served(folder, long_poll_s=long_poll_s, settings=settings, limits=limits, keys=keys)
    running = asyncio.create_task(parts.service.run())
    try:
        yield parts
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await parts.service.close()
