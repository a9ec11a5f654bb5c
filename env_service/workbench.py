"""Looking at environments without a learner: list them, show how one opens, play it, try it on a generator, time it.

    env-service list  [--config RUN.toml]
    env-service show  NAME [--task N] [--config RUN.toml] [--OPTION VALUE ...]
    env-service play  NAME [--task N] …
    env-service bench NAME [--action TEXT] …
    env-service try   NAME --generator URL [--task N] [--config RUN.toml] …
    env-service try   NAME --solutions [--config RUN.toml] …

NAME is that of an environment in the file, of a built-in one, or an import path, package.module:Class. Of tasks that
have published solutions, `try` runs the solution first; `--solutions` runs those of all tasks and nothing else, says
which tasks do not do, and has them left out from then on.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from inspect import getdoc, isawaitable
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from env_service.agents.attempts import attempts_in
from env_service.agents.routes import sessions_alone
from env_service.app import environments_of, generation_of, hosting_of, opponents_of, reward_client, tokenization_of
from env_service.config import EnvServiceConfig
from env_service.environments import catalog
from env_service.environments.imported import EnvironmentFault, class_at
from env_service.environments.interface import (
    Action,
    ChatMessage,
    OfferedEnvironment,
    Opening,
    Prompt,
    Round,
    Step,
    Task,
    TurnOf,
    text_of,
)
from env_service.environments.task_configs import BUILT_IN, ClassTasks
from env_service.environments.tokenization import Tokenization
from env_service.environments.tool_formats import ParsedTurn, read
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.conversation import checked
from env_service.rollouts.fleet import GeneratorFleet
from env_service.rollouts.judging import GroupScoring
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.rollout import Rollout
from env_service.rollouts.speech import value_in
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from env_service.task_sets.trying import TaskSet
from protocol.codec import describe
from protocol.generation import Sampling
from protocol.messages import FinishedLease, Lease, ServingGenerator
from protocol.trajectories import Trajectory, TrajectoryGroup
from services.config.models import load_config_and_code
from services.config.run_paths import import_code_from
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.tls import client_tls
from services.process import WrongSettings

_BENCH_S = 2.0
_TOKENS_WITHOUT_A_RULE = 256


def main(words: Sequence[str], *, out: TextIO = sys.stdout, answer: Callable[[str], str] = input) -> int:
    """Run one of the commands; the exit code is 0, or 2 for settings that do not do. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="env-service",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("list", "show", "play", "bench", "try"))
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--action", default="0")
    parser.add_argument("--generator", default="")
    parser.add_argument("--solutions", action="store_true")
    given, rest = parser.parse_known_args(words)
    if not rest:
        import_code_from(Path())
    config = (
        load_config_and_code(EnvServiceConfig, process="env-service", argv=rest, environ=os.environ) if rest else None
    )
    try:
        if given.command == "list":
            _list(config, out)
            return 0
        return asyncio.run(_look(given, config, out, answer))
    except (EnvironmentFault, WrongSettings, ValueError) as error:
        said = describe(error) if isinstance(error, ValidationError) else str(error)
        sys.stderr.write(f"env-service: {said}\n")
        return 2


def _list(config: EnvServiceConfig | None, out: TextIO) -> None:
    for name, path in sorted(BUILT_IN.items()):
        try:
            what = (getdoc(class_at(ClassTasks(source=name, name=name))) or "").partition("\n")[0]
        except EnvironmentFault as fault:
            what = str(fault)
        out.write(f"{name:15} {path}\n{'':15} {what}\n")
    for entry in config.environments if config else ():
        out.write(f"{entry.name:15} source {entry.source}, of this file\n")


async def _look(
    given: argparse.Namespace, config: EnvServiceConfig | None, out: TextIO, answer: Callable[[str], str]
) -> int:
    pool = use_runtimes(RuntimePool(config.runtimes if config else RuntimesConfig()))
    environment = _named(given.name, config)
    try:
        return await _looked(environment, given, config, out, answer)
    finally:
        await pool.close()


async def _looked(
    environment: OfferedEnvironment,
    given: argparse.Namespace,
    config: EnvServiceConfig | None,
    out: TextIO,
    answer: Callable[[str], str],
) -> int:
    match given.command:
        case "show":
            await _show(environment, config, given.task, out)
        case "play":
            await _play(environment, given.task, out, answer)
        case "bench":
            await _bench(environment, given.action, out)
        case "try" if given.solutions:
            return await _try_solutions(environment, out)
        case "try":
            if config is None or not given.generator:
                raise ValueError("try needs --config RUN.toml and --generator URL; or --solutions")
            return await _try(environment, config, given, out)
    return 0


def _named(name: str, config: EnvServiceConfig | None) -> OfferedEnvironment:
    entries = {entry.name: entry for entry in config.environments} if config else {}
    if config is not None and name in entries:
        return catalog.build(config.environments)[name]
    entry = ClassTasks(source=name, name=name.replace(":", ".") or "none")
    return catalog.build([entry])[entry.name]


async def _opened(environment: OfferedEnvironment, index: int) -> tuple[object, Opening]:
    environment, index = environment.at("train", index)
    if environment.agent is not None:
        raise ValueError(f"{environment.name} is an agent, which opens by itself: look at it by `try`")
    made = environment.tasks.task("train", index)
    task: Task = await made if isawaitable(made) else made
    player = _AllParts(environment.start()) if environment.players else environment.start()
    said = player.reset(task, 0)
    opening: Prompt | Opening = await said if isawaitable(said) else said
    return player, opening if isinstance(opening, Opening) else Opening(opening)


class _AllParts:
    """A game of several players, all of them played by whoever looks at it."""

    def __init__(self, game: object) -> None:
        self._game: Any = game

    async def close(self) -> None:
        await _closed(self._game)

    async def reset(self, task: Task, seed: int) -> Opening:
        said = self._game.reset(task, seed)
        turn: TurnOf = await said if isawaitable(said) else said
        return Opening(_named_turn(turn), tools=turn.tools, state=turn.state)

    async def step(self, action: Action) -> Step:
        said = self._game.step(action)
        given: Round = await said if isawaitable(said) else said
        if given.next is not None:
            return Step(_named_turn(given.next), invalid=given.invalid)
        worth = ", ".join(f"{player} {reward:g}" for player, reward in given.rewards.items())
        return Step(stop=f"{given.stop} ({worth or 'no rewards'})", invalid=given.invalid)


def _named_turn(turn: TurnOf) -> Prompt:
    if isinstance(turn.observation, str):
        return f"[{turn.player}] {turn.observation}"
    return (ChatMessage("user", f"[{turn.player}]"), *turn.observation)


async def _show(environment: OfferedEnvironment, config: EnvServiceConfig | None, index: int, out: TextIO) -> None:
    _, opening = await _opened(environment, index)
    counts = (environment.task_count("train"), environment.task_count("evaluate"))
    out.write(f"{environment.name}: {counts[0]} training and {counts[1]} evaluation tasks\n{environment.rules!r}\n\n")
    if config is None:
        out.write(f"{text_of(opening.prompt)}\n")
        return
    tokenization = tokenization_of(config).with_arguments(environment.template_arguments)
    text, ids = tokenization.encode(opening.prompt, tools=opening.tools)
    out.write(f"{text}\n\n{len(ids)} tokens: {' '.join(map(str, ids))}\n")


async def _play(environment: OfferedEnvironment, index: int, out: TextIO, answer: Callable[[str], str]) -> None:
    player, opening = await _opened(environment, index)
    out.write(f"{text_of(opening.prompt)}\n")
    earned = 0.0
    for turn in range(environment.rules.max_turns):
        try:
            text = await asyncio.to_thread(answer, "> ")
        except EOFError:
            return
        last = turn + 1 == environment.rules.max_turns
        step = await _step(player, _action(text, environment.rules.action, opening, last=last), opening)
        earned += step.reward
        out.write(f"[reward {step.reward + 0.0:g}{', invalid' if step.invalid else ''}] {text_of(step.observation)}\n")
        if step.ends:
            break
    out.write(f"over: {step.stop or 'judged' if step.ends else 'turn_limit'}, reward {earned:g}\n")


def _action(text: str, form: str, opening: Opening, *, last: bool = False) -> Action:
    reading = read(text, tools=opening.tools) if form == "tools" else ParsedTurn(text)
    return Action(text, value=value_in(text, form), calls=reading.calls, fault=reading.fault, last=last)


async def _step(player: object, action: Action, opening: Opening) -> Step:
    said = player.step(action)  # type: ignore[attr-defined]
    return checked(await said if isawaitable(said) else said, plain=isinstance(opening.prompt, str))


async def _closed(player: object) -> None:
    close = getattr(player, "close", None)
    said = close() if callable(close) else None
    if isawaitable(said):
        await said


async def _bench(environment: OfferedEnvironment, text: str, out: TextIO) -> None:
    """Measures the turns a second of the environment by itself, always answered with the same text."""
    turns, conversations, started = 0, 0, time.perf_counter()
    while time.perf_counter() - started < _BENCH_S:
        player, opening = await _opened(environment, conversations % environment.task_count("train"))
        conversations += 1
        for _ in range(environment.rules.max_turns):
            turns += 1
            if (await _step(player, _action(text, environment.rules.action, opening), opening)).ends:
                break
        await _closed(player)
    seconds = time.perf_counter() - started
    out.write(f"{environment.name}: {turns / seconds:.0f} turns/s, {conversations / seconds:.0f} conversations/s\n")


async def _try_solutions(environment: OfferedEnvironment, out: TextIO) -> int:
    """The exit code is 1 if a task does not do."""
    tasks, fault_of = environment.tasks, getattr(environment.start(), "solution_fault", None)
    if not isinstance(tasks, TaskSet) or fault_of is None:
        raise ValueError(f"the tasks of {environment.name} have no solutions that could be tried")
    ended = await tasks.try_all(fault_of)
    for each, fault in ended:
        if fault:
            out.write(f"{each.where}: {fault}\n")
    out.writelines(f"{refused}\n" for refused in tasks.refused)
    good, count = sum(not fault for _, fault in ended), len(ended) + len(tasks.refused)
    out.write(f"{good} of {count} tasks are solved by their solution, and not without")
    out.write("\n" if good == count else f"; the other {count - good} are left out\n")
    return 0 if good == count else 1


async def _is_solved_by_its_solution(environment: OfferedEnvironment, index: int, out: TextIO) -> bool:
    """True also of a task that has none."""
    fault_of = getattr(environment.start(), "solution_fault", None) if environment.agent is None else None
    if fault_of is None:
        return True
    made = environment.tasks.task("train", index)
    fault = await fault_of(await made if isawaitable(made) else made)
    out.write(f"{fault}\n" if fault else "solved by its solution, and not without\n")
    return not fault


async def _try(
    environment: OfferedEnvironment, config: EnvServiceConfig, given: argparse.Namespace, out: TextIO
) -> int:
    environment, index = environment.at("train", given.task)
    if not await _is_solved_by_its_solution(environment, index, out):
        return 1
    tokenization, metrics = tokenization_of(config), Metrics("env-service")
    counted, fleet = RolloutMetrics(metrics), GeneratorFleet()
    fleet.replace([ServingGenerator(generator_id="generator", url=given.generator, policy_version="0.0")])
    environments_of(config, tokenization, hosting_of(config))
    async with AsyncExitStack() as stack:
        tls = client_tls(config.http.tls)
        http = await stack.enter_async_context(HttpClient(token=config.generator_token, tls=tls))
        rewards = await stack.enter_async_context(reward_client(config, metrics=metrics))
        rollout = Rollout(
            env_id="try",
            environments={environment.name: environment},
            tokenization=tokenization,
            generation=generation_of(config, http=http, fleet=fleet, metrics=counted),
            scoring=GroupScoring(rewards),
            timeout_s=config.retry.rollout_timeout_s,
            metrics=counted,
            opponents=await opponents_of(config, stack, tokenization=tokenization, metrics=counted),
            agents=attempts_in(await stack.enter_async_context(sessions_alone())),
        )
        outcome = await rollout.run(_lease(environment, index), RolloutProgress())
    if not isinstance(outcome, FinishedLease):
        raise ValueError(outcome.reason)
    _tell(outcome.group, tokenization, out)
    return 0


def _lease(environment: OfferedEnvironment, task: int) -> Lease:
    sampling = Sampling(max_tokens=environment.rules.turn_tokens or _TOKENS_WITHOUT_A_RULE)
    return Lease(
        incarnation=1,
        lease_id=0,
        attempt=0,
        purpose="train",
        environment=environment.name,
        task_index=task,
        seed=0,
        group_size=1,
        sampling=sampling,
        timeout_s=3600.0,
    )


def _tell(group: TrajectoryGroup, tokenization: Tokenization, out: TextIO) -> None:
    """Turn by turn: what was given, between bars token by token, and what was sampled and is trained on."""
    for trajectory in group.trajectories:
        for number, turn in enumerate(trajectory.turns, start=1):
            out.write(f"— turn {number}, given {turn.completion_start - turn.start} tokens, not trained\n")
            out.write(f"{_tokens(trajectory, tokenization, turn.start, turn.completion_start)}\n")
            out.write(f"— sampled {turn.end - turn.completion_start} tokens, trained, {turn.finish_reason}")
            out.write(f", reward {turn.reward:g}\n" if turn.reward is not None else "\n")
            out.write(f"{_tokens(trajectory, tokenization, turn.completion_start, turn.end)}\n")
        said = trajectory.reward
        out.write(f"player {trajectory.player}: " if trajectory.player else "")
        worth = f"reward {said.reward:g}" if said.reward is not None else f"no reward: {said.error}"
        out.write(f"{worth}, {trajectory.stop_reason or 'judged'}, {dict(said.components)}\n")


def _tokens(trajectory: Trajectory, tokenization: Tokenization, start: int, end: int) -> str:
    rows = [[int(token)] for token in trajectory.token_ids[start:end]]
    return "▏".join(tokenization.decode(rows, special=True)).replace("\n", "⏎")
