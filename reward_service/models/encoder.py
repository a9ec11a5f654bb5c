"""An encoder: embeddings of texts by a model in a process of its own. The batch of a process that dies is an error."""

import base64
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from reward_service.endpoints.endpoint import InputRefused
from reward_service.models.config import EncoderConfig
from reward_service.models.process import Encoded, EncoderToLoad, ModelProcess, Texts
from reward_service.verifier.submission import InfrastructureError
from services.worker_process import WorkerDied


class Encoder:
    """Made by `open_encoder`."""

    def __init__(self, config: EncoderConfig, *, fingerprint: str, on_kill: Callable[[], None]) -> None:
        self._config = config
        self.last_problem = "none of its batches has failed"
        self.process = ModelProcess(
            _to_load(config, fingerprint),
            config=config,
            answer=Encoded,
            name=str(self),
            too_long="it took too long for a batch, and was killed",
            on_kill=on_kill,
        )

    def __str__(self) -> str:
        return f"encoder {self._config.path}"

    @property
    def busy(self) -> bool:
        """Whether a batch is being encoded."""
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
        max_tokens=config.max_tokens,
        threads=config.threads,
        fingerprint=fingerprint,
    )
