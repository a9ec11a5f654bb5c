"""Adapters are fetched whatever their size is, and verified."""

import asyncio
import warnings

from pydantic import SecretStr
from starlette.responses import Response

from protocol.adapters import ADAPTER_FILES, MAX_ADAPTER_BYTES, adapter_name
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.adapters import fetching, fetching_client

TOKEN = SecretStr("open sesame")
LARGE = 65 << 20


async def fetched(files: dict[str, bytes], *, name: str) -> list[bytes] | RequestRefused:
    app = create_app(
        service="learner", version="0.1.0", token=TOKEN, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("learner"),
    )  # fmt: skip

    @app.get("/v1/adapters/{name}/{file}")
    async def adapter_file(name: str, file: str) -> Response:
        return Response(files[file])

    with Listener(host="127.0.0.1", port=0) as listener:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(serve_http(app, listener, finish_s=1))
            try:
                async with fetching_client(token=TOKEN, tls=None) as client:
                    found = list(await fetching(client, listener.url)(name))
            except RequestRefused as error:
                return error
            finally:
                task.cancel()
    return found


async def test_an_adapter_of_more_than_64_mib_is_fetched() -> None:
    files = dict(zip(ADAPTER_FILES, (b"{}", bytes(LARGE)), strict=True))
    assert LARGE < MAX_ADAPTER_BYTES
    found = await fetched(files, name=adapter_name(list(files.values())))
    assert isinstance(found, list), found
    assert [len(data) for data in found] == [2, LARGE]


async def test_an_adapter_of_other_bytes_than_its_name_is_refused() -> None:
    files = dict(zip(ADAPTER_FILES, (b"{}", b"abc"), strict=True))
    found = await fetched(files, name="0" * 64)
    assert isinstance(found, RequestRefused)
    assert "other bytes" in found.problem.message
