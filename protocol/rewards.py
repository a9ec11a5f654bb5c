"""HTTP bodies of the reward service, and the file `headway_reward.json` that says how a reward model wants its input.

The learner writes it beside a reward model that it has trained; for another one it is written by hand:

    {"format": "chat", "tokenize": "whole", "max_tokens": 4096}
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, model_validator

from protocol.model import WireModel
from protocol.trajectories import MAX_EXPLANATION_CHARS, ErrorKind, fault_of_reward

REWARD_INPUT_FILE = "headway_reward.json"
MAX_DEADLINE_S = 3600
"""Of a request for rewards, in seconds."""


def _whole(value: object) -> object:
    """JSON Schema calls 4.0 an integer, and so do clients of languages with one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class ScoreMessage(WireModel):
    """A message of the conversation before a completion."""

    role: str = Field(min_length=1, max_length=64)
    content: str = Field(max_length=1 << 20)


class ScoreItem(WireModel):
    """A completion to be scored by a named verifier. `arguments` are the verifier's own (the answer, say).

    `messages` are the conversation that the completion ends, where it is more than the prompt as a user's message.
    `deadline_s`, if given, is the item's own limit in seconds; the request's holds all the same. `group`: a name for
    the `group_size` items of one task, for verifiers that compare them; empty for an item by itself.
    """

    id: str = Field(max_length=256)
    verifier: str = Field(min_length=1, max_length=256)
    completion: str = Field(max_length=1 << 20)
    prompt: str = Field(default="", max_length=1 << 20)
    messages: tuple[ScoreMessage, ...] = Field(default=(), max_length=4096, exclude_if=lambda messages: not messages)
    arguments: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    deadline_s: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_S)
    group: str = Field(default="", max_length=64, exclude_if=lambda name: not name)
    group_size: Annotated[int, BeforeValidator(_whole)] = Field(
        default=1, ge=1, le=4096, exclude_if=lambda size: size == 1
    )


class ScoreRequest(WireModel):
    """A batch. Each item is answered within `deadline_s` seconds, with a reward or with an error.

    With the header `Accept: application/x-ndjson` the answer is a `ScoreResult` a line, in the order of finishing. With
    the header `Idempotency-Key` a repetition is answered as the first request was.
    """

    items: tuple[ScoreItem, ...] = Field(min_length=1, max_length=4096)
    deadline_s: float = Field(default=30.0, gt=0, le=MAX_DEADLINE_S)


class ScoreError(WireModel):
    """Reason for a missing reward. `user`: the request is wrong; `data`: the verifier cannot judge this input;
    `infrastructure`: it might work at another time or place.
    """

    kind: ErrorKind
    message: str = Field(max_length=4096)


class ScoreResult(WireModel):
    """A reward or an error, never a reward of 0 in place of an error.

    `latency_s` counts from the item's arrival; `attempts` are those of the service's own workers; `service_id` names
    the instance. `cached`: the verifier had judged the same before. `explanation` is what the verifier says of its
    reward, for people: the answers that it compared, the tests that failed, a judge's words. A reward that must not be
    trained on (see `fault_of_reward`) becomes an error of kind `data`; the other results of the answer stay.
    """

    id: str
    verifier: str
    verifier_version: str = ""
    reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict)
    latency_s: float = Field(ge=0)
    attempts: int = Field(default=1, ge=1)
    error: ScoreError | None = None
    service_id: str = Field(default="", max_length=256)
    cached: bool = False
    explanation: str = Field(default="", max_length=MAX_EXPLANATION_CHARS, exclude_if=lambda text: not text)

    @model_validator(mode="before")
    @classmethod
    def _no_unfit_reward(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        reward, components = given.get("reward"), given.get("components")
        fault = fault_of_reward(verifier=given.get("verifier"), reward=reward, components=components)
        if fault is None:
            return given
        error = given.get("error") or ScoreError(kind="data", message=fault[:4096])
        return {**given, "reward": None, "components": {}, "error": error}

    @model_validator(mode="after")
    def _reward_or_error(self) -> Self:
        if (self.reward is None) == (self.error is None):
            raise ValueError("a score result holds either a reward or an error, got both or neither")
        return self


class ScoreResponse(WireModel):
    """Results in the order of the request's items, and the instance that made them."""

    service_id: str = Field(min_length=1, max_length=256)
    results: tuple[ScoreResult, ...]


class VerifierInfo(WireModel):
    """A verifier that the service offers; `arguments_schema` is the JSON schema of its arguments."""

    name: str
    version: str
    description: str
    arguments_schema: dict[str, JsonValue]


class VerifierList(WireModel):
    """The answer of `GET /v1/verifiers`."""

    verifiers: tuple[VerifierInfo, ...]


RewardFormat = Literal["chat", "plain"]
Tokenize = Literal["apart", "whole"]


class RewardInput(WireModel):
    """`format`: `chat` is the model's chat template over the conversation, `plain` the prompt and the completion as
    they stand.

    `tokenize`: `apart` is what the learner trains on: prompt and completion are tokenized apart, as the policy samples
    them, the end token of the tokenizer comes last, and the score is taken there. `whole` is what most published reward
    models were trained on: all of the text in one piece, with what the chat template writes after the completion; of
    plain text also with the tokens that the tokenizer adds by itself. `special_tokens`: plain text has these when it
    is tokenized `apart`, too; a model whose file does not say so was trained without them. `max_tokens`: the longest
    input; the model's own limit if left out.
    """

    format: RewardFormat
    tokenize: Tokenize = "whole"
    special_tokens: bool = False
    max_tokens: int | None = Field(default=None, ge=1)


def read_reward_input(model: Path) -> RewardInput | None:
    """The reward input that the model's directory states; None if it says nothing. Raises ValueError that names the
    file.
    """
    file = model / REWARD_INPUT_FILE
    if not file.exists():
        return None
    try:
        return RewardInput.model_validate_json(file.read_bytes())
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{file}: {faults} (expected {', '.join(RewardInput.model_fields)})") from error


def write_reward_input(model: Path, given: RewardInput) -> None:
    """Writes the file into the model's directory."""
    (model / REWARD_INPUT_FILE).write_text(given.model_dump_json(indent=2) + "\n", encoding="utf-8")


Text = Annotated[str, Field(max_length=1 << 22)]


class ExecutionLimits(WireModel):
    """Limits of a program; what is not given is the service's usual. Above its maxima it is refused.

    `wall_s` is from the program's start to its end; `cpu_s` for each process; `output_bytes` for stdout and stderr
    each, of which more is cut.
    """

    wall_s: float | None = Field(default=None, gt=0)
    cpu_s: float | None = Field(default=None, gt=0)
    memory_mib: int | None = Field(default=None, ge=1)
    processes: int | None = Field(default=None, ge=1)
    output_bytes: int | None = Field(default=None, ge=1)
    disk_mib: int | None = Field(default=None, ge=1)


class ExecuteRequest(WireModel):
    """Either `code` in a `language` (`python`, or another of the service's interpreters), or a command line `argv`.

    `files` are by relative path. With a `session`, a name of the caller's, the code runs where the code of the same
    session ran before, with its variables and files; of the limits, `wall_s` and `output_bytes` are for the call, and
    the others for the whole session, as its first call says.
    """

    code: Text | None = None
    language: str = Field(default="python", min_length=1, max_length=64)
    argv: tuple[str, ...] = Field(default=(), max_length=256)
    files: dict[str, Text] = Field(default_factory=dict, max_length=256)
    stdin: Text = ""
    environment: dict[str, str] = Field(default_factory=dict, max_length=64)
    limits: ExecutionLimits = ExecutionLimits()
    session: str | None = Field(default=None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _code_or_command(self) -> Self:
        if (self.code is None) == (not self.argv):
            raise ValueError("expected either code or argv, got both or neither")
        if self.session is not None and (self.code is None or self.environment):
            raise ValueError("a session takes code, and neither argv nor environment")
        return self


class ExecuteAnswer(WireModel):
    """The end of a program: by `exit_code` or by `signal`. Bytes of the output that are no UTF-8 are replaced.

    `timed_out`: it was killed at its wall-clock limit. `session_started`: there was no session of that name, so that
    no earlier state was there; `session_ended`: there is none any more.
    """

    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    stdout_cut: bool
    stderr_cut: bool
    timed_out: bool
    wall_s: float = Field(ge=0)
    session_started: bool = False
    session_ended: bool = False


class SessionEnded(WireModel):
    """`DELETE /v1/sessions/{name}`: `ended` is false if there was no such session."""

    ended: bool
