"""Similarity by an encoder in a process of its own, whatever happens to it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from reward_service.config import RewardServiceConfig
from reward_service.embeddings.verifier import Encoder, open_encoder
from reward_service.models.config import EncoderConfig
from reward_service.models.folder import encoder_fingerprint
from reward_service.verifier.submission import InfrastructureError, UserError
from tests.reward_service.models.tiny_encoder import LONGEST, states, write_encoder
from tests.reward_service.serving import OpenService, item_of, serving

TEXTS = ("a", "no way", "is it so")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@asynccontextmanager
async def similar(folder: Path, **settings: object) -> AsyncIterator[OpenService]:
    entry = {"name": "close", "path": folder, "max_tokens": LONGEST, "wait_s": 1.0, **settings}
    async with serving(RewardServiceConfig.model_validate({"encoders": (entry,), "max_deadline_s": 300})) as service:
        await service.scorer.loaded()
        yield service


@asynccontextmanager
async def encoder(folder: Path, **settings: object) -> AsyncIterator[Encoder]:
    config = EncoderConfig.model_validate({"name": "close", "path": folder, "max_tokens": LONGEST, **settings})
    async with open_encoder(config, fingerprint=encoder_fingerprint(config), on_kill=lambda: None) as opened:
        await opened.loaded()
        yield opened


def stop(opened: Encoder) -> int:
    """Have its process do nothing."""
    process_id = opened.process.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)
    return process_id


@pytest.mark.parametrize("max_tokens", [LONGEST, 512])
async def test_the_reward_is_the_cosine_and_a_text_that_is_too_long_takes_no_other_along(
    folder: Path, max_tokens: int
) -> None:
    """Whatever is set, no text has more tokens than the model has positions."""
    async with similar(folder, max_tokens=max_tokens) as service:
        texts = ("no way", "is it so", "b" * (LONGEST + 1))
        items = [item_of("close", text, references=["no way"]) for text in texts]
        same, other, long = await service.results(items, deadline_s=300)
        assert service.scorer.workers() >= (0, 1)
    one, two = (states(folder, text).mean(dim=0) for text in texts[:2])
    assert same.reward == pytest.approx(1.0)
    assert other.reward == pytest.approx(float(torch.cosine_similarity(one, two, dim=0)), abs=1e-5)
    assert same.verifier_version.startswith("1+")
    assert long.error is not None
    assert (long.error.kind, long.reward) == ("data", None)


async def test_a_process_that_dies_costs_its_batch(folder: Path) -> None:
    async with encoder(folder) as opened, asyncio.TaskGroup() as tasks:
        process_id = stop(opened)

        async def sent() -> str:
            with pytest.raises(InfrastructureError) as raised:
                await opened.send(TEXTS, deadline=0.0)
            return str(raised.value)

        message = tasks.create_task(sent())
        await asyncio.sleep(0)
        assert opened.busy
        os.kill(process_id, signal.SIGKILL)
        assert (await message).endswith("its process died: it was ended by SIGKILL")


async def test_a_batch_that_takes_too_long_ends_its_process_and_the_next_one_has_another(folder: Path) -> None:
    async with encoder(folder, compute_timeout_s=8.0) as opened:
        former = stop(opened)
        with pytest.raises(InfrastructureError, match="it took too long for a batch, and was killed"):
            await opened.send(TEXTS, deadline=0.0)
        assert len(await opened.send(TEXTS, deadline=0.0)) == 3
        assert opened.process.process_id not in (former, None)


async def test_a_folder_without_a_model_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no model: expected a Hugging Face directory"):
        async with similar(tmp_path):
            pass
