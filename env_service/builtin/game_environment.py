"""Plays a game with the policy: makes the task's start, reads moves, shows states, counts."""

from collections.abc import Mapping
from random import Random
from string import ascii_letters, digits
from typing import Generic

from pydantic import JsonValue

from env_service.builtin.games import Game, GameOptions, StateT, drawn_for, in_rows, noisy_move
from env_service.environments.interface import Action, Aggregation, ChatMessage, Opening, Role, Step, Task

_LETTERS = ascii_letters + digits


class GameEnvironment(Generic[StateT]):
    """One conversation about one game. A won game is a reward of 1; a lost one, or one that is cut off, of 0.

    The start comes from the task alone. What the game leaves to chance later comes from the seed and the number of
    the turn, so that members of a group that did the same see the same.
    """

    roles: tuple[Role, ...] = ("user",)
    metrics: Mapping[str, Aggregation] = {"success": "last", "moves": "sum"}

    def __init__(self, game: Game[StateT], options: GameOptions) -> None:
        self._game = game
        self._options = options
        self._words = _spoken(game, options)
        self._seed = 0
        self._turn = 0
        self._state: StateT

    def reset(self, task: Task, seed: int) -> Opening:
        """Instructions as a system message, and the start. Raises ValueError if a held-out one cannot be found."""
        self._state, self._seed, self._turn = self._start(task), seed, 0
        system = self._instructions()
        opening = (ChatMessage("system", system),) if system else ()
        return Opening((*opening, *self._message(self._shown())), state=self._key())

    def step(self, action: Action) -> Step:
        """An action that is no legal move changes nothing, and is counted as invalid."""
        self._turn += 1
        cost = -self._options.turn_cost
        move = self._read(action)
        if move is None:
            told = [self._options.invalid_text, self._shown() if self._options.whole_state else ""]
            text = "\n".join(filter(None, told)) or "?"
            return Step(self._message(text), reward=cost, state=self._key(), invalid=True, metrics={"success": 0.0})
        before, self._state = self._state, self._game.play(self._state, move, self._chance())
        success = self._game.success(self._state)
        metrics = {"success": success or 0.0, "moves": 1.0}
        if success is not None:
            return Step(stop="won" if success else "lost", reward=success + cost, state=self._key(), metrics=metrics)
        text = self._shown() if self._options.whole_state else self._game.news(before, move, self._state)
        return Step(self._message(text), reward=cost, state=self._key(), metrics=metrics)

    def scripted(self, chance: Random, *, noise: float = 0.0) -> str:
        """What the game's own player says now; with probability `noise` any legal move instead."""
        return self._words[noisy_move(self._game, self._state, chance, noise=noise)]

    def _start(self, task: Task) -> StateT:
        chance = Random(task.seed)
        if self._game.hidden or not self._options.held_out:
            return self._game.start(chance)
        return drawn_for(task.purpose, lambda: self._game.start(chance), shown=self._game.show)

    def _chance(self) -> Random:
        return Random(f"{self._seed}/{self._turn}")

    def _instructions(self) -> str:
        if self._options.system_prompt is not None:
            return self._options.system_prompt
        told = [self._game.instructions, self._options.answer_hint]
        if self._options.moves == "letters":
            letters = ", ".join(f"{letter} for {move}" for move, letter in self._words.items())
            told.insert(1, f"Each move has a letter: {letters}. Say the letter.")
        return " ".join(filter(None, told))

    def _read(self, action: Action) -> str | None:
        """The legal move that an action names, if it names one."""
        said = _named(action).strip().lower() if self._options.moves == "words" else _named(action).strip()
        legal = self._game.moves(self._state)
        return next((move for move in legal if self._words[move] == said), None)

    def _shown(self) -> str:
        shown = self._game.show(self._state)
        return in_rows(shown, self._game.columns) if self._options.layout == "rows" and self._game.columns else shown

    def _key(self) -> str:
        return self._game.show(self._state)

    def _message(self, text: str) -> tuple[ChatMessage, ...]:
        return (ChatMessage("user", text),)


def _named(action: Action) -> str:
    """What an action says: its text, the field `move` of its JSON object, or the argument `move` of its call."""
    value: JsonValue = action.calls[0].arguments.get("move") if action.calls else action.value
    if isinstance(value, dict):
        value = value.get("move")
    return "" if value is None or isinstance(value, dict | list) else str(value)


def _spoken(game: Game[StateT], options: GameOptions) -> dict[str, str]:
    """How each move is said. Raises ValueError where there are more moves than letters."""
    alphabet = game.alphabet
    if options.moves == "words":
        return {move: move for move in alphabet}
    if len(alphabet) > len(_LETTERS):
        raise ValueError(
            f"the game has {len(alphabet)} moves, expected at most {len(_LETTERS)} for moves = 'letters': make the "
            "game smaller, or set moves to 'words'"
        )
    return dict(zip(alphabet, _LETTERS, strict=False))
