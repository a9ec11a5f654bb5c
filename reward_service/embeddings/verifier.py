"""Similarities of embeddings as verifiers of the service: by an endpoint, and by an encoder in a process of its own."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from reward_service.embeddings.config import EmbeddingArguments, EmbeddingConfig, EncoderConfig
from reward_service.embeddings.encoder import EncoderLane, encoder_fingerprint, open_encoder
from reward_service.embeddings.vectors import Requests, Similarity, Vectors
from reward_service.endpoints.asking import AskingLane, open_batcher
from reward_service.endpoints.cache import key_of, open_cache
from reward_service.endpoints.endpoint import open_endpoint
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
                encoder.send,
                most=config.batch_texts,
                wait_s=config.wait_s,
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
