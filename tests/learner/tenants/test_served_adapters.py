"""Files of adapters for generators: by the hash of their bytes, with the token, and nothing else of the disk."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from learner.tenants.served_adapters import ServedAdapters, add_adapter_routes
from learner.tenants.turns import TargetWeights
from protocol.adapters import ADAPTER_FILES, adapter_name
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from tests.learner.tenants.test_fleet_sampler import weights

TOKEN = "a token of generators"


@pytest.fixture
def adapters() -> ServedAdapters:
    return ServedAdapters()


def client(adapters: ServedAdapters, token: str | None = TOKEN) -> httpx.AsyncClient:
    app = create_app(
        service="learner",
        version="0",
        token=SecretStr(TOKEN),
        readiness=lambda: Readiness(ready=True),
        metrics=Metrics("learner"),
    )
    add_adapter_routes(app, adapters)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", headers=headers)


async def test_a_generator_gets_the_bytes_that_the_name_is_the_hash_of(
    tmp_path: Path, adapters: ServedAdapters
) -> None:
    offered = await adapters.newest(weights(tmp_path / "a", "tinker://run/sampler_weights/a", version=1, seq_id=1))
    assert offered is not None
    async with client(adapters) as http:
        answers = [await http.get(f"/v1/adapters/{offered.name}/{file}") for file in ADAPTER_FILES]
    assert adapter_name([answer.content for answer in answers]) == offered.name


@pytest.mark.parametrize("token", [None, "another token"])
async def test_nobody_gets_a_file_without_the_token(
    tmp_path: Path, adapters: ServedAdapters, token: str | None
) -> None:
    offered = await adapters.newest(weights(tmp_path / "a", "target", version=1, seq_id=1))
    assert offered is not None
    async with client(adapters, token) as http:
        answer = await http.get(f"/v1/adapters/{offered.name}/{ADAPTER_FILES[0]}")
    assert answer.status_code == 401


async def test_no_other_file_is_served_whatever_the_name(tmp_path: Path, adapters: ServedAdapters) -> None:
    folder = tmp_path / "a"
    offered = await adapters.newest(weights(folder, "target", version=1, seq_id=1))
    assert offered is not None
    (folder / "facts.json").write_text("{}")
    (tmp_path / ADAPTER_FILES[0]).write_text("{}")
    paths = [
        f"{offered.name}/facts.json",
        f"{offered.name}/../{ADAPTER_FILES[0]}",
        f"{offered.name}/..%2f{ADAPTER_FILES[0]}",
        f"..%2f..%2f{tmp_path}/{ADAPTER_FILES[0]}",
        f"{'0' * 64}/{ADAPTER_FILES[0]}",
        f"a/{ADAPTER_FILES[0]}",
        f"../{ADAPTER_FILES[0]}",
        f"{offered.name}/",
    ]
    async with client(adapters) as http:
        statuses = [(await http.get(f"/v1/adapters/{path}")).status_code for path in paths]
    assert statuses == [404] * len(paths)


async def test_a_target_that_is_forgotten_or_replaced_is_served_no_more(
    tmp_path: Path, adapters: ServedAdapters
) -> None:
    old = await adapters.newest(weights(tmp_path / "a", "inflight://m", version=1, seq_id=1))
    new = await adapters.newest(weights(tmp_path / "b", "inflight://m", version=2, seq_id=2))
    assert old is not None
    assert new is not None
    async with client(adapters) as http:

        async def status(name: str) -> int:
            return (await http.get(f"/v1/adapters/{name}/{ADAPTER_FILES[1]}")).status_code

        assert (await status(old.name), await status(new.name)) == (404, 200)
        adapters.forget("inflight://m")
        assert await status(new.name) == 404
    assert adapters.current("inflight://m") is None


async def test_equal_adapters_are_one_and_are_there_as_long_as_either_is(
    tmp_path: Path, adapters: ServedAdapters
) -> None:
    first = weights(tmp_path / "a", "target one", version=1, seq_id=1)
    copy = TargetWeights("target two", 7, tmp_path / "b", 0)
    assert first.folder is not None
    first.folder.rename(tmp_path / "b")
    first.folder.mkdir()
    for file in ADAPTER_FILES:
        (first.folder / file).write_bytes((tmp_path / "b" / file).read_bytes())
    names: list[Any] = [await adapters.newest(each) for each in (first, copy)]
    assert names[0] == names[1]
    assert [adapters.policy_version(each, 0) for each in (first, copy)] == [1, 7]
    adapters.forget("target one")
    assert adapters.file(names[0].name, ADAPTER_FILES[0]).parent == tmp_path / "b"


async def test_the_base_model_has_no_adapter(adapters: ServedAdapters) -> None:
    assert await adapters.newest(TargetWeights("base")) is None
