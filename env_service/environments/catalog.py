"""The environments that a config names.

The tasks of several environments, in shares.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, cycle, zip_longest
from math import ceil

from env_service.environments.bridges import Bridges
from env_service.environments.imported import EnvironmentFault, offered
from env_service.environments.interface import OfferedEnvironment, Task, TaskSource, Verification, text_of
from env_service.environments.jsonl import Addition, JsonlTaskSource, SingleTurn
from env_service.environments.rules import Rules
from env_service.environments.task_configs import (
    AdditionTasks,
    ClassTasks,
    JsonlTasks,
    LevelTasks,
    MixTasks,
    ReasoningGymTasks,
    Tasks,
)
from env_service.environments.tokenization import (
    OWN_TEMPLATE,
    ChatTemplateError,
    Tokenization,
    TokenizerError,
    beginning,
    characters_of,
)
from env_service.environments.tool_formats import ALL_FORMATS
from protocol.messages import MAX_PARTS, TaskPart
from protocol.trajectories import Purpose

_MAX_TASKS = 100_000_000
_ROUNDING = 1e-9
_MOST_SUMMED_UP = 512


_SAMPLED, _LONGEST = 64, 16
_MAX_CHARS, _FEWEST_CHARS, _CHARS_OF_A_TOKEN = 400_000, 20_000, 16
"""Of all prompts that are tokenized to see how long they are, of which a tokenizer does some million in a second; of
those of an environment that comes after others that used them up; and what hardly a text has in the mean.
"""


@dataclass(frozen=True)
class Share:
    """The tasks of one environment, with the weight of its share."""

    tasks: TaskSource
    weight: float


class _Parts(ABC):
    """The tasks of several sources as one. Of the evaluation tasks each occurs once, and the parts take turns."""

    def __init__(self, parts: Sequence[TaskSource]) -> None:
        self._parts = parts
        self._evaluation = _in_turn([tasks.evaluation_tasks for tasks in parts])

    @property
    @abstractmethod
    def train_tasks(self) -> int: ...

    @property
    def evaluation_tasks(self) -> int:
        return len(self._evaluation)

    def task(self, purpose: Purpose, index: int) -> Task | Awaitable[Task]:
        """The task of the part that has this index. Raises IndexError beyond the number of tasks."""
        part, own = self.place(purpose, index)
        return self._parts[part].task(purpose, own)

    def place(self, purpose: Purpose, index: int) -> tuple[int, int]:
        """The part that has this task, and the task's number there. Raises IndexError."""
        if purpose == "evaluate":
            return self._evaluation[index]
        if index >= self.train_tasks:
            raise IndexError(index)
        return self._training_place(index)

    @abstractmethod
    def _training_place(self, index: int) -> tuple[int, int]: ...


class Mix(_Parts):
    """Training tasks in the shares of their weights, as many as let every task of each part occur: those of a part that
    has too few recur. Of the evaluation tasks each occurs once, and the parts take turns, so that the first few hold
    some of each. Raises ValueError for a part without training tasks.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        super().__init__([share.tasks for share in shares])
        sizes = [tasks.train_tasks for tasks in self._parts]
        if not all(sizes):
            raise ValueError("an environment of a mix has no training tasks")
        total = sum(share.weight for share in shares)
        epoch = max(size * total / share.weight for size, share in zip(sizes, shares, strict=True))
        if epoch > _MAX_TASKS:
            raise ValueError(f"a mix would have {epoch:.3g} tasks in an epoch: make its weights less unequal")
        self._ends = list(accumulate(ceil(epoch * share.weight / total * (1 - _ROUNDING)) for share in shares))

    @property
    def train_tasks(self) -> int:
        return self._ends[-1]

    @property
    def shares(self) -> tuple[TaskPart, ...]:
        """The parts, in the order of their tasks."""
        firsts = (0, *self._ends)
        return tuple(
            TaskPart(places=end - first, tasks=part.train_tasks)
            for first, end, part in zip(firsts, self._ends, self._parts, strict=False)
        )

    def _training_place(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._ends, index)
        first = self._ends[part - 1] if part else 0
        return part, (index - first) % self._parts[part].train_tasks


class Ladder(_Parts):
    """Training tasks in levels, one for each part and all of the size of the largest; those of a part that has fewer
    recur. Evaluation tasks as those of a mix. Raises ValueError for a part without training tasks.
    """

    def __init__(self, parts: Sequence[TaskSource]) -> None:
        super().__init__(parts)
        self.levels = len(parts)
        self.size = max(part.train_tasks for part in parts)
        if not all(part.train_tasks for part in parts):
            raise ValueError("a level has no training tasks")

    @property
    def train_tasks(self) -> int:
        return self.size * len(self._parts)

    @property
    def shares(self) -> tuple[TaskPart, ...]:
        """The levels in their order; of one that is a mix its parts, as often as it recurs."""
        return tuple(share for part in self._parts for share in self._within_level(part))

    def _within_level(self, part: TaskSource) -> list[TaskPart]:
        if not isinstance(part, Mix):
            return [TaskPart(places=self.size, tasks=part.train_tasks)]
        found, left = [], self.size
        for share in cycle(part.shares):
            places = min(share.places, left)
            found.append(TaskPart(places=places, tasks=min(share.tasks, places)))
            left -= places
            if not left:
                return found
        raise AssertionError("a mix has parts")

    def _training_place(self, index: int) -> tuple[int, int]:
        level, own = divmod(index, self.size)
        return level, own % self._parts[level].train_tasks


def parts_of(source: TaskSource) -> tuple[TaskPart, ...]:
    """The parts whose shares are to be kept by who draws tasks of its own choice; none where each level is one, or
    where they are too many to tell.
    """
    if not isinstance(source, Mix | Ladder) or len(source.shares) > MAX_PARTS:
        return ()
    plain = isinstance(source, Ladder) and [TaskPart(places=source.size, tasks=source.size)] * source.levels
    return () if plain == [*source.shares] else source.shares


def _in_turn(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(part, index) of all tasks of parts of these sizes: the first of each part, then the second of each."""
    rows = zip_longest(*([(part, index) for index in range(size)] for part, size in enumerate(sizes)))
    return [place for row in rows for place in row if place is not None]


Elsewhere = Callable[[ClassTasks], OfferedEnvironment]
"""Makes the environment of an entry that is isolated. Raises EnvironmentFault."""


def build(configs: Iterable[Tasks], *, elsewhere: Elsewhere = offered) -> Mapping[str, OfferedEnvironment]:
    """Environments by name; of those that are isolated what `elsewhere` makes, or like others if it is not given.

    Raises ValueError with the file and line, the dataset or the class of one that cannot be made.
    """
    given = tuple(configs)
    found: dict[str, OfferedEnvironment] = {}
    for config in sorted(given, key=_depth):
        found.update(_made(config, found, elsewhere))
    return {config.name: found[config.name] for config in given}


def _made(
    config: Tasks, found: Mapping[str, OfferedEnvironment], elsewhere: Elsewhere
) -> dict[str, OfferedEnvironment]:
    if isinstance(config, MixTasks):
        return {config.name: _mixed(config, found)}
    if isinstance(config, LevelTasks):
        return {config.name: _laddered(config, found)}
    return {config.name: _offered(config, elsewhere)}


def _depth(config: Tasks) -> int:
    """A mix comes after what it consists of, and so do levels, which may be mixes."""
    return 1 if isinstance(config, MixTasks) else 2 if isinstance(config, LevelTasks) else 0


def check_templates(environments: Mapping[str, OfferedEnvironment], tokenization: Tokenization) -> None:
    """Raises EnvironmentFault, naming the role or what it is told, for an environment that the model's chat template
    cannot carry.
    """
    bridges = Bridges(tokenization)
    for environment in environments.values():
        place = f"environment {environment.name}"
        if environment.template_arguments:
            with faults_as(f"{place}: chat_template_kwargs"):
                tokenization.template.check_arguments(environment.template_arguments)
        _check_summaries(environment)
        with faults_as(place):
            told = bridges.with_arguments(environment.template_arguments)
            asked = ("user",) if environment.rules.history == "summarize" and "user" not in environment.roles else ()
            told.check_roles((*environment.roles, *asked), history=environment.rules.history)
        if environment.rules.action == "tools":
            _check_calls(environment, told.tokenization)


def _check_calls(environment: OfferedEnvironment, told: Tokenization) -> None:
    """Raises EnvironmentFault where nobody would read the calls that the model was trained to write."""
    if environment.rules.tool_format == "auto" and told.writes_unknown_calls:
        raise EnvironmentFault(
            f"environment {environment.name}: {told.template_name} shows the policy its tools, and writes their calls "
            f"in a form that is not known; expected one of {', '.join(ALL_FORMATS)}: set rules.tool_format to the form "
            "that the prompt asks for, or give a chat template that writes one of these (run.chat_template)"
        )


def _check_summaries(environment: OfferedEnvironment) -> None:
    """Raises EnvironmentFault for rules of which one does nothing without the other, or that do nothing here."""
    rules, place = environment.rules, f"environment {environment.name}: rules"
    if rules.history != "summarize":
        if rules.context_tokens is not None and not environment.makes_room:
            raise EnvironmentFault(
                f'{place}: context_tokens is {rules.context_tokens}, and history is "{rules.history}": it bounds a '
                'context that the policy sums up; set history = "summarize", or leave it out'
            )
        if not environment.makes_room:
            return
    elif environment.agent is not None or environment.players:
        kind = "an agent, which tells its own history" if environment.agent is not None else "a game of several players"
        raise EnvironmentFault(f'{place}: history is "summarize", and this is {kind}; expected "append" or "split"')
    why = 'history is "summarize"' if rules.history == "summarize" else "on_full may have the policy sum up"
    if rules.max_turns > _MOST_SUMMED_UP:
        raise EnvironmentFault(
            f"{place}: {why}, and max_turns is {rules.max_turns}; expected at most {_MOST_SUMMED_UP}, since a "
            "trajectory has 1024 turns at most, summaries among them"
        )
    if rules.context_tokens is None:
        raise EnvironmentFault(
            f'{place}: history is "summarize" without context_tokens; expected the tokens that the prompt of a turn '
            "may have, less than generator.engine.max_model_len by what a turn, the request for a summary and that take"
        )


@contextmanager
def faults_as(place: str) -> Iterator[None]:
    """Within it what a chat template cannot do becomes an EnvironmentFault of this place."""
    try:
        yield
    except ChatTemplateError as error:
        raise EnvironmentFault(f"{place}: {error}") from error


def opponent_tokenization(entry: ClassTasks, policy: Tokenization) -> Tokenization:
    """Of an entry's opponent: the policy's where its model is the policy's, with the run's chat template. Another model
    was made with a template of its own. Raises EnvironmentFault.
    """
    given = entry.opponent
    assert given is not None, "asked of an entry with an opponent"
    folder = given.model or policy.folder
    told = given.chat_template_kwargs
    if given.chat_template is None and folder.resolve() == policy.folder.resolve():
        return policy.with_arguments({**entry.chat_template_kwargs, **told})
    try:
        return Tokenization(folder, chat_template=given.chat_template, arguments=told)
    except (FileNotFoundError, TokenizerError) as error:
        raise EnvironmentFault(f"environment {entry.name}: opponent.model: {error}") from error
    except ChatTemplateError as error:
        raise EnvironmentFault(f"environment {entry.name}: opponent.chat_template: {error}") from error


def check_opponents(
    entries: Iterable[Tasks], environments: Mapping[str, OfferedEnvironment], policy: Tokenization
) -> None:
    """Raises EnvironmentFault for an opponent without a tokenizer, or whose chat template cannot carry the game."""
    for entry in entries:
        if not isinstance(entry, ClassTasks) or entry.opponent is None:
            continue
        theirs, environment = opponent_tokenization(entry, policy), environments[entry.name]
        if entry.opponent.chat_template_kwargs:
            with faults_as(f"environment {entry.name}: opponent.chat_template_kwargs"):
                theirs.template.check_arguments(entry.opponent.chat_template_kwargs)
        try:
            Bridges(theirs).check_roles(environment.roles, history=environment.rules.history)
        except ChatTemplateError as error:
            place = f"its opponent, {theirs.folder}" if theirs.template_name == OWN_TEMPLATE else "its opponent"
            raise EnvironmentFault(
                f"environment {entry.name}: {place}: {error}; or give it a chat template, opponent.chat_template"
            ) from error


def made_of(
    configs: Iterable[Tasks], tokenization: Tokenization, *, elsewhere: Elsewhere = offered
) -> tuple[dict[str, OfferedEnvironment], list[str]]:
    """The environments that can be made, and what `build` and `check_templates` say of each of the others.

    Mixes and levels are left out where a part of theirs is.
    """
    found: dict[str, OfferedEnvironment] = {}
    faults: list[str] = []
    for config in sorted(configs, key=_depth):
        parts = _parts_of(config)
        if any(name not in found for name in parts):
            continue
        try:
            found.update(_made(config, found, elsewhere))
            if not parts:
                _check_carried(found[config.name], config, tokenization)
        except ValueError as error:
            text = str(error)
            faults.append(text if text.startswith("environment ") else f"environment {config.name}: {text}")
    return found, faults


def _parts_of(config: Tasks) -> tuple[str, ...]:
    if isinstance(config, MixTasks):
        return tuple(part.environment for part in config.parts)
    return config.levels if isinstance(config, LevelTasks) else ()


def _check_carried(environment: OfferedEnvironment, config: Tasks, tokenization: Tokenization) -> None:
    """Checks that the model's files can carry its messages. Raises ValueError that names the key which changes that."""
    if isinstance(config, ClassTasks):
        check_templates({environment.name: environment}, tokenization)
        check_opponents([config], {environment.name: environment}, tokenization)
    elif isinstance(config, JsonlTasks | ReasoningGymTasks) and config.chat_template_kwargs:
        check_templates({environment.name: environment}, tokenization)
    elif isinstance(config, JsonlTasks | ReasoningGymTasks) and config.chat:
        try:
            assert tokenization.template
        except ChatTemplateError as error:
            raise ChatTemplateError(f"chat is true, and {error}") from error


def budgets_of(environments: Mapping[str, OfferedEnvironment]) -> Mapping[str, int]:
    """Most tokens of a conversation, of the environments that bound it, by the setting."""
    tokens = {name: environment.rules.trajectory_tokens for name, environment in environments.items()}
    return {f"environments.{name}.rules.trajectory_tokens": most for name, most in tokens.items() if most is not None}


def _mixed(config: MixTasks, found: Mapping[str, OfferedEnvironment]) -> OfferedEnvironment:
    parts = [found[part.environment] for part in config.parts]
    tasks = Mix([Share(part.tasks, given.weight) for part, given in zip(parts, config.parts, strict=True)])
    return OfferedEnvironment(
        name=config.name, tasks=tasks, start=SingleTurn, members=tuple(parts), parts=_whose(parts, tasks.place)
    )


def _laddered(config: LevelTasks, found: Mapping[str, OfferedEnvironment]) -> OfferedEnvironment:
    parts = [found[name] for name in config.levels]
    tasks = Ladder([part.tasks for part in parts])
    return OfferedEnvironment(
        name=config.name,
        tasks=tasks,
        start=SingleTurn,
        levels=len(parts),
        members=tuple(parts),
        parts=_whose(parts, tasks.place),
    )


def _whose(
    parts: Sequence[OfferedEnvironment], place: Callable[[Purpose, int], tuple[int, int]]
) -> Callable[[Purpose, int], tuple[OfferedEnvironment, int]]:
    def at(purpose: Purpose, index: int) -> tuple[OfferedEnvironment, int]:
        part, own = place(purpose, index)
        return parts[part], own

    return at


def _offered(
    config: AdditionTasks | JsonlTasks | ReasoningGymTasks | ClassTasks, elsewhere: Elsewhere
) -> OfferedEnvironment:
    if isinstance(config, ClassTasks):
        return offered(config) if config.isolation == "none" else elsewhere(config)
    return OfferedEnvironment(
        name=config.name,
        tasks=_source(config),
        start=SingleTurn,
        rules=Rules(
            max_turns=1,
            stop=() if isinstance(config, AdditionTasks) else config.stop,
            teacher_hint=config.teacher_hint,
            hint_reward=config.hint_reward,
        ),
        at_once=True,
        template_arguments={} if isinstance(config, AdditionTasks) else config.chat_template_kwargs,
        tasks_at_once=not isinstance(config, ReasoningGymTasks),  # which makes each task when it is asked for
    )


def _source(config: AdditionTasks | JsonlTasks | ReasoningGymTasks) -> TaskSource:
    if isinstance(config, AdditionTasks):
        return Addition()
    if isinstance(config, JsonlTasks):
        return JsonlTaskSource(config)
    # Deferred: reasoning-gym takes a second to import, and most runs do without it.
    from env_service.environments.procedural import ReasoningGymSource

    return ReasoningGymSource(config)


@dataclass(frozen=True)
class WrittenTask:
    """A task that a user wrote: who is to judge it, and the file and line that say so."""

    where: str
    task: Task


@dataclass(frozen=True)
class PromptLength:
    """A prompt's length in tokens, and whose it is; with `at_least` it is so long or longer."""

    where: str
    tokens: int
    at_least: bool = False


def wanted_of(environments: Mapping[str, OfferedEnvironment]) -> Iterator[WrittenTask]:
    """The tasks of files, whose verifiers and arguments a user wrote."""
    for environment in environments.values():
        source = environment.tasks
        if isinstance(source, JsonlTaskSource):
            for purpose, count in _counts(environment):
                yield from (WrittenTask(source.where(purpose, at), source.task(purpose, at)) for at in range(count))


def held_out_verifications(environment: OfferedEnvironment) -> Iterator[Verification]:
    """Verifications of its held-out tasks, where tasks are at hand and nothing else gives their rewards."""
    verifications = []
    for at in range(environment.tasks.evaluation_tasks):
        part, own = environment.at("evaluate", at)
        if part.start is not SingleTurn or not isinstance(part.tasks, Addition | JsonlTaskSource):
            return
        verifications.append(part.tasks.task("evaluate", own).verification)
    yield from verifications


def longest_prompt(
    environments: Mapping[str, OfferedEnvironment], tokenization: Tokenization, *, context_tokens: int
) -> PromptLength | None:
    """Of the prompts that can be had without a conversation: some of all, and of a file those with the most letters.

    It takes no longer than a second or so: those with the most letters come first, and of a text no more is tokenized
    than says that it is longer than `context_tokens`.
    """
    found: list[PromptLength] = []
    left = max(_FEWEST_CHARS, min(_MAX_CHARS, _CHARS_OF_A_TOKEN * context_tokens))
    for environment in environments.values():
        told = tokenization.with_arguments(environment.template_arguments)
        sampled = sorted(_sampled(environment), key=lambda one: len(text_of(one[1].prompt)), reverse=True)
        for where, task in sampled:
            prompt, is_cut = beginning(task.prompt, left), characters_of(task.prompt) > left
            try:
                found.append(PromptLength(where, len(told.encode(prompt)[1]) if prompt else 0, is_cut))
            except ChatTemplateError:
                break  # named already as what is wrong with the environment
            left = max(_FEWEST_CHARS, left - len(text_of(prompt)))
            if is_cut:
                break
    return max(found, key=lambda prompt: prompt.tokens, default=None)


def _counts(environment: OfferedEnvironment) -> list[tuple[Purpose, int]]:
    return [("train", environment.tasks.train_tasks), ("evaluate", environment.tasks.evaluation_tasks)]


def _sampled(environment: OfferedEnvironment) -> Iterator[tuple[str, Task]]:
    source = environment.tasks
    if not isinstance(source, Addition | JsonlTaskSource):
        return
    for purpose, count in _counts(environment):
        chosen = set(range(0, count, max(1, count // _SAMPLED)))
        if isinstance(source, JsonlTaskSource):
            lengths = [len(text_of(source.task(purpose, at).prompt)) for at in range(count)]
            chosen |= set(nlargest(_LONGEST, range(count), key=lengths.__getitem__))
            yield from ((source.where(purpose, at), source.task(purpose, at)) for at in sorted(chosen))
        else:
            yield from ((f"environment {environment.name}", source.task(purpose, at)) for at in sorted(chosen))
