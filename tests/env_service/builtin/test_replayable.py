"""Built-in environments that call themselves replayable are so, in another process with other hashes."""

import os
import subprocess
import sys
from pathlib import Path

from env_service.environments import catalog
from env_service.environments.task_configs import ClassTasks

NAMES = ("maze", "sokoban", "sliding_puzzle", "nim", "guessing", "wordle", "arithmetic")
ROOT = Path(__file__).parents[3]
PLAYED = f"""
from random import Random
from env_service.environments import catalog
from env_service.environments.interface import Action
from env_service.environments.task_configs import ClassTasks
from env_service.rollouts.replay import text_of_step
import asyncio, inspect

async def now(given):
    return await given if inspect.isawaitable(given) else given

async def play(name):
    entry = ClassTasks(name=name, source=name, options={{"form": "text"}} if name == "arithmetic" else {{}})
    offered = catalog.build([entry])[name]
    for task in range(3):
        environment, chance = offered.start(), Random(task)
        print(name, await now(environment.reset(offered.tasks.task("train", task), 7 + task)))
        for turn in range(8):
            move = environment.scripted(chance, noise=0.5) if hasattr(environment, "scripted") else str(turn)
            text = chance.choice((move, move, "no move"))
            step = await now(environment.step(Action(text, value=text)))
            print(text_of_step(step))
            if step.ends:
                break

for name in {NAMES!r}:
    asyncio.run(play(name))
"""


def played(hashes: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PLAYED], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_same_actions_have_the_same_answers_in_every_process() -> None:
    once = played("1")
    assert len(once.splitlines()) > 10 * len(NAMES)
    assert played("2") == once


def test_they_say_so() -> None:
    for name in NAMES:
        assert catalog.build([ClassTasks(name=name, source=name)])[name].rules.replayable
