"""Similarities of embeddings as verifiers of the service: by an endpoint, and by an encoder in a process of its own."""

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from reward_service.embeddings.config import EmbeddingArguments, EmbeddingConfig
from reward_service.embeddings.vectors import Requests, Similarity, Vector, Vectors, unit
from reward_service.endpoints.asking import AskingLane, Send, open_batcher
from reward_service.endpoints.cache import key_of, open_cache
from reward_service.endpoints.endpoint import open_endpoint
from reward_service.models.config import EncoderConfig
from reward_service.models.encoder import Encoder, open_encoder
from reward_service.models.folder import encoder_fingerprint
from reward_service.verifier.contract import Lane, Surroundings, Verifier

logger = logging.getLogger(__name__)

_FINGERPRINT_CHARS = 12
_DESCRIPTION = "Cosine similarity, from -1 to 1, of the embeddings of the completion and of references."


def embedding_verifier(config: EmbeddingConfig) -> Verifier:
    """Its version holds the model's name and a fingerprint of the settings that change an embedding."""
    settings = json.dumps([config.prefix, config.keep_thinking, config.extra], sort_keys=True)

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        metrics = surroundings.metrics
        async with (
            open_endpoint(config, metrics=metrics, tls=surroundings.config.http.tls) as endpoint,
            open_cache(config.cache) as cache,
            open_batcher(
                Requests(config, endpoint=endpoint).send,
                most=config.batch_texts,
                wait_s=config.wait_s,
                on_batch=metrics.batch_items.labels(config.name).observe,
            ) as batcher,
        ):
            depends = json.dumps([config.url, config.model, config.extra], sort_keys=True)
            vectors = Vectors(prefix=config.prefix, settings=depends, batcher=batcher, cache=cache)
            similarity = Similarity(vectors=vectors, keep_thinking=config.keep_thinking)
            yield AskingLane(arguments=EmbeddingArguments, function=similarity.judge, asked=endpoint)

    return Verifier(
        name=config.name,
        version=f"1+{config.model}+{key_of(settings)[:_FINGERPRINT_CHARS]}",
        description=_DESCRIPTION,
        arguments=EmbeddingArguments,
        open=opened,
    )


class EncoderLane(AskingLane[EmbeddingArguments]):
    """The lane of a similarity by an encoder."""

    def __init__(self, similarity: Similarity, *, encoder: Encoder) -> None:
        super().__init__(arguments=EmbeddingArguments, function=similarity.judge, asked=encoder)
        self._encoder = encoder

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises UserError if it cannot be."""
        await self._encoder.loaded()

    def workers(self) -> tuple[int, int]:
        """Its one process."""
        return int(self._encoder.busy), 1


def encoder_verifier(config: EncoderConfig) -> Verifier:
    """Its version holds a fingerprint of the model's files and settings. Reads all of its files. Raises UserError."""
    fingerprint = encoder_fingerprint(config)
    logger.info("encoder %s: %s, fingerprint %s", config.name, config.path, fingerprint)
    told = key_of(fingerprint, config.pooling, config.prefix, config.dtype, str(config.keep_thinking))

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        metrics = surroundings.metrics
        async with (
            open_encoder(
                config, fingerprint=fingerprint, on_kill=metrics.killed_workers.labels(config.name).inc
            ) as encoder,
            open_cache(config.cache) as cache,
            open_batcher(
                _vectors_by(encoder),
                most=config.batch_texts,
                wait_s=config.wait_s,
                at_once=1,
                on_batch=metrics.batch_items.labels(config.name).observe,
            ) as batcher,
        ):
            vectors = Vectors(prefix=config.prefix, settings=told, batcher=batcher, cache=cache)
            similarity = Similarity(vectors=vectors, keep_thinking=config.keep_thinking)
            yield EncoderLane(similarity, encoder=encoder)

    return Verifier(
        name=config.name,
        version=f"1+{told[:_FINGERPRINT_CHARS]}",
        description=_DESCRIPTION,
        arguments=EmbeddingArguments,
        open=opened,
    )


def _vectors_by(encoder: Encoder) -> Send[str, Vector]:
    async def send(texts: Sequence[str], deadline: float) -> Sequence[Vector]:
        return [unit(vector) for vector in await encoder.send(texts, deadline)]

    return send
