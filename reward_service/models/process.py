"""A model in a process of its own, which answers batches in turn, and what is said to it: one JSON object a line.

    ask: one batch at a time ─▶ the process has loaded ─▶ a line ─▶ its answer
                                                              └─ none in time, or it dies: a new process

`ask` waits for the batch before it, for the process to load at most `start_timeout_s` and for its batch at most
`compute_timeout_s`. The process first says whether it has loaded, as every worker does; then it answers each
`ModelBatch` with `RewardReplies`, or each `Texts` with `TextEmbeddings`.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from protocol.model import WireModel
from protocol.rewards import RewardFormat, ScoreError, Tokenize
from reward_service.models.config import LocalModelConfig
from reward_service.verifier.submission import InfrastructureError, UserError
from reward_service.verifier.worker_pool import WorkerReply
from services.worker_process import WorkerDied, WorkerProcess, WorkerUnavailable, worker_environment

A = TypeVar("A", bound=BaseModel)


class _ToLoad(WireModel):
    """The model of a worker process. `fingerprint` is that of the files which it is expected to find."""

    path: str
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    threads: int = Field(ge=1)
    fingerprint: str


class RewardModelToLoad(_ToLoad):
    """A reward model; `batch_tokens` is the most in one forward pass, `chat_template` the text of one that goes before
    the model's own, if it is not empty.
    """

    kind: Literal["reward_model"] = "reward_model"
    batch_tokens: int = Field(ge=1)
    chat_template: str = ""


class EncoderToLoad(_ToLoad):
    """An encoder; a text has at most `max_tokens`."""

    kind: Literal["encoder"] = "encoder"
    pooling: Literal["mean", "first", "last"]
    max_tokens: int = Field(ge=1)


ModelToLoad = RewardModelToLoad | EncoderToLoad

_TO_LOAD: TypeAdapter[ModelToLoad] = TypeAdapter(Annotated[ModelToLoad, Field(discriminator="kind")])


def read_model_to_load(text: str) -> ModelToLoad:
    """Of the command line of a worker process."""
    return _TO_LOAD.validate_json(text)


class ModelMessage(WireModel):
    """A turn of a conversation."""

    role: str
    content: str


class ModelJob(WireModel):
    """An input: `messages` before the completion if `format` is chat, `prompt` if it is plain. `special_tokens`: a
    plain one has those that the tokenizer adds by itself, also when it is tokenized `apart`.
    """

    format: RewardFormat
    tokenize: Tokenize
    special_tokens: bool = False
    max_tokens: int | None
    messages: tuple[ModelMessage, ...]
    prompt: str
    completion: str


class ModelBatch(WireModel):
    """Inputs that are scored together."""

    jobs: tuple[ModelJob, ...]


class RewardReplies(WireModel):
    """A reply to each job, in order."""

    replies: tuple[WorkerReply, ...]


class Texts(WireModel):
    """Texts that are encoded together."""

    texts: tuple[str, ...]


class TextEmbeddings(WireModel):
    """An embedding of each text, of length 1, in order, as base64 of float32; or why there is none of one of them."""

    vectors: tuple[str, ...] = ()
    error: ScoreError | None = None


class ModelProcess(Generic[A]):
    """The process of the model `given`, whose answers are of the type `answer`.

    `name` stands in errors, `too_long` is the error of a batch that takes too long; `on_kill` hears of a process that
    was killed or lost in a batch.
    """

    def __init__(
        self,
        given: ModelToLoad,
        *,
        config: LocalModelConfig,
        answer: type[A],
        name: str,
        too_long: str,
        on_kill: Callable[[], None],
    ) -> None:
        self._config = config
        self._answer = answer
        self._name = name
        self._too_long = too_long
        self._on_kill = on_kill
        self._turn = asyncio.Lock()
        self._process = WorkerProcess(
            command=("reward_service.models.worker", given.model_dump_json()),
            environment={**worker_environment(inherit=True, threads=config.threads), "HF_HUB_OFFLINE": "1"},
            start_timeout_s=config.start_timeout_s,
            what="its model",
        )

    @property
    def busy(self) -> bool:
        """True if it has a batch, or loads."""
        return self._turn.locked()

    @property
    def process_id(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.process_id

    async def start(self) -> None:
        """Start it; returns before it has loaded. Raises InfrastructureError if the system can start no process."""
        with _as_infrastructure():
            await self._process.start()

    async def stop(self) -> None:
        """Kill it."""
        await self._process.stop()

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises UserError if it cannot be."""
        try:
            async with self._turn:
                await self._process.ready()
        except WorkerDied as error:
            raise UserError(f"{self._name}: its process died: {error}; the log has the cause") from error
        except WorkerUnavailable as error:
            raise UserError(f"{self._name}: {error}") from error

    async def ask(self, batch: BaseModel, *, sent: Callable[[], None] = lambda: None) -> A:
        """The answer to a batch, whatever deadline its items have: the process cannot be interrupted.

        `sent` is called when the process has loaded and the batch goes to it. Raises InfrastructureError if the model
        cannot be loaded or takes too long, WorkerDied.
        """
        async with self._turn:
            with _as_infrastructure():
                await self._process.ready()
            sent()
            return await self._exchange(batch)

    async def _exchange(self, batch: BaseModel) -> A:
        completed = False
        try:
            async with asyncio.timeout(self._config.compute_timeout_s):
                answer = self._read(await self._process.exchange(batch.model_dump_json().encode()))
            completed = True
            return answer
        except TimeoutError:
            raise InfrastructureError(self._too_long) from None
        finally:
            if not completed:
                self._on_kill()
                await self._process.stop()
                with _as_infrastructure():
                    await self._process.start()

    def _read(self, line: bytes) -> A:
        try:
            return self._answer.model_validate_json(line)
        except ValueError as error:
            raise WorkerDied("its answer is none of ours") from error


@contextmanager
def _as_infrastructure() -> Iterator[None]:
    try:
        yield
    except WorkerUnavailable as error:
        raise InfrastructureError(str(error)) from error
