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
from reward_service.embeddings.config import EncoderConfig
from reward_service.embeddings.encoder import Encoder, encoder_fingerprint, open_encoder
from reward_service.endpoints.endpoint import InputRefused
from reward_service.verifier import InfrastructureError, UserError
from tests.reward_service.embeddings.tiny_encoder import LONGEST, states, write_encoder
from tests.reward_service.serving import Service, item_of, serving

TEXTS = ("a", "no way", "is it so")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@asynccontextmanager
async def similar(folder: Path, **settings: object) -> AsyncIterator[Service]:
    entry = {"name": "close", "path": folder, "max_tokens": LONGEST, "wait_s": 0.05, **settings}
    async with serving(RewardServiceConfig.model_validate({"encoders": (entry,), "max_deadline_s": 300})) as service:
        await service.scorer.loaded()
        yield service


@asynccontextmanager
async def encoder(folder: Path, **settings: object) -> AsyncIterator[Encoder]:
    config = EncoderConfig.model_validate({"name": "close", "path": folder, "max_tokens": LONGEST, **settings})
    async with open_encoder(config, fingerprint=encoder_fingerprint(config), on_kill=lambda: None) as opened:
        yield opened


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
async def test_texts_that_are_encoded_together_are_encoded_as_if_alone(folder: Path, pooling: str) -> None:
    async with encoder(folder, pooling=pooling) as opened:
        found = await opened.send(TEXTS, deadline=0.0)
    for text, vector in zip(TEXTS, found, strict=True):
        alone = states(folder, text)
        pooled = {"mean": alone.mean(dim=0), "first": alone[0], "last": alone[-1]}[pooling]
        assert list(vector) == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-5)


async def test_the_reward_is_the_cosine_of_the_embeddings(folder: Path) -> None:
    async with similar(folder) as service:
        same = await service.result(item_of("close", "no way", references=["no way"]), deadline_s=300)
        other = await service.result(item_of("close", "no way", references=["is it so"]), deadline_s=300)
    one, two = (states(folder, text).mean(dim=0) for text in ("no way", "is it so"))
    assert same.reward == pytest.approx(1.0)
    assert other.reward == pytest.approx(float(torch.cosine_similarity(one, two, dim=0)), abs=1e-5)
    assert same.verifier_version.startswith("1+")


async def test_a_text_that_is_too_long_is_an_error_of_the_data_and_takes_no_other_along(folder: Path) -> None:
    async with similar(folder, wait_s=1.0) as service:
        items = [item_of("close", text, references=["a"]) for text in ("no way", "b" * (LONGEST + 1))]
        good, long = await service.results(items, deadline_s=300)
    assert good.reward is not None
    assert long.error is not None
    assert (long.error.kind, long.error.message) == (
        "data",
        "a text has 33 tokens, and max_tokens of the encoder is 32",
    )


async def test_a_process_that_dies_costs_a_batch_and_is_started_again(folder: Path) -> None:
    async with encoder(folder) as opened:
        await opened.loaded()
        assert opened.process.process_id is not None
        os.kill(opened.process.process_id, signal.SIGSTOP)
        sent = asyncio.create_task(opened.send(TEXTS, deadline=0.0))
        while not opened.busy:
            await asyncio.sleep(0)
        os.kill(opened.process.process_id, signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="its process died"):
            await sent
        assert len(await opened.send(TEXTS, deadline=0.0)) == 3


async def test_a_batch_that_takes_too_long_ends_its_process(folder: Path) -> None:
    async with encoder(folder, compute_timeout_s=0.5) as opened:
        await opened.loaded()
        assert opened.process.process_id is not None
        os.kill(opened.process.process_id, signal.SIGSTOP)
        with pytest.raises(InfrastructureError, match="it took too long for a batch, and was killed"):
            await opened.send(TEXTS, deadline=0.0)
        assert opened.process.process_id is None


async def test_weights_that_are_not_a_number_give_no_similarity(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = write_encoder(tmp_path) / "model.safetensors"
    save_file({name: value * float("nan") for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    async with similar(tmp_path) as service:
        kind, message = await service.error(item_of("close", "a", references=["b"]), deadline_s=300)
    assert (kind, message) == ("infrastructure", "an embedding has the length nan, and so no direction")


async def test_what_is_no_encoder_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is no model: expected a Hugging Face directory"):
        async with similar(tmp_path / "empty"):
            pass
    with pytest.raises(UserError, match=r"verifier 'close': encoder .*lack .*: is it an encoder\?"):
        async with similar(write_encoder(tmp_path / "other", nothing=True)):
            pass


async def test_one_text_too_long_refuses_the_batch_that_holds_it(folder: Path) -> None:
    async with encoder(folder) as opened:
        with pytest.raises(InputRefused, match="33 tokens"):
            await opened.send(["a", "b" * 33], deadline=0.0)
