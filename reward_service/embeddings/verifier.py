"""A similarity of embeddings as a verifier of the service."""

import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from protocol.rewards import ScoreItem
from reward_service.embeddings.arguments import SimilarityArguments
from reward_service.embeddings.config import EmbeddingConfig
from reward_service.embeddings.vectors import Requests, Vectors, cosine
from reward_service.endpoints.batching import open_batcher
from reward_service.endpoints.cache import key_of, open_cache
from reward_service.endpoints.endpoint import open_endpoint
from reward_service.endpoints.lane import AskingLane
from reward_service.extraction import strip_thinking
from reward_service.lanes.contract import Lane, Surroundings, Verifier
from reward_service.verifier import Outcome, Score

_FINGERPRINT_CHARS = 12


def embedding_verifier(config: EmbeddingConfig) -> Verifier:
    """Its version holds the model's name and a fingerprint of the settings that change an embedding."""
    settings = json.dumps([config.prefix, config.keep_thinking, config.extra], sort_keys=True)

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        metrics = surroundings.metrics
        async with (
            open_endpoint(config, metrics=metrics) as endpoint,
            open_cache(config.cache) as cache,
            open_batcher(
                Requests(config, endpoint=endpoint).send,
                most=config.batch_texts,
                wait_s=config.wait_s,
                on_batch=metrics.batch_items.labels(config.name).observe,
            ) as batcher,
        ):
            vectors = Vectors(config, batcher=batcher, cache=cache)
            yield AskingLane(
                arguments=SimilarityArguments, function=partial(_similarity, config, vectors), endpoint=endpoint
            )

    return Verifier(
        name=config.name,
        version=f"1+{config.model}+{key_of(settings)[:_FINGERPRINT_CHARS]}",
        description="Cosine similarity, from -1 to 1, of the embeddings of the completion and of references.",
        arguments=SimilarityArguments,
        open=opened,
    )


async def _similarity(
    config: EmbeddingConfig, vectors: Vectors, item: ScoreItem, arguments: SimilarityArguments, deadline: float
) -> Outcome:
    """Of a completion without text 0, since nothing has no direction."""
    completion = item.completion if config.keep_thinking else strip_thinking(item.completion)
    if not completion.strip():
        return Outcome(result=Score(reward=0.0, components={"empty": 1.0}))
    embeddings = await vectors.of([completion, *arguments.references], deadline=deadline)
    similarities = [cosine(embeddings[0].vector, other.vector) for other in embeddings[1:]]
    reward = max(similarities) if arguments.pick == "best" else statistics.fmean(similarities)
    score = Score(reward=reward, components={"empty": 0.0})
    return Outcome(result=score, cached=all(each.kept for each in embeddings))
