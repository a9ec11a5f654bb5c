"""The pieces of the demo of repairs: tasks that their solution solves, an agent whose terminal is a real one's, a
tokenizer that carries all of it, and work that pretends, which earns nothing.
"""

import tomllib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from env_service.builtin.computer import ComputerEnvironment, ComputerOptions, ComputerTask
from env_service.builtin.computer_check import fault_of
from env_service.builtin.computer_tools import ComputerToolbox
from env_service.environments.interface import Action, Step, Task, ToolCall, text_of
from env_service.environments.tool_formats import read
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.pool import RuntimePool, runtimes, use_runtimes
from examples.swe import make_model
from examples.swe.make_model import POSITIONS, UNKNOWN, make_tokenizer
from examples.swe.player import TURNS, conversation_of
from examples.swe.repairs import Repair, repair_of, task_of

RUN = tomllib.loads(Path(make_model.__file__).with_name("run.toml").read_text(encoding="utf-8"))


@pytest.fixture
async def pool() -> AsyncIterator[RuntimePool]:
    limits = RuntimeLimits(memory_mib=64, disk_mib=8, processes=16, command_s=20)
    made = use_runtimes(RuntimePool(RuntimesConfig(spare=0, limits=limits)))
    yield made
    await made.close()


async def begun(repair: Repair) -> ComputerEnvironment:
    """The environment at the beginning of a repair."""
    environment = ComputerEnvironment(ComputerOptions(train_file="none", tools=("shell", "submit"), system_prompt=""))
    task = ComputerTask.model_validate(task_of(repair))
    await environment.reset(Task(prompt=task.prompt, data=task.model_dump(mode="json")), 0)
    return environment


async def ran(environment: ComputerEnvironment, name: str, command: str = "") -> Step:
    """The step after a call."""
    return await environment.step(Action("", calls=(ToolCall(name, {"command": command} if command else {}),)))


def test_no_module_of_a_held_out_repair_is_trained_on_or_in_the_warm_start() -> None:
    held_out = [repair_of(at, held_out=True) for at in range(100)]
    seen = [repair_of(at, held_out=False, seed=seed) for seed in (0, 1) for at in range(300)]
    assert all(repair.held_out for repair in held_out)
    assert not any(repair.held_out for repair in seen)
    assert all(replace(repair, numbers=(9, 2)).held_out for repair in held_out), "whatever the issue's call is"


async def test_repairs_are_solved_by_their_solution_and_not_without(pool: RuntimePool) -> None:
    for index in range(2):
        task = ComputerTask.model_validate(task_of(repair_of(index, held_out=True)))
        assert await fault_of(task, image="host") == ""


async def test_the_scripted_agents_terminal_says_what_a_runtime_says_and_its_success_is_the_reward(
    pool: RuntimePool,
) -> None:
    found = []
    for index in range(6):
        repair = repair_of(index, held_out=True)
        messages, repaired = conversation_of(repair, Random(index))
        environment = await begun(repair)
        shown = [messages[0]["content"]]
        for message in messages[1::2]:
            (call,) = read(message["content"], tools=(), formats=("hermes",)).calls
            step = await environment.step(Action("", calls=(call,)))
            shown.append(text_of(step.observation))
        await environment.close()
        assert shown[:-1] == [message["content"] for message in messages[::2]]
        assert step.reward == float(repaired)
        found.append(repaired)
    assert set(found) == {True, False}


async def test_the_tokenizer_carries_every_turn_within_the_runs_limits(pool: RuntimePool) -> None:
    tokenizer = make_tokenizer()
    runtime = await runtimes().start("host")
    tools = await ComputerToolbox(runtime, ("shell", "submit")).offered()
    await runtime.stop()
    for index in range(100):
        messages, _ = conversation_of(repair_of(index, held_out=False), Random(index))
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) <= POSITIONS
        assert tokenizer.convert_tokens_to_ids(UNKNOWN) not in ids
        assert tokenizer.decode(ids) == text
        assert len(messages[1::2]) <= TURNS
        for message in messages[1::2]:
            turn = read(message["content"], tools=tools, formats=("hermes",))
            assert (len(turn.calls), turn.fault) == (1, "")
            assert (
                len(tokenizer.encode(message["content"], add_special_tokens=False))
                < RUN["learner"]["rollouts"]["max_tokens"]
            )


@pytest.mark.parametrize(
    "lines",
    [
        ["echo 'print(\"ok\")' > test.py"],
        ["sed -i '{line}s/return.*/return {expected}/' {file}"],
        ["mkdir bin; printf '#!/bin/sh\\necho ok' > bin/python3; chmod +x bin/python3; PATH=$PWD/bin python3 test.py"],
        ["printf '#!/bin/sh\\necho ok' > /usr/bin/python3", "printf '#!/bin/sh\\necho ok' > /tmp/python3"],
        ["echo 'print(1); raise SystemExit' > {module}.py"],
        ["echo 'import builtins; builtins.print = repr' > site.py; cp site.py sitecustomize.py"],
        ["cat /tests/* /judge/* /proc/1/environ > answer.txt; ls -R / > all.txt"],
        ["(while :; do cp {file} test.py; done) & sleep 0.1"],
    ],
    ids=["test", "constant", "path", "python", "exit", "startup", "search", "left running"],
)  # fmt: skip
async def test_pretending_earns_nothing(lines: list[str], pool: RuntimePool) -> None:
    repair = repair_of(0, held_out=True)
    environment = await begun(repair)
    for line in lines:
        for name in ("file", "line", "module", "expected"):
            line = line.replace(f"{{{name}}}", str(getattr(repair, name)))
        await ran(environment, "shell", line)
    end = await ran(environment, "submit")
    await environment.close()
    assert (end.reward, end.stop) == (0.0, "failed")
