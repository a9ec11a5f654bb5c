"""Environments that are classes, found by their import path."""

import importlib
import inspect
import random
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from env_service.environments.interface import (
    Agent,
    Aggregation,
    Environment,
    OfferedEnvironment,
    Role,
    Task,
    TaskSource,
)
from env_service.environments.rules import Rules
from env_service.environments.task_configs import ClassTasks
from protocol.codec import describe
from protocol.trajectories import MAX_PLAYER_CHARS, Purpose
from services.config.options import complaint_of, nearest
from services.config.run_paths import placed
from services.user_code import exit_at_import, hidden_by, in_a_sentence

_OURS = __name__.partition(".")[0]
PlayerName = Annotated[str, Field(min_length=1, max_length=MAX_PLAYER_CHARS)]


class EnvironmentFault(ValueError):
    """A class cannot be used as an environment; the text names the entry, and what is expected."""


class NumberedTasks:
    """Tasks that are a number each: an environment makes what is to be done from the task's seed. `seed` is that of all
    of them; none: that of the environment's entry.
    """

    def __init__(self, *, seed: int | None, train_tasks: int, evaluation_tasks: int) -> None:
        self._seed = seed
        self._train_tasks = train_tasks
        self._evaluation_tasks = evaluation_tasks

    @property
    def train_tasks(self) -> int:
        return self._train_tasks

    @property
    def evaluation_tasks(self) -> int:
        return self._evaluation_tasks

    def task(self, purpose: Purpose, index: int) -> Task:
        """Its seed is the same in every process, and no other task's but by chance of 1 in 2^62."""
        seed = random.Random(f"{self._seed or 0}/{purpose}/{index}").getrandbits(62)
        return Task(seed=seed, purpose=purpose)

    def seeded(self, seed: int) -> "NumberedTasks":
        """The same ones, with this seed if they have none of their own."""
        own = seed if self._seed is None else self._seed
        return NumberedTasks(seed=own, train_tasks=self._train_tasks, evaluation_tasks=self._evaluation_tasks)


class _ClassFacts(BaseModel):
    """Facts that a class declares about itself, or an instance of it, where that depends on the options."""

    model_config = ConfigDict(frozen=True)

    rules: Rules = Rules()
    roles: tuple[Role, ...] = ("user",)
    metrics: Mapping[str, Aggregation] = {}
    players: tuple[PlayerName, ...] = ()


def offered(entry: ClassTasks) -> OfferedEnvironment:
    """The environment of an entry. Raises EnvironmentFault."""
    made = class_at(entry)
    arguments = _options(made, entry)
    example = _example(made, arguments, entry)
    declared = _declared(example, entry)
    _check_opponent(declared.players, entry)
    rules = declared.rules.model_copy(update={key: getattr(entry.rules, key) for key in entry.rules.model_fields_set})
    _check_branches(rules, declared.players, example, entry)
    _check_room(rules, declared.players, example, entry)
    if rules.replayable and is_agent(made):
        raise EnvironmentFault(
            f"{_named(entry)}: rules.replayable is true, and it is an agent, whose own program nobody can take back: "
            "only an environment with reset and step is rebuilt from its actions; leave it out"
        )
    if rules.teacher_hint is not None and (declared.players or is_agent(made)):
        raise EnvironmentFault(
            f"{_named(entry)}: rules.teacher_hint is set, and it is {'a game' if declared.players else 'an agent'}: a "
            "teacher is shown a hint beside the opening of an environment with reset and step alone; leave it out"
        )
    if is_agent(made) and entry.rules.redundant:
        raise EnvironmentFault(
            f"{_named(entry)}: rules.redundant is {entry.rules.redundant}, and it is an agent, whose trajectories are "
            "all waited for; leave it out"
        )
    return OfferedEnvironment(
        name=entry.name,
        tasks=_tasks(made, arguments, entry),
        start=typing.cast("Callable[[], Environment]", partial(made, *arguments)),
        rules=rules,
        roles=("user",) if is_agent(made) else declared.roles,
        metrics=declared.metrics,
        agent=typing.cast("Callable[[], Agent]", partial(made, *arguments)) if is_agent(made) else None,
        players=declared.players,
        own_loop=made.__module__.partition(".")[0] != _OURS,
        makes_room=(makes_room := callable(getattr(example, "on_full", None))),
        saves=_saves(example) and not (makes_room or rules.branch_after or declared.players or is_agent(made)),
        template_arguments=entry.chat_template_kwargs,
    )


def _saves(example: Environment | Agent) -> bool:
    return all(callable(getattr(example, name, None)) for name in ("save", "restore"))


def is_agent(made: object) -> bool:
    """True if it talks to the policy by itself."""
    return callable(getattr(made, "run", None)) and not callable(getattr(made, "step", None))


def _check_opponent(players: tuple[str, ...], entry: ClassTasks) -> None:
    """The policy plays one part at least."""
    if len(set(players)) < len(players):
        raise EnvironmentFault(f"{_named(entry)}: two of its players have one name: {', '.join(players)}")
    if entry.opponent is None:
        return
    if len(players) < 2:
        raise EnvironmentFault(
            f"{_named(entry)}: an opponent is set, and the environment is not one of several players"
        )
    strange = [name for name in entry.opponent.plays if name not in players]
    if strange or set(entry.opponent.plays) == set(players):
        raise EnvironmentFault(
            f"{_named(entry)}: opponent.plays is {', '.join(entry.opponent.plays)}; expected some, not all, of "
            f"{', '.join(players)}"
        )


def _check_branches(rules: Rules, players: tuple[str, ...], example: Environment | Agent, entry: ClassTasks) -> None:
    """Raises EnvironmentFault for rules of branches that do nothing here, or that the class cannot follow."""
    place, after = f"{_named(entry)}: rules", list(rules.branch_after)
    if not after:
        if "branch_width" in entry.rules.model_fields_set:
            raise EnvironmentFault(
                f"{place}: branch_width is {rules.branch_width}, and branch_after is not set: no conversation "
                "branches; set branch_after to the turns after which it does, or leave branch_width out"
            )
        return
    said = f"{place}: branch_after is {after}, and "
    if is_agent(type(example)) or players:
        kind = "a game of several players" if players else "an agent, whose code has no second instance"
        raise EnvironmentFault(f"{said}this is {kind}; expected a class with reset, step and fork, or no branch_after")
    if not callable(getattr(example, "fork", None)):
        raise EnvironmentFault(
            f"{said}the class has no method fork; expected one that returns a second instance that stands where this "
            "one does: `def fork(self): return copy.deepcopy(self)` where all is in the instance"
        )
    if after[-1] >= rules.max_turns:
        raise EnvironmentFault(
            f"{said}max_turns is {rules.max_turns}: nothing comes after turn {after[-1]}; raise max_turns, or branch "
            "earlier"
        )
    if rules.redundant:
        raise EnvironmentFault(
            f"{said}redundant is {rules.redundant}: the branches that finish first would make the group, without those "
            "that they are compared with; leave one of them out"
        )


def _check_room(rules: Rules, players: tuple[str, ...], example: Environment | Agent, entry: ClassTasks) -> None:
    """Raises EnvironmentFault for an `on_full` that would never be asked."""
    if not callable(getattr(example, "on_full", None)):
        return
    if is_agent(type(example)) or players:
        kind = "a game of several players" if players else "an agent, which is told its room by client.room()"
        raise EnvironmentFault(f"{_named(entry)}: the class has a method on_full, and is {kind}; leave it out")
    if rules.context_tokens is None or rules.history == "split":
        raise EnvironmentFault(
            f"{_named(entry)}: the class has a method on_full, which is asked before a prompt gets longer than "
            f'context_tokens; expected rules with context_tokens and history "append" or "summarize", got '
            f'{rules.context_tokens} and "{rules.history}"'
        )


def _example(
    made: type[Environment | Agent], arguments: tuple[BaseModel, ...], entry: ClassTasks
) -> Environment | Agent:
    """An instance, by which a constructor that fails is known before the first rollout."""
    try:
        return made(*arguments)
    except Exception as error:  # whatever a constructor of the user's raises
        raise EnvironmentFault(f"{_named(entry)}: cannot be made: {in_a_sentence(error)}") from error


def _declared(example: Environment | Agent, entry: ClassTasks) -> _ClassFacts:
    said = {key: getattr(example, key) for key in _ClassFacts.model_fields if hasattr(example, key)}
    try:
        return _ClassFacts.model_validate(said)
    except ValidationError as error:
        raise EnvironmentFault(f"{_named(entry)}: the class says of itself {describe(error)}") from error


def _named(entry: ClassTasks) -> str:
    return f"environment {entry.name} ({entry.path})"


def class_at(entry: ClassTasks) -> type[Environment | Agent]:
    """The class that an entry names. Raises EnvironmentFault."""
    module_name, _, name = entry.path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EnvironmentFault(
            f"{_named(entry)}: cannot import {module_name!r}: {error}; is it beside run.toml, installed, or its folder "
            "on PYTHONPATH?"
        ) from error
    except SystemExit as error:
        raise EnvironmentFault(f"{_named(entry)}: {module_name!r} {exit_at_import(error)}") from error
    except Exception as error:  # whatever a module of the user's raises when it is loaded
        raise EnvironmentFault(
            f"{_named(entry)}: {module_name!r} raises when imported: {in_a_sentence(error)}"
        ) from error
    made: Any = getattr(module, name, None)
    if not inspect.isclass(made):
        classes = [each for each, value in vars(module).items() if inspect.isclass(value) and each[0] != "_"]
        guess = nearest(name, classes)
        hint = f"did you mean {guess}?" if guess else f"it has {', '.join(sorted(classes)) or 'none'}"
        raise EnvironmentFault(f"{_named(entry)}: {module_name!r} has no class {name!r}; {hidden_by(module) or hint}")
    lacking = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
    if lacking and not is_agent(made):
        raise EnvironmentFault(
            f"{_named(entry)}: the class has no method {' and no '.join(lacking)}; expected reset and step, or the run "
            "of an agent"
        )
    return typing.cast("type[Environment | Agent]", made)


def _options(made: type[Environment | Agent], entry: ClassTasks) -> tuple[BaseModel, ...]:
    """Arguments of the constructor: nothing, or the options as its own model."""
    model = options_model(made, entry)
    if model is None:
        if entry.options:
            raise EnvironmentFault(f"{_named(entry)}: the class takes no options, got {', '.join(entry.options)}")
        return ()
    try:
        return (model.model_validate(placed(entry.options, model, beside=entry.folder)),)
    except ValidationError as error:
        raise EnvironmentFault(f"{_named(entry)}: options: {complaint_of(error, model)}") from error


def options_model(made: type[Environment | Agent], entry: ClassTasks) -> type[BaseModel] | None:
    """The model of an entry's `options`; None for a class that takes none. Raises EnvironmentFault."""
    constructor: Callable[..., Any] = made.__init__
    parameters = [] if constructor is object.__init__ else list(inspect.signature(constructor).parameters)[1:]
    if not parameters:
        return None
    model = typing.get_type_hints(constructor).get(parameters[0])
    if len(parameters) > 1 or not (inspect.isclass(model) and issubclass(model, BaseModel)):
        raise EnvironmentFault(
            f"{_named(entry)}: the constructor takes {', '.join(parameters)}; expected nothing, or one parameter that "
            "is annotated with a pydantic model"
        )
    return model


def _tasks(made: type[Environment | Agent], arguments: tuple[BaseModel, ...], entry: ClassTasks) -> TaskSource:
    own: Callable[..., TaskSource] | None = getattr(made, "tasks", None)
    if own is not None:
        try:
            found = own(*arguments)
        except Exception as error:  # as a constructor
            raise EnvironmentFault(f"{_named(entry)}: its tasks cannot be made: {error}") from error
        return found.seeded(entry.seed) if isinstance(found, NumberedTasks) else found
    return NumberedTasks(seed=entry.seed, train_tasks=entry.train_tasks, evaluation_tasks=entry.evaluation_tasks)
