"""Games of several players: whose turn it is, what that player is told, and what each of them has earned.

An environment of several players has `players`, the names of the parts, and says whose turn it is:

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

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from env_service.environments.interface import Action, Opening, Prompt, Task, Tool, Verification


@dataclass(frozen=True)
class TurnOf:
    """Whose turn it is, and what this player is told now: as an opening before its first turn, as an observation later.

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
    """One game: see the top of this file. `close()` and the constructor are as in `Environment`."""

    @property
    def players(self) -> tuple[str, ...]: ...

    def reset(self, task: Task, seed: int) -> TurnOf | Awaitable[TurnOf]: ...

    def step(self, action: Action) -> Round | Awaitable[Round]: ...
