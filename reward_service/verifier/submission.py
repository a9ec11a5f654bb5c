"""A verifier as its author writes it: a function of a submission and typed arguments that returns a reward.

A verifier of one's own is a plain function, sync or async, whose second parameter is annotated with a pydantic model:

    class Arguments(BaseModel):
        word: str

    def contains(submission: Submission, arguments: Arguments) -> float:
        \"\"\"1 when the completion contains the word.\"\"\"
        return float(arguments.word in submission.completion)

TRL's reward functions are taken, too: `def reward(completions, **kwargs)` gets the completions of a group and their
prompts as lists, as text, and each argument of the tasks as a list; `log_metric` and `log_extra` go into the scores. An
item that is in no group comes by itself. There is no `completion_ids` and no `trainer_state` here: one that needs them
is refused.

It may return a number, a bool or a `Score`. When it cannot judge, it raises: an exception becomes an error of the item,
never a reward of 0. A sync function runs in a worker process that is killed at its deadline; an async one runs in an
event loop of users' code, in a thread of the service, and is cancelled at its deadline. One that blocks there holds up
the other async ones, until it is given up: what waits is awaited.
"""

import importlib
import inspect
import math
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from protocol.rewards import ScoreError
from protocol.trajectories import ErrorKind
from services.config.options import nearest
from services.user_code import exit_at_import, hidden_by, in_a_sentence, let_out, number_of, user_frames

MAX_MESSAGE_CHARS = 1000

_LOGS = frozenset({"log_metric", "log_extra"})
_NOT_HERE = frozenset({"completion_ids", "trainer_state"})

# What says nothing about the input: no memory, or a peer of the verifier's that did not answer.
_PASSING_TROUBLE = (MemoryError, TimeoutError, ConnectionError)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The judged text: the completion, as text, and the prompt that it answers (empty if the caller sent none)."""

    completion: str
    prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward, and the numbers that it was made of by name. All are finite.

    `explanation` is for people who look at samples: what was compared, what failed. It is cut at 1,000 characters.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    explanation: str = field(default="", compare=False)


class VerifierError(Exception):
    """The reward could not be computed; `kind` says whose fault that is."""

    kind: ClassVar[ErrorKind]


class UserError(VerifierError):
    """The request is wrong: an unknown verifier, arguments that do not fit, a verifier that returns no number."""

    kind = "user"


class DataError(VerifierError):
    """The verifier cannot judge this input."""

    kind = "data"


class InfrastructureError(VerifierError):
    """It might work at another time or place: a deadline, a dead worker, no memory."""

    kind = "infrastructure"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one item: a score or an error, and how many attempts it took.

    `cached`: it is that of an earlier item. `version`: the verifier's, where that differs from item to item.
    """

    result: Score | ScoreError
    attempts: int = 1
    cached: bool = False
    version: str | None = None


Together = Callable[[Sequence[Submission], Sequence[BaseModel]], Any]
"""Judges several submissions at once: what it returns, or what an async one does, has for each what its function
returned, or the VerifierError that it is to raise.
"""


@dataclass(frozen=True, kw_only=True)
class VerifierFunction:
    """A verifier's code with what its signature says about it; `coroutine` is the function if it is async. `together`
    judges a whole group, of one that is called with it.
    """

    function: Callable[..., object]
    arguments: type[BaseModel]
    coroutine: Callable[..., Awaitable[object]] | None
    description: str
    together: Together | None = None


def load_function(path: str) -> VerifierFunction:
    """The verifier at the import path `package.module:function`. Raises UserError if it cannot be one."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        before, _, last = path.partition(":")[0].rpartition(".")
        meant = f"{before}:{'FUNCTION' if last == 'py' else last}"
        hint = f"; did you mean {meant}?" if before else ""
        raise UserError(f"a verifier's import path is written package.module:function, got {path!r}{hint}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        remedy = "put it beside run.toml or its folder on PYTHONPATH, or install its package"
        why = in_a_sentence(error) if user_frames(error) else str(error)
        raise UserError(f"verifier {path!r}: cannot import {module_name!r}: {why}; {remedy}") from error
    except SystemExit as error:
        raise UserError(f"verifier {path!r}: {module_name!r} {exit_at_import(error)}") from error
    except Exception as error:  # whatever a module of the user's raises when it is loaded
        raise UserError(f"verifier {path!r}: {module_name!r} cannot be imported: {in_a_sentence(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if inspect.isfunction(value) and each[0] != "_"]
        has = f"it has {', '.join(sorted(functions))}" if functions else "it has none"
        raise UserError(f"verifier {path!r}: {module_name!r} has no function {name!r}; {hidden_by(module) or has}")
    return inspect_function(function=function, path=path)


def inspect_function(*, function: Callable[..., object], path: str) -> VerifierFunction:
    """Read a verifier's signature. Raises UserError unless its second parameter is annotated with a pydantic model, or
    it is a reward function as TRL's are.
    """
    description = (inspect.getdoc(function) or "").partition("\n")[0]
    if "completions" in inspect.signature(function).parameters:
        together = _of_lists(function, path)
        alone = _alone(together, is_async=inspect.iscoroutinefunction(function))
        return VerifierFunction(
            function=alone,
            arguments=_columns(frozenset(_needed(function) - _LOGS - {"prompts", "completions"})),
            coroutine=alone if inspect.iscoroutinefunction(function) else None,
            description=description,
            together=together,
        )
    parameters = list(inspect.signature(function).parameters)
    model = typing.get_type_hints(function).get(parameters[1]) if len(parameters) == 2 else None
    if not (inspect.isclass(model) and issubclass(model, BaseModel)):
        raise UserError(
            f"verifier {path!r} has the signature {inspect.signature(function)}, expected two parameters, "
            "(submission: Submission, arguments: A), where A is a pydantic model; or TRL's, (completions, **kwargs)"
        )
    coroutine = function if inspect.iscoroutinefunction(function) else None
    return VerifierFunction(function=function, arguments=model, coroutine=coroutine, description=description)


class AnyArguments(BaseModel):
    """Whatever the task holds: the function's signature says what it takes of that."""

    model_config = ConfigDict(frozen=True, extra="allow")


def _needed(function: Callable[..., object]) -> set[str]:
    """The parameters that have no default."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.default is inspect.Parameter.empty and each.kind in by_name}


def _columns(needed: frozenset[str]) -> type[BaseModel]:
    """Arguments with all of these among them, so that a task that lacks one is known before it is scored."""

    class Columns(AnyArguments):
        @model_validator(mode="after")
        def _complete(self) -> Self:
            if missing := sorted(needed - (self.model_extra or {}).keys()):
                raise ValueError(
                    f"the function takes {', '.join(missing)}, which the task does not hold: add it to the task's "
                    "arguments, or give the parameter a default"
                )
            return self

    return Columns


def _of_lists(function: Callable[..., object], path: str) -> Together:
    """A reward function over lists, as TRL's are, for submissions. The columns of the data set are the arguments."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    needed = _needed(function) - _LOGS
    if absent := sorted(_NOT_HERE & needed):
        raise UserError(
            f"verifier {path!r} takes {', '.join(absent)}, which a reward service does not have: it judges texts, "
            "apart from the trainer; give the parameter a default, or judge by completions and columns"
        )

    def lists(
        submissions: Sequence[Submission], arguments: Sequence[BaseModel], noted: "_ScoreNotes"
    ) -> Mapping[str, object]:
        rows = [
            {**(each.model_extra or {}), "prompts": one.prompt, "completions": one.completion}
            for one, each in zip(submissions, arguments, strict=True)
        ]
        if missing := sorted(name for name in needed if not all(name in row for row in rows)):
            raise UserError(
                f"verifier {path!r} takes {', '.join(missing)}, which the task does not hold: add it to the task's "
                "arguments, or give the parameter a default"
            )
        given: dict[str, object] = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
        given |= {"log_metric": noted.log_metric, "log_extra": noted.log_extra}
        return {name: value for name, value in given.items() if takes_all or name in parameters}

    if inspect.iscoroutinefunction(function):

        async def judge_later(submissions: Sequence[Submission], arguments: Sequence[BaseModel]) -> Sequence[object]:
            noted = _ScoreNotes(len(submissions))
            with _texts_not_messages():
                rewards = await function(**lists(submissions, arguments, noted))
            return noted.beside(_each(rewards, len(submissions), path))

        return judge_later

    def judge(submissions: Sequence[Submission], arguments: Sequence[BaseModel]) -> Sequence[object]:
        noted = _ScoreNotes(len(submissions))
        with _texts_not_messages():
            rewards = function(**lists(submissions, arguments, noted))
        return noted.beside(_each(rewards, len(submissions), path))

    return judge


@contextmanager
def _texts_not_messages() -> Iterator[None]:
    """Tells a function that takes a text for a list of messages what it gets: those for TRL's chats do."""
    try:
        yield
    except TypeError as error:
        if not str(error).startswith("string indices must be integers"):
            raise
        raise DataError(
            f"the verifier raised {in_a_sentence(error)}; a completion and a prompt are texts here, and no lists of "
            "messages: read `completion` in place of `completion[0]['content']`"
        ) from error


def _alone(together: Together, *, is_async: bool) -> Callable[..., Any]:
    """For one submission. Raises what its judgement says."""

    async def judge_later(submission: Submission, arguments: BaseModel) -> object:
        return _settled((await together([submission], [arguments]))[0])

    def judge(submission: Submission, arguments: BaseModel) -> object:
        return _settled(together([submission], [arguments])[0])

    return judge_later if is_async else judge


def _settled(value: object) -> object:
    if isinstance(value, VerifierError):
        raise value
    return value


class _ScoreNotes:
    """Notes that a function makes by the ways that TRL gives it, beside its `count` rewards: numbers, which are those
    of all of them, and columns by name.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers: dict[str, float] = {}
        self._columns: dict[str, Sequence[object]] = {}

    def log_metric(self, name: str, value: object) -> None:
        """A number becomes a component of the scores."""
        self._numbers[str(name)] = _number(value)

    def log_extra(self, column: str, values: Iterable[object]) -> None:
        """A column, which has a row for each completion, becomes a line of each score's explanation."""
        self._columns[str(column)] = list(values)

    def beside(self, rewards: Sequence[object]) -> Sequence[object]:
        """The rewards, as scores if something was noted."""
        if not self._numbers and not self._columns:
            return rewards
        return [self._noted(place, reward) for place, reward in enumerate(rewards)]

    def _noted(self, place: int, reward: object) -> object:
        if isinstance(reward, VerifierError):
            return reward
        shown = {
            column: rows[place : place + 1] if len(rows) == self._count else rows
            for column, rows in self._columns.items()
        }
        explanation = "\n".join(f"{column}: {', '.join(map(str, rows))}" for column, rows in shown.items())
        return Score(reward=_number(reward), components=self._numbers, explanation=explanation)


def _each(rewards: object, count: int, path: str) -> Sequence[object]:
    """A reward for each completion; None is TRL's word for one that the function does not judge."""
    if inspect.iscoroutine(rewards):
        rewards.close()
        raise UserError(
            f"verifier {path!r} returned a coroutine, which nobody awaits here: name a function that is itself written "
            "with `async def`, and not an object or a wrapper around one"
        )
    values = list(rewards) if isinstance(rewards, Iterable) and not isinstance(rewards, str | bytes | Mapping) else None
    if values is None or len(values) != count:
        whose = "one completion, expected a list of one number"
        whose = whose if count == 1 else f"{count} completions, expected a list of as many numbers"
        raise UserError(f"verifier {path!r} returned {rewards!r:.80} for {whose}")
    unjudged = DataError(f"verifier {path!r} returned None: it does not judge this completion")
    return [unjudged if each is None else each.item() if hasattr(each, "item") else each for each in values]


def validate_arguments(*, model: type[BaseModel], arguments: Mapping[str, JsonValue]) -> BaseModel:
    """The arguments as the verifier's own model. Raises UserError that names the fields that do not fit."""
    try:
        return model.model_validate(arguments)
    except ValidationError as error:
        strangers = [name for name in arguments if name not in model.model_fields]
        found = error.errors(include_url=False)
        # Of a name that is misspelled its absence says it all.
        least = [each for each in found if each["type"] != "extra_forbidden" or not _is_missed(each, found)]
        faults = "; ".join(_fault(each, strangers) for each in least)
        takes = f" (the verifier takes: {', '.join(model.model_fields)})" if model.model_fields else ""
        raise UserError(f"arguments do not fit: {faults}{takes}") from error


def _is_missed(stranger: ErrorDetails, found: Sequence[ErrorDetails]) -> bool:
    missing = [".".join(map(str, each["loc"])) for each in found if each["type"] == "missing"]
    return any(nearest(name, [".".join(map(str, stranger["loc"]))]) for name in missing)


def _fault(item: ErrorDetails, strangers: Sequence[str]) -> str:
    where, said = ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing" and (meant := nearest(where, strangers)):
        return f"{meant} is none of its arguments; did you mean {where}?"
    shown = "" if item["type"] in ("missing", "extra_forbidden", "value_error") else f", got {item['input']!r:.60}"
    return f"{where}: {said}{shown}" if where else f"{said}{shown}"


def to_score(value: object) -> Score:
    """Turns a verifier's return value into a score. Raises UserError if it is no number, DataError if it is not
    finite.
    """
    score = value if isinstance(value, Score) else Score(reward=_number(value))
    components = {_name(name): _number(part) for name, part in score.components.items()}
    checked = Score(reward=_number(score.reward), components=components, explanation=_sendable(str(score.explanation)))
    not_finite = [name for name, part in {"reward": checked.reward, **components}.items() if not math.isfinite(part)]
    if not_finite:
        raise DataError(f"the verifier returned a value that is not finite: {', '.join(not_finite)}")
    return checked


def _name(name: object) -> str:
    if isinstance(name, str) and name.isprintable():
        return name
    raise UserError(f"the verifier returned a component named {name!r}, expected printable text")


def _number(value: object) -> float:
    number = number_of(value)
    if number is not None:
        return number
    raise UserError(f"the verifier returned {type(value).__name__}, expected a number or a Score")


def outcome_of(value: object) -> Outcome:
    """The outcome of a value that a verifier returned, or was to raise, for one of several submissions."""
    try:
        return Outcome(result=to_score(_settled(value)))
    except VerifierError as error:
        return Outcome(result=error_of(error))


def error_of(exception: Exception) -> ScoreError:
    """An exception out of a verifier as the item's error: its own kind, or by its class."""
    if isinstance(exception, VerifierError):
        return ScoreError(kind=exception.kind, message=_sendable(str(exception)))
    kind: ErrorKind = "infrastructure" if isinstance(exception, _PASSING_TROUBLE) else "data"
    message = f"the verifier raised {in_a_sentence(exception)}"
    return ScoreError(kind=kind, message=_sendable(message))


def ended_itself(error: BaseException) -> DataError:
    """Stands for a CancelledError that a verifier lets out while nobody cancels it, or a SystemExit."""
    return DataError(f"the verifier {let_out(error)}")


def _sendable(message: str) -> str:
    """Short, and without the halves of characters that no JSON can hold."""
    return message[:MAX_MESSAGE_CHARS].encode("utf-8", errors="replace").decode()
