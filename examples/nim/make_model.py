"""Makes what the demo of self-play starts from: a tiny untrained Llama, and games of two players who know the rules
and nothing else.

Every move of theirs is one of the legal ones, at random; each side's conversation is an example, won or lost.
"""

import argparse
import json
from pathlib import Path
from random import Random

from env_service.builtin.duels import NimDuel
from env_service.environments.catalog import build
from env_service.environments.interface import Action, Round, Task, TurnOf
from env_service.environments.task_configs import ClassTasks
from examples.addition.make_model import make_model
from examples.maze.make_model import tokenizer_of_characters

MOVES = tuple(f"{heap}{number}" for heap in "abcd" for number in range(1, 10))

Messages = list[dict[str, str]]


def legal_moves(game: NimDuel, shown: str) -> list[str]:
    """Of the heaps as both players see them, a digit for each."""
    state = tuple(map(int, shown))
    return [move for move in MOVES if game.played(state, move, 0) is not None]


def conversations(game: NimDuel, task: Task, chance: Random) -> list[Messages]:
    """Both sides of one game."""
    sides: dict[str, Messages] = {}
    turn: TurnOf | None = game.reset(task, 0)
    while turn is not None:
        side = sides.setdefault(turn.player, [])
        side += [{"role": message.role, "content": message.content} for message in turn.opening.prompt]  # type: ignore[union-attr]
        move = chance.choice(legal_moves(game, turn.state))
        side.append({"role": "assistant", "content": move})
        given: Round = game.step(Action(move, value=move))
        turn = given.next
    return list(sides.values())


def write_conversations(path: Path, *, count: int) -> int:
    """The sides of the first training tasks' games, a line each; returns how many."""
    entry = ClassTasks(source="nim_duel", name="nim", options={"system_prompt": ""})
    offered, sides = build([entry])["nim"], 0
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            task, game = offered.tasks.task("train", index), offered.start()
            assert isinstance(task, Task)
            assert isinstance(game, NimDuel)
            for messages in conversations(game, task, Random(index)):
                file.write(json.dumps({"messages": messages}) + "\n")
                sides += 1
    return sides


def main() -> None:
    """The command: `python -m examples.nim.make_model DIRECTORY`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model goes, such as models/nim-init")
    parser.add_argument("--games", type=int, default=4000, help="number of games; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random parameters; default: %(default)s")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of_characters()
    model = make_model(tokenizer, seed=arguments.seed)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    sides = write_conversations(directory / "sft.jsonl", count=arguments.games)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{directory}: an untrained model of {parameters:,} parameters, and the {sides:,} sides of games")


if __name__ == "__main__":
    main()
