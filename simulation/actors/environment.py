"""Scripted environments, of one turn or of several, and the truth about them: what is said in a conversation and what
its turns earn follow from the task and from the policy's words, so that a trajectory can be held against it.
"""

import asyncio
import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from env_service.environments.interface import Action, OfferedEnvironment, Step, Task, Verification
from env_service.environments.rules import Rules
from protocol.trajectories import Purpose
from simulation.world.clock import active
from simulation.world.cores import Cores

NAME = "scripted"
WORDS = ("<unk>", "<end>", *"abcdefgh", *(f"w{number}" for number in range(6)))
"""Of the tokenizer, by token id."""
_LETTERS = "abcdefgh"
_INVALID = "w0"
"""No action may begin with this word."""
_HASHES = 1 << 32


@dataclass
class EnvironmentScript:
    """Behaviour of the tasks, by their index. `slow_s` is the longest that a step takes."""

    tasks: int = 40
    evaluation_tasks: int = 4
    levels: int = 1
    slow_s: float = 0.2
    hangs: set[int] = field(default_factory=set)
    raises: set[int] = field(default_factory=set)
    redundant: int = 0
    """Conversations of a group that are begun beyond its size."""
    turns: int = 1
    """Most turns of a conversation. With several, tasks want one to one more than that."""
    tokens: int | None = None
    """Most tokens of a conversation."""
    conversation_s: float | None = None
    """Longest time of a conversation."""
    stop: str = ""
    """The word that ends a turn, if there is one."""
    most_invalid: int | None = None
    """Invalid actions of a conversation, after which it is cut off."""
    branch_after: tuple[int, ...] = ()
    """Turns after which conversations of a training group go on in two ways."""
    replayable: bool = False
    """Env_services that were started again go on with its conversations."""
    uniform: float = 0.1
    """Share of the tasks of which all rewards are equal."""
    computed_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a trajectory costs threads of the cores that all processes share, one after the other."""

    @property
    def rules(self) -> Rules:
        """As the product takes them."""
        return Rules(
            max_turns=self.turns,
            redundant=self.redundant,
            trajectory_tokens=self.tokens,
            conversation_timeout_s=self.conversation_s,
            stop=(self.stop,) if self.stop else (),
            max_invalid=self.most_invalid,
            branch_after=self.branch_after,
            replayable=self.replayable,
        )

    def wanted_turns(self, task: int) -> int:
        """After how many turns a conversation of a task is over."""
        return 1 if self.turns == 1 else 1 + _hash(f"turns of {task}") % (self.turns + 1)

    def heard(self, token_ids: Sequence[int]) -> str:
        """The policy's words of a turn, as the environment is told them."""
        text = " ".join(WORDS[token] for token in token_ids)
        return text.partition(self.stop)[0] if self.stop else text

    def earned(self, task: int, turn: int, text: str) -> float:
        """Reward of a turn by itself; of one turn nothing, since a verifier judges it."""
        if self.turns == 1 or is_uniform(task, share=self.uniform):
            return 0.0
        return round(_hash(f"{task} {turn} {text}") / _HASHES, 6)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def is_uniform(task: int, *, share: float) -> bool:
    """True for this share of the tasks, of which all rewards are equal."""
    return _hash(str(task)) < share * _HASHES


def opening_of(task: int) -> str:
    """A few letters that name the task."""
    return " ".join(_LETTERS[(task >> shift) % 8] for shift in (6, 3, 0))


def observation_of(task: int, turn: int, text: str) -> str:
    """Text of the environment after a turn: one to three words."""
    drawn = _hash(f"after turn {turn} of {task}: {text}")
    return " ".join(_LETTERS[(drawn >> shift) % 8] for shift in range(3, 6 + 3 * (drawn % 3), 3))


def is_invalid(text: str) -> bool:
    """True for an action that is not allowed."""
    return text.startswith(_INVALID)


class ScriptedTasks:
    """See TaskSource."""

    def __init__(self, script: EnvironmentScript) -> None:
        self._script = script

    @property
    def train_tasks(self) -> int:
        return self._script.tasks // self._script.levels * self._script.levels

    @property
    def evaluation_tasks(self) -> int:
        return self._script.evaluation_tasks

    def task(self, purpose: Purpose, index: int) -> Task:
        """Its opening, and who judges it."""
        if purpose == "train" and index in self._script.raises:
            raise ValueError(f"task {index} cannot be made")
        verification = Verification("scripted", {"task": index, "purpose": purpose})
        return Task(prompt=opening_of(index), verification=verification)


class ScriptedEnvironment:
    """See Environment."""

    def __init__(self, script: EnvironmentScript) -> None:
        self._script = script
        self._task: Task | None = None
        self._turn = 0

    def reset(self, task: Task, seed: int) -> Any:
        """The task's prompt."""
        self._task = task
        return task.prompt

    async def fork(self) -> "ScriptedEnvironment":
        """Another one that stands where this one does, after a while."""
        forked = copy.copy(self)
        await asyncio.sleep(active().random.random() * self._script.slow_s)
        return forked

    async def step(self, action: Action) -> Step:
        """The end of the conversation, if it comes, or how it goes on."""
        assert self._task is not None
        script, arguments = self._script, self._task.verification.arguments
        task = int(str(arguments["task"]))
        if arguments["purpose"] == "train" and task in script.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(active().random.random() * script.slow_s)
        for thread, seconds in script.computed_s.items():
            await active().part(Cores).compute(thread, seconds)
        turn, self._turn = self._turn, self._turn + 1
        reward = script.earned(task, turn, action.text)
        invalid = script.turns > 1 and is_invalid(action.text)
        if self._turn < script.wanted_turns(task):
            said = observation_of(task, turn, action.text)
            return Step(observation=said, reward=reward, invalid=invalid)
        if script.turns > 1 and task % 3 == 0:
            return Step(stop="done", reward=reward, invalid=invalid)
        return Step(verification=self._task.verification, reward=reward, invalid=invalid)


def environments(script: EnvironmentScript) -> Mapping[str, OfferedEnvironment]:
    """Environments that an env_service offers."""
    offered = OfferedEnvironment(
        name=NAME,
        tasks=ScriptedTasks(script),
        start=lambda: ScriptedEnvironment(script),
        rules=script.rules,
        levels=script.levels,
    )
    return {NAME: offered}
