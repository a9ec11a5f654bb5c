"""An encoder in a process of its own.

    texts of a batch -> send: one batch at a time -> worker process: tokenize, pad, one forward pass, pool -> embeddings

`send` waits for the batch before it, for the process to load at most `start_timeout_s` and for its batch at most
`compute_timeout_s`. A process that dies or is killed is started again; the batch that it had is an error.
"""

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from reward_service.embeddings.config import EmbeddingArguments, EncoderConfig
from reward_service.embeddings.messages import Encoded, EncoderToLoad, Texts
from reward_service.embeddings.vectors import Similarity, Vector, unit
from reward_service.endpoints.asking import AskingLane
from reward_service.endpoints.endpoint import InputRefused
from reward_service.reward_models.folder import fingerprint as fingerprint_of
from reward_service.verifier.submission import InfrastructureError, UserError
from reward_service.verifier.worker_pool import WorkerDied, WorkerProcess, worker_environment


class Encoder:
    """Made by `open_encoder`."""

    def __init__(self, config: EncoderConfig, *, fingerprint: str, on_kill: Callable[[], None]) -> None:
        self._config = config
        self._on_kill = on_kill
        self._turn = asyncio.Lock()
        self.last_problem = "none of its batches has failed"
        self.process = WorkerProcess(
            command=("reward_service.embeddings.encoder_worker", _to_load(config, fingerprint).model_dump_json()),
            environment={**worker_environment(inherit=True, threads=config.threads), "HF_HUB_OFFLINE": "1"},
            start_timeout_s=config.start_timeout_s,
        )

    def __str__(self) -> str:
        return f"encoder {self._config.path}"

    @property
    def busy(self) -> bool:
        """Whether a batch is being encoded."""
        return self._turn.locked()

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises UserError if it cannot be."""
        try:
            async with self._turn:
                await self.process.ready()
        except (InfrastructureError, WorkerDied) as error:
            raise UserError(f"{self}: {error or 'its process died; the log has the cause'}") from error

    async def send(self, texts: Sequence[str], deadline: float) -> Sequence[Vector]:
        """The texts' embeddings, of length 1 and in order, whatever the deadline: the process cannot be interrupted.

        Raises InputRefused if one of them is too long, InfrastructureError.
        """
        async with self._turn:
            try:
                await self.process.ready()
                answer = await self._exchange(Texts(texts=tuple(texts)))
            except (InfrastructureError, WorkerDied) as error:
                self.last_problem = str(error) or "its process died"
                raise InfrastructureError(f"{self}: {self.last_problem}") from error
        if answer.error is not None:
            raise InputRefused(answer.error.message)
        if len(answer.vectors) != len(texts):
            raise InfrastructureError(f"{self} gave {len(answer.vectors)} embeddings for {len(texts)} texts")
        return [unit(array("f", base64.b64decode(vector))) for vector in answer.vectors]

    async def _exchange(self, texts: Texts) -> Encoded:
        completed = False
        try:
            async with asyncio.timeout(self._config.compute_timeout_s):
                answer = _encoded(await self.process.exchange(texts.model_dump_json().encode()))
            completed = True
            return answer
        except TimeoutError:
            raise InfrastructureError("it took too long for a batch, and was killed") from None
        finally:
            if not completed:
                self._on_kill()
                await self.process.stop()


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


def encoder_fingerprint(config: EncoderConfig) -> str:
    """Over all files of the model. Raises UserError for a directory that holds none."""
    if not (config.path / "config.json").exists() or not any(config.path.glob("*.safetensors")):
        raise UserError(
            f"{config.path} is no model: expected a Hugging Face directory with config.json and safetensors"
        )
    return fingerprint_of(config.path)


def _to_load(config: EncoderConfig, fingerprint: str) -> EncoderToLoad:
    return EncoderToLoad(
        path=str(config.path.absolute()),
        device=config.device,
        dtype=config.dtype,
        pooling=config.pooling,
        max_tokens=config.max_tokens,
        threads=config.threads,
        fingerprint=fingerprint,
    )


def _encoded(line: bytes) -> Encoded:
    try:
        return Encoded.model_validate_json(line)
    except ValueError as error:
        raise WorkerDied from error
