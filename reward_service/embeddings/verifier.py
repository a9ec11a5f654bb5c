"""Similarities of embeddings as verifiers of the service: by an endpoint, and by an encoder in a process of its own.

Embeddings of texts are kept ones, or asked for, those of all requests together; the similarity of a completion to
references is the same whoever makes them. The batch of an encoder's process that dies is an error.
"""

import asyncio
import base64
import json
import logging
import math
import statistics
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import mul
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from protocol.rewards import ScoreItem
from reward_service.endpoints.asking import AskingLane, Batcher, Send, open_batcher, together
from reward_service.endpoints.cache import Cache, key_of, open_cache
from reward_service.endpoints.config import EmbeddingArguments, EmbeddingConfig
from reward_service.endpoints.endpoint import Endpoint, InputRefused, open_endpoint
from reward_service.models.config import EncoderConfig
from reward_service.models.folder import encoder_fingerprint, most_encoder_tokens
from reward_service.models.process import EncoderToLoad, ModelProcess, TextEmbeddings, Texts
from reward_service.verifier.lanes import Lane, Surroundings, Verifier
from reward_service.verifier.submission import InfrastructureError, Outcome, Score
from reward_service.verifiers.extraction import strip_thinking
from services.worker_process import WorkerDied

PATH = "/embeddings"
_FINGERPRINT_CHARS = 12
_DESCRIPTION = "Cosine similarity, from -1 to 1, of the embeddings of the completion and of references."


class Encoder:
    """Made by `open_encoder`."""

    def __init__(self, config: EncoderConfig, *, fingerprint: str, on_kill: Callable[[], None]) -> None:
        self._config = config
        self.last_problem = "none of its batches has failed"
        self.process = ModelProcess(
            _to_load(config, fingerprint),
            config=config,
            answer=TextEmbeddings,
            name=str(self),
            too_long="it took too long for a batch, and was killed",
            on_kill=on_kill,
        )

    def __str__(self) -> str:
        return f"encoder {self._config.path}"

    @property
    def busy(self) -> bool:
        """True if a batch is being encoded."""
        return self.process.busy

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises UserError if it cannot be."""
        await self.process.loaded()

    async def send(self, texts: Sequence[str], deadline: float) -> Sequence["array[float]"]:
        """The texts' embeddings, in order, whatever the deadline: the process cannot be interrupted.

        Raises InputRefused if one of them is too long, InfrastructureError.
        """
        try:
            answer = await self.process.ask(Texts(texts=tuple(texts)))
        except (InfrastructureError, WorkerDied) as error:
            self.last_problem = f"its process died: {error}" if isinstance(error, WorkerDied) else str(error)
            raise InfrastructureError(f"{self}: {self.last_problem}") from error
        if answer.error is not None:
            raise InputRefused(answer.error.message)
        if len(answer.vectors) != len(texts):
            raise InfrastructureError(f"{self} gave {len(answer.vectors)} embeddings for {len(texts)} texts")
        return [array("f", base64.b64decode(vector)) for vector in answer.vectors]


@asynccontextmanager
async def open_encoder(
    config: EncoderConfig, *, fingerprint: str, on_kill: Callable[[], None]
) -> AsyncIterator[Encoder]:
    """An encoder whose process has been started, and need not have loaded yet. Leaving kills the process."""
    encoder = Encoder(config, fingerprint=fingerprint, on_kill=on_kill)
    try:
        await encoder.process.start()
        yield encoder
    finally:
        await encoder.process.stop()


def _to_load(config: EncoderConfig, fingerprint: str) -> EncoderToLoad:
    return EncoderToLoad(
        path=str(config.path.absolute()),
        device=config.device,
        dtype=config.dtype,
        pooling=config.pooling,
        max_tokens=most_encoder_tokens(config),
        threads=config.threads,
        fingerprint=fingerprint,
    )


logger = logging.getLogger(__name__)


Vector: TypeAlias = "array[float]"


class EmbeddingRequest(RootModel[dict[str, JsonValue]]):
    """The model, the texts, and the user's further fields."""

    model_config = ConfigDict(frozen=True)


class _AnsweredTexts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Embedding(_AnsweredTexts):
    index: int
    embedding: tuple[float, ...] = Field(min_length=1)


class _Usage(_AnsweredTexts):
    total_tokens: int = Field(0, ge=0)


class EmbeddingAnswer(_AnsweredTexts):
    """An embedding for each text, by its index."""

    data: tuple[_Embedding, ...]
    usage: _Usage | None = None


class Requests:
    """Asks the endpoint for the embeddings of some texts."""

    def __init__(self, config: EmbeddingConfig, *, endpoint: Endpoint) -> None:
        self._config = config
        self._endpoint = endpoint

    async def send(self, texts: Sequence[str], deadline: float) -> Sequence[Vector]:
        """The texts' embeddings, of length 1 and in order, by the deadline. Raises VerifierError, TimeoutError."""
        fields: Mapping[str, JsonValue] = {"model": self._config.model, "input": list(texts)}
        request = EmbeddingRequest({**fields, **self._config.extra})
        async with asyncio.timeout_at(deadline):
            answer = await self._endpoint.ask(PATH, request, EmbeddingAnswer, deadline=deadline)
        self._endpoint.spend(tokens=0 if answer.usage is None else answer.usage.total_tokens)
        return vectors_of(answer, count=len(texts))


def vectors_of(answer: EmbeddingAnswer, *, count: int) -> Sequence[Vector]:
    """Raises InfrastructureError for an answer that has no embedding for each text, and what `units` raises."""
    found = {one.index: one.embedding for one in answer.data}
    if sorted(found) != list(range(count)) or len(answer.data) != count:
        raise InfrastructureError(f"the endpoint gave {len(answer.data)} embeddings for {count} texts, or in no order")
    return units([found[index] for index in range(count)])


def units(vectors: Sequence[Sequence[float]]) -> Sequence[Vector]:
    """Each at length 1. Raises InputRefused if only some have a direction, whose texts are then asked for one by one:
    the text at fault takes no others along. Raises InfrastructureError if none has.
    """
    directed = sum(0 < math.hypot(*values) < math.inf for values in vectors)
    if 0 < directed < len(vectors):
        raise InputRefused(f"{len(vectors) - directed} of {len(vectors)} embeddings have no direction")
    return [unit(values) for values in vectors]


def unit(values: Sequence[float]) -> Vector:
    """At length 1. Raises InfrastructureError if there is no direction."""
    length = math.hypot(*values)
    if not 0 < length < math.inf:
        raise InfrastructureError(f"an embedding has the length {length}, and so no direction")
    return array("f", [value / length for value in values])


@dataclass(frozen=True)
class Embedding:
    """A text's embedding, of length 1, and whether it was kept from an earlier question."""

    vector: Vector
    kept: bool


class Vectors:
    """Embeddings by text, each paid once while it is kept. `settings` stand for all else that they depend on."""

    def __init__(self, *, prefix: str, settings: str, batcher: Batcher[str, Vector], cache: Cache) -> None:
        self._prefix = prefix
        self._settings = settings
        self._batcher = batcher
        self._cache = cache

    async def of(self, texts: Sequence[str], *, deadline: float) -> list[Embedding]:
        """The texts' embeddings in order. Raises VerifierError."""
        return await together([self._one(text, deadline=deadline) for text in texts])

    async def _one(self, text: str, *, deadline: float) -> Embedding:
        whole = f"{self._prefix}{text}"

        async def make() -> str:
            vector = await self._batcher.ask(whole, deadline=deadline)
            return base64.b64encode(vector.tobytes()).decode()

        found = await self._cache.get(key_of(self._settings, whole), make)
        return Embedding(array("f", base64.b64decode(found.text)), kept=found.kept)


def cosine(one: Vector, other: Vector) -> float:
    """Of two vectors of length 1. Raises InfrastructureError if they are of different sizes."""
    if len(one) != len(other):
        raise InfrastructureError(f"embeddings have {len(one)} and {len(other)} numbers")
    product = math.fsum(map(mul, one, other))
    if not math.isfinite(product):  # min and max would make a 1 of it
        raise InfrastructureError("an embedding holds a number that is not finite")
    return max(-1.0, min(1.0, product))


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """`keep_thinking`: the completion's thought is compared, too."""

    vectors: Vectors
    keep_thinking: bool

    async def judge(self, item: ScoreItem, arguments: EmbeddingArguments, deadline: float) -> Outcome:
        """The cosine, from -1 to 1. Of a completion without text 0, since nothing has no direction."""
        completion = item.completion if self.keep_thinking else strip_thinking(item.completion)
        if not completion.strip():
            return Outcome(result=Score(reward=0.0, components={"empty": 1.0}))
        embeddings = await self.vectors.of([completion, *arguments.references], deadline=deadline)
        similarities = [cosine(embeddings[0].vector, other.vector) for other in embeddings[1:]]
        reward = max(similarities) if arguments.pick == "best" else statistics.fmean(similarities)
        score = Score(reward=reward, components={"empty": 0.0})
        return Outcome(result=score, cached=all(each.kept for each in embeddings))


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
        return units(await encoder.send(texts, deadline))

    return send
