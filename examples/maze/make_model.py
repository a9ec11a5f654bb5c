"""Makes what a demo of several turns starts from: a tiny untrained Llama, and conversations to warm it up on.

The environment is that of a run's file. A player who knows it plays it, and errs often: so there is something to gain.
The directory gets a model with one token per character, and `sft.jsonl` with the conversations.
"""

import argparse
import asyncio
import json
import tomllib
from collections.abc import Awaitable, Sequence
from inspect import isawaitable
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from env_service.environments.catalog import build
from env_service.environments.interface import Action, ChatMessage, OfferedEnvironment, Opening, Step, Task
from env_service.environments.task_configs import Tasks
from examples.addition.make_model import make_model, make_tokenizer

T = TypeVar("T")

CHARACTERS = "\n !()*+-.:=>?ACFGHT0123456789abcdefghijklmnopqrstuvwxyz"
POSITIONS = 256
# Whoever speaks ends with a token of his own: the policy with its end token, the environment with a cue to answer.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '>' }}{% endfor %}"
)


class Scripted(Protocol):
    """An environment that can play itself."""

    def reset(self, task: Task, seed: int) -> Opening | Awaitable[Opening]: ...

    def step(self, action: Action) -> Step | Awaitable[Step]: ...

    def scripted(self, chance: Random, *, noise: float) -> str: ...


def environment_of(file: Path) -> OfferedEnvironment:
    """The first environment of a run's file."""
    entry = tomllib.loads(file.read_text(encoding="utf-8"))["env-service"]["environments"][0]
    adapter: TypeAdapter[Tasks] = TypeAdapter(Tasks)
    return build([adapter.validate_python(entry)])[entry["name"]]


async def conversation(
    environment: Scripted, task: Task, *, noise: float, chance: Random, turns: int, seed: int = 0
) -> tuple[list[dict[str, str]], float]:
    """The conversation up to the player's last words, and the reward."""
    opening = await _resolved(environment.reset(task, seed))
    messages, reward = _told(opening.prompt), 0.0
    for turn in range(turns):
        text = environment.scripted(chance, noise=noise)
        messages.append({"role": "assistant", "content": text})
        step = await _resolved(environment.step(Action(text, value=text, last=turn == turns - 1)))
        reward += step.reward
        if step.ends:
            break
        if turn < turns - 1:
            messages += _told(step.observation)
    return messages, reward


def _told(said: str | Sequence[ChatMessage]) -> list[dict[str, str]]:
    assert not isinstance(said, str), "the demos speak in messages"
    return [{"role": message.role, "content": message.content} for message in said]


async def _resolved(result: T | Awaitable[T]) -> T:
    return await result if isawaitable(result) else result


async def write_conversations(path: Path, offered: OfferedEnvironment, *, count: int, noise: float) -> float:
    """Writes one line for each of the first training tasks; returns the mean reward."""
    rewards = []
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            environment, task = offered.start(), await _resolved(offered.tasks.task("train", index))
            messages, reward = await conversation(
                environment,  # type: ignore[arg-type]  # the built-in ones that the demos use can play themselves
                task,
                noise=noise,
                chance=Random(index),
                turns=offered.rules.max_turns,
            )
            file.write(json.dumps({"messages": messages}) + "\n")
            rewards.append(reward)
    return sum(rewards) / count


def tokenizer_of_characters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, and a template that puts nothing but ends between what is said."""
    tokenizer = make_tokenizer(CHARACTERS, positions=POSITIONS)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _write_model(directory: Path, *, seed: int) -> None:
    tokenizer = tokenizer_of_characters()
    model = make_model(tokenizer, seed=seed)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{directory}: an untrained model of {parameters:,} parameters")


def main() -> None:
    """The command: `python -m examples.maze.make_model RUN_FILE DIRECTORY [--noise P]`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="file of the run, such as examples/maze/run.toml")
    parser.add_argument("directory", type=Path, help="where the model goes, such as models/maze-init")
    parser.add_argument("--noise", type=float, default=0.6, help="how often the player errs; default: %(default)s")
    parser.add_argument("--count", type=int, default=4000, help="number of conversations; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random parameters; default: %(default)s")
    parser.add_argument("--conversations-only", action="store_true", help="make no model: there is one already")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    offered = environment_of(arguments.run)
    if not arguments.conversations_only:
        _write_model(directory, seed=arguments.seed)
    path = directory / "sft.jsonl"
    reward = asyncio.run(write_conversations(path, offered, count=arguments.count, noise=arguments.noise))
    print(f"{path}: {arguments.count:,} conversations")
    print(f"the player errs in {arguments.noise:.0%} of its turns; its mean reward is {reward:.3f}")


if __name__ == "__main__":
    main()
