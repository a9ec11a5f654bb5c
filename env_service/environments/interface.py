"""Tasks and environments, and what passes between an environment and the rollout loop.

An environment of one's own is a class, named by its import path in the config file:

    [[env-service.environments]]
    source = "mine:Guess"                       # package.module:Class
    name = "guess"
    options = { highest = 31 }                  # what its constructor takes
    rules = { max_turns = 6 }                   # see rules.py; over those of the class

    class Options(BaseModel):
        highest: int = 31

    class Guess:
        \"\"\"Guess a number; it says low or high.\"\"\"

        rules = Rules(max_turns=5, turn_tokens=8)   # optional
        roles = ("user",)                           # optional: of what it says after the opening; () for plain text
        metrics = {"tries": "last"}                 # optional: how each metric is put together over the turns

        def __init__(self, options: Options) -> None:
            self._highest = options.highest

        def reset(self, task: Task, seed: int) -> Opening:
            self._number = random.Random(task.seed).randint(0, self._highest)
            return Opening((ChatMessage("user", f"Guess my number, 0 to {self._highest}."),), state="start")

        def step(self, action: Action) -> Step:
            if not action.text.strip().isdecimal():
                return Step((ChatMessage("user", "a number, please"),), invalid=True)
            guess = int(action.text)
            if guess == self._number:
                return Step(reward=1.0, stop="solved")
            return Step((ChatMessage("user", "low" if guess < self._number else "high"),), state=...)

- One instance is one conversation, hence one trajectory. All instances of a group are reset with the same task and seed
  and must open alike. `reset` and `step` may be coroutines.
- Sync methods are called one at a time in a thread beside the event loop, so that environments need no locks; what
  coroutines await overlaps. Coroutines run in an event loop of their own in a second thread, all of a conversation in
  the same one, so that a client which one of them makes can be kept. One that blocks that loop for longer than a step
  may take is at fault; others are not, and a new loop goes on. `close()`, if there is one, is called at the end,
  however it came.
- The constructor takes nothing, or one parameter annotated with a pydantic model: the entry's `options`. It is called
  once when the process starts, too: an instance may set `rules`, `roles` and `metrics` by its options.
- Tasks. Without more, there are `train_tasks` and `evaluation_tasks` of the entry, and each is a `Task` with a `seed`
  of its own, the same in every epoch, none of them in both. A class whose tasks are something else has a static method
  `tasks(options) -> TaskSource` (without the parameter, if its constructor takes nothing).
- `seed` of `reset` is the lease's, another one each time that a task is rolled out: for chance in the game, where it is
  wanted. What the task is, such as a maze, comes from the task.
- The prompt is messages, which the chat template turns into tokens, or plain text, which the policy continues. What a
  step says is of the same kind.
- Rewards add up: the trajectory's is the sum over its turns and what the verifier says, if one judges at the end.
- An exception costs that trajectory alone: it leaves its group, is counted, and logged with its traceback.
- `EnvironmentUnavailable` says that it is nobody's fault here, such as a game server that is away: from `reset`, the
  opening is tried again until there is somebody, which is not held against the task; from `step`, the trajectory leaves
  its group as a failure of infrastructure, and a group that has too few left for that is rolled out again.
  `EnvironmentFull` from `reset` says that somebody is there who has no place: it is tried some times, then elsewhere.

- `fork()`, if there is one, returns a second instance that stands where this one does: neither sees what the other does
  from there on. It may be a coroutine; `copy.deepcopy(self)` will do for what is all in the instance, chance included.
  With `branch_after` of its rules a training group begins with fewer conversations, and they branch: see branching.py.

- `save()`, if there is one, returns bytes with which `restore(saved)` puts another instance, which was reset with the
  same task and seed, where this one stands. With `env-service.checkpoints` it is called after every `save_every` turns
  of the rules, and an env_service that was started again goes on from there. They may be coroutines. Without them, the
  same is done for environments whose rules say `replayable`, by the actions that were recorded.

- `on_full(full)`, if there is one, is asked before the prompt of a turn gets longer than the rules' `context_tokens`:
  see FullContext. It may be a coroutine.

A class with `run(task, client)` instead of `reset` and `step` is an agent: it talks to the policy by itself, as a
client of OpenAI's API at `client.base_url`, and says at the end what that was worth.

A game of several players has `players`, the names of the parts, and says whose turn it is:

    class Duel:
        players = ("first", "second")

        def reset(self, task: Task, seed: int) -> TurnOf:
            return TurnOf("first", (ChatMessage("user", "It is 3. Take 1 or 2; who takes the last one wins."),))

        def step(self, action: Action) -> Round:        # the action of the player whose turn it was
            ...
            return Round(TurnOf("second", (ChatMessage("user", f"It is {left}. …"),)))
            ...
            return Round(stop="won", rewards={"first": 1.0, "second": -1.0})

- Each player has a conversation of its own. With its first turn it is told all that it needs, as an opening is; later
  on, what comes behind its last turn. What one player says the others see only if the environment tells them.
- Who moves at the same time moves one after the other here, and is told nothing of the others' moves before.
- Each conversation in which the policy had a turn is a trajectory, trained on this player's own reward.
- A part may be played by another model or an older version, which is not trained: see `opponent` of the entry.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import JsonValue

from env_service.environments.rules import Rules
from protocol.trajectories import CutOff, FinishReason, Purpose

USER_LAST = (
    "expected the user's or a tool's last; an answer cannot be begun for the policy, so ask for it in the user's words"
)
"""Expectation and remedy where the last message is the assistant's: templates would open a second turn behind it."""


class EnvironmentFailed(Exception):
    """An environment in another process did wrong; the text names the exception, with file and line, for the user.

    `kind` is `raised`, `nonsense`, `hung` or `crashed`. `traceback` is the user's own, empty if there is none.
    """

    def __init__(self, kind: str, text: str, *, traceback: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.traceback = traceback

    @property
    def details(self) -> str:
        """The traceback on lines of its own, for a log."""
        return f"\n{self.traceback.rstrip()}" if self.traceback else ""


class EnvironmentUnavailable(Exception):
    """Raised by an environment for what says nothing about its task or the policy: whom it needs is away or full.

    The text goes to the user. `kind` is what it is counted under.
    """

    kind = "unavailable"


class EnvironmentFull(EnvironmentUnavailable):
    """Raised by an environment at its opening if whom it needs is there, and has no place or does not manage it."""


Role = Literal["system", "user", "assistant", "tool"]
Aggregation = Literal["sum", "mean", "min", "max", "last"]
Tool = Mapping[str, JsonValue]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True)
class ChatMessage:
    """A message of a conversation; the chat template turns it into tokens. Of a tool's result, `name` is the tool's
    and `tool_call_id` that of the call which it answers; without one, results are numbered in their turn.
    """

    role: Role
    content: str
    name: str = ""
    tool_call_id: str = ""


Prompt = str | tuple[ChatMessage, ...]
"""Input of the policy: plain text that it continues, or messages that it answers."""


@dataclass(frozen=True)
class Verification:
    """Judge of a completion: a verifier of the reward service, with its arguments."""

    verifier: str
    arguments: dict[str, JsonValue] = field(default_factory=dict)


NOBODY = Verification("")
"""Of tasks that no verifier judges."""


@dataclass(frozen=True)
class Task:
    """The unit of work, a pure function of environment, purpose and index.

    A task of a single turn has its `prompt` and who judges the completion. Others have a `seed`, from which the
    environment makes what is to be done, or `data` that say it; by `purpose` it can keep some for evaluation.
    `privileged` is text about it that the policy does not see, and a teacher may: see `teacher_hint` of the rules.
    """

    prompt: Prompt = ()
    verification: Verification = NOBODY
    seed: int = 0
    data: Mapping[str, JsonValue] = field(default_factory=dict)
    purpose: Purpose = "train"
    privileged: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote. `id` is what it called it, where its format has that; its result has the same."""

    name: str
    arguments: Mapping[str, JsonValue]
    id: str = ""


@dataclass(frozen=True)
class Action:
    """The policy's text of a turn, as it was sampled.

    `text` is decoded without special tokens, and without the stop text. `value` is what the rules' action form found in
    it: the text of `tag:NAME`, the object of `json`, the text itself for `text`; None if there was nothing. `calls` are
    those of `tools`, empty if there were none, of tools that were not offered as well; `fault` says what is wrong with
    them: one cannot be read, or names no tool. Such an action is counted as invalid. `last`: no turn follows, whatever
    the step says, so that a step that wants a verifier has to name it now. `finish_reason` is `length` for a turn that
    was cut off.
    """

    text: str
    value: JsonValue = None
    calls: tuple[ToolCall, ...] = ()
    fault: str = ""
    last: bool = False
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True)
class Opening:
    """Beginning of a conversation. `tools` are what the chat template tells the policy that it may call.

    `state` is a key of what the policy is given, for algorithms that compare turns of equal states of a task (gigpo,
    hgpo); without one, states are equal where the tokens of the turn's prompt are.
    """

    prompt: Prompt
    tools: tuple[Tool, ...] = ()
    state: str = ""


@dataclass(frozen=True)
class Step:
    """An environment's answer to an action: how it goes on, or that it ends.

    It goes on when `observation` is given: messages, or plain text where the prompt was plain text. They are appended
    as they are; the tokens before them are never made again. It ends when `stop` says why in a word (`solved`), or when
    `verification` names who judges the last completion. Exactly one of the two.

    `reward` is this turn's own. `state` is the key of what the policy is given next, as in `Opening`. `invalid`: the
    action was none that is allowed; it is counted, and costs the rules' penalty. `metrics` are this turn's, put
    together over the turns as the class says (the last value of those that it does not name).
    """

    observation: Prompt = ()
    verification: Verification | None = None
    stop: str = ""
    reward: float = 0.0
    state: str = ""
    invalid: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert bool(self.observation) != self.ends, "a step goes on or ends, not both or neither"

    @property
    def ends(self) -> bool:
        """True if it is the last one."""
        return bool(self.stop) or self.verification is not None


class TaskSource(Protocol):
    """The tasks of an environment. `task` raises for a task that cannot be made; it may be a coroutine."""

    @property
    def train_tasks(self) -> int: ...

    @property
    def evaluation_tasks(self) -> int: ...

    def task(self, purpose: Purpose, index: int) -> Task | Awaitable[Task]: ...


class Environment(Protocol):
    """A conversation with the policy: see the top of this file."""

    def reset(self, task: Task, seed: int) -> Prompt | Opening | Awaitable[Prompt | Opening]: ...

    def step(self, action: Action) -> Step | Awaitable[Step]: ...


@dataclass(frozen=True)
class FullContext:
    """Told to `on_full`: with `observation`, which the policy was not shown yet, its prompt would have `tokens`, or
    more where that is very long, and the rules let it have `context_tokens`.

    `messages` are those of the context so far, the policy's among them; none where the conversation is plain text. The
    answer is one of:

    - `ShorterContext`: the conversation goes on from these messages, in a new context that sees nothing else;
    - `SummaryRequest`: the policy sums up first, in a turn of its own, as with `history = "summarize"`;
    - `Step`: an end, such as a verification of what there is, or another observation, one that fits;
    - None: it declines. With `history = "summarize"` the policy then sums up, else the conversation is cut off, as
      `token_budget`.
    """

    messages: tuple[ChatMessage, ...]
    observation: Prompt
    tokens: int
    context_tokens: int


@dataclass(frozen=True)
class ShorterContext:
    """Messages, or plain text, from which a conversation goes on: all that the policy sees of what was before."""

    prompt: Prompt


@dataclass(frozen=True)
class SummaryRequest:
    """Has the policy sum up what happened, asked for by `request`; empty for the usual words."""

    request: str = ""


OnFull = ShorterContext | SummaryRequest | Step | None


class RoomMaker(Environment, Protocol):
    """An environment that is asked what to do before the policy's context is full."""

    def on_full(self, full: FullContext) -> OnFull | Awaitable[OnFull]: ...


class SavableEnvironment(Environment, Protocol):
    """An environment whose state can be laid down as bytes, from which another instance that was reset alike goes on:
    see the top of this file.
    """

    def save(self) -> bytes | Awaitable[bytes]: ...

    def restore(self, saved: bytes) -> Awaitable[None] | None: ...


class ForkableEnvironment(Environment, Protocol):
    """An environment of which there can be a second instance that stands where it does: see the top of this file."""

    def fork(self) -> Environment | Awaitable[Environment]: ...


@dataclass(frozen=True)
class AgentResult:
    """An agent's word at its end: the trajectory's `reward`, and why it ended. A `verification` judges what the policy
    said last, on top of the reward. A reward of None is none: without a `verification` or `rewards`, it is missing.

    `rewards` are those of its completions: one for each, in the order of the requests, or by the id that the answer
    had (those that are not named have 0). They are the turns' own, and add up with `reward`. `answer` is what the
    `verification` judges in place of what the policy said last: that may be a call of a tool, and no answer.
    """

    reward: float | None = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop: str = "finished"
    verification: Verification | None = None
    rewards: Sequence[float] | Mapping[str, float] = ()
    answer: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentClient:
    """The policy, as one agent sees it: an address that speaks OpenAI's API, and the key that it wants as bearer token;
    `anthropic_url` is for clients of Anthropic's API, with the same key.

    `posted` resolves to the result that somebody posts to the session, at `<base_url>/../reward`; `offer` lets an agent
    from outside have it, and returns when one has. `seed` is the lease's. `room` gives the tokens that may still come
    behind the newest turn, in what is asked and its answer together: an agent shortens its history, or ends, before a
    request is refused with `context_length_exceeded`. `cut_off` gives the limit by which a request was refused, or
    None; `max_turns` is the number of requests that are answered.
    """

    base_url: str
    key: str = field(repr=False)
    model: str
    seed: int
    posted: Callable[[], Awaitable[AgentResult]]
    offer: Callable[[], Awaitable[None]]
    room: Callable[[], int] = field(default=lambda: 0, repr=False)
    max_turns: int = 1024
    cut_off: Callable[[], CutOff | None] = field(default=lambda: None, repr=False)

    @property
    def anthropic_url(self) -> str:
        """The base address for clients of Anthropic's, which add `/v1/messages` to it."""
        return self.base_url.removesuffix("/v1")


class Agent(Protocol):
    """Talks to the policy by itself, in as many calls as it wants; one instance is one trajectory.

    It runs in the event loop of users' coroutines. An exception costs its trajectory alone. None returns what was
    posted.
    """

    async def run(self, task: Task, client: AgentClient) -> AgentResult | float | None: ...


@dataclass(frozen=True)
class TurnOf:
    """The player to move, and what it is told now: as an opening before its first turn, as an observation later.

    `state` as in `Opening`. `tools` are those of its first turn.
    """

    player: str
    observation: Prompt
    state: str = ""
    tools: tuple[Tool, ...] = ()

    @property
    def opening(self) -> Opening:
        """The same, as a conversation begins."""
        return Opening(self.observation, tools=self.tools, state=self.state)


@dataclass(frozen=True)
class Round:
    """A game's answer to an action: whose turn is `next`, or that it ends, with `stop` for the reason in a word.

    By player: `rewards` are added to what its last turn earned (a player that had no turn yet has no trajectory);
    `verifications` name who judges its last completion, at the end; `metrics` as in `Step`. `invalid`: the action was
    none that is allowed; it costs the player who acted the rules' penalty.
    """

    next: TurnOf | None = None
    stop: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)
    verifications: Mapping[str, Verification] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    invalid: bool = False

    def __post_init__(self) -> None:
        assert (self.next is not None) != bool(self.stop), "a game goes on or ends, not both or neither"
        assert not self.verifications or self.stop, "completions are judged at the end"


class SeveralPlayers(Protocol):
    """A game: see the top of this file. `close()` and the constructor are as in `Environment`."""

    @property
    def players(self) -> tuple[str, ...]: ...

    def reset(self, task: Task, seed: int) -> TurnOf | Awaitable[TurnOf]: ...

    def step(self, action: Action) -> Round | Awaitable[Round]: ...


@dataclass(frozen=True)
class OfferedEnvironment:
    """A name that leases may use, with its tasks and the way to start a conversation, or, with `agent`, an agent.

    `roles` are those of the messages that it sends after the opening; none, if it has one turn or plain text. With
    `players`, what `start` makes is a `SeveralPlayers`. With `parts` it consists of others, its `members`, and these
    tell which of them has a task, and as which of its own; training tasks are in `levels` of equal size, the easiest
    first. What `start` makes is called `at_once`, on the event loop, if its code is known to take microseconds; else in
    a thread. `tasks_at_once` says the same of the source of its tasks. `makes_room`: it has `on_full`. `saves`: it has
    `save` and `restore`, and neither branches nor makes room, since it would be asked before it is restored. Coroutines
    of an environment or agent with `own_loop`, which may block, run in the users' event loop, those of others in the
    process's. `template_arguments` are what the chat template is told in its conversations, over what it is told in
    the run's.
    """

    name: str
    tasks: TaskSource
    start: Callable[[], Environment]
    rules: Rules = field(default_factory=lambda: Rules(max_turns=1))
    roles: tuple[Role, ...] = ()
    metrics: Mapping[str, Aggregation] = field(default_factory=dict)
    agent: Callable[[], Agent] | None = None
    players: tuple[str, ...] = ()
    levels: int = 1
    members: tuple["OfferedEnvironment", ...] = ()
    at_once: bool = False
    tasks_at_once: bool = False
    own_loop: bool = False
    makes_room: bool = False
    saves: bool = False
    parts: Callable[[Purpose, int], tuple["OfferedEnvironment", int]] | None = None
    template_arguments: Mapping[str, JsonValue] = field(default_factory=dict)

    def at(self, purpose: Purpose, index: int) -> tuple["OfferedEnvironment", int]:
        """The environment that has this task, and the task's index there; itself, unless it consists of others."""
        if self.parts is None:
            return self, index
        part, own = self.parts(purpose, index)
        return part.at(purpose, own)

    @property
    def is_recorded(self) -> bool:
        """True if its conversations can be gone on with by a process that was started again, and have turns enough."""
        return (self.rules.replayable or self.saves) and self.rules.max_turns > 1

    @property
    def no_greedy_answer(self) -> str:
        """The reason why no answer to its tasks is sampled at temperature 0 for comparison; empty if one can be."""
        kinds = {
            "is an agent, which samples by itself": self.agent is not None,
            "is a game of several players, in which an answer depends on those of others": bool(self.players),
            "branches (branch_after), and its conversations share what they begin with": bool(self.rules.branch_after),
        }
        own = next((f"environment {self.name} {text}" for text, so in kinds.items() if so), "")
        return own or next((why for each in self.members if (why := each.no_greedy_answer)), "")

    @property
    def has_teacher_hint(self) -> bool:
        """True if all of its training tasks have a prompt for a teacher that is shown more than the policy."""
        return all(each.has_teacher_hint for each in self.members) if self.members else bool(self.rules.teacher_hint)

    def level_of(self, index: int) -> int:
        """The level of a training task, 0 the easiest."""
        return index // (self.tasks.train_tasks // self.levels)

    def task_count(self, purpose: Purpose) -> int:
        """Number of different tasks; valid indices are below it."""
        return self.tasks.train_tasks if purpose == "train" else self.tasks.evaluation_tasks


def text_of(prompt: Prompt) -> str:
    """A prompt as a person reads it, without the markup of a chat template."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message.content for message in prompt)
