"""Judging work in a fresh computer: files carried over, tests laid over them, and the reward as they say.

Nothing of the agent's own computer is used but those files. The tests were never in its reach, and what is in the fresh
one besides is as before the agent came.
"""

import json
import math
import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from env_service.environments.task_files import OBJECT
from env_service.runtimes.interface import (
    CommandEnd,
    Runtime,
    RuntimeCommand,
    RuntimeEnded,
    RuntimeFile,
    RuntimeRefused,
    RuntimeSnapshot,
)
from env_service.runtimes.pool import runtimes
from env_service.task_sets import inside
from env_service.task_sets.carrying import CarriedWork, bytecode_names, carried_work
from env_service.task_sets.controls import ControlledFile, with_controls
from env_service.task_sets.records import JudgedTask, NamedTests, ScriptTests

LOGS = "/logs/verifier"
_JUDGE = "/judge/tests.py"
_RESULTS = "/judge/results.json"
_MOST_RESULTS = 16 << 20
_TOLD = 1500
# A command has to fit into a message.
_LONGEST_SCRIPT = 60_000


@dataclass(frozen=True, kw_only=True)
class WorkVerdict:
    """A reward, the share of the tests that passed, and, for people, what the tests said.

    `tampered`: the tests' own outcomes were not to be believed, and the reward is 0. `outcomes` of tests by their ids,
    but for those of controls. `work` is what was judged.
    """

    reward: float
    passed: float
    said: str = ""
    tampered: bool = False
    outcomes: Mapping[str, str]
    work: CarriedWork


async def judged(
    task: JudgedTask,
    before: RuntimeSnapshot,
    after: RuntimeSnapshot,
    *,
    instead_of: Runtime | None = None,
    chance: random.Random | None = None,
) -> WorkVerdict:
    """The verdict on what an agent changed. `instead_of`: its runtime, whose place the fresh one takes, so that work
    that is done is judged before other work begins. Raises RuntimeLost and RuntimesBusy.
    """
    chance = chance or random.SystemRandom()
    work = carried_work(before, after, folders=task.carried, guarded=task.guarded, allowed=task.allowed)
    fresh = await _fresh(task, work, instead_of)
    try:
        if isinstance(task.tests, NamedTests):
            return await _by_names(fresh, task, task.tests, work, chance)
        reward, told = await _by_script(fresh, task, task.tests)
    except (RuntimeEnded, RuntimeRefused) as error:  # by the code that is judged
        return WorkVerdict(reward=0.0, passed=0.0, said=str(error), outcomes={}, work=work)
    finally:
        await fresh.stop()
    tampered = reward > 0.0 and await _earned_for_nothing(task, task.tests, work, reward, chance)
    earned = 0.0 if tampered else reward
    return WorkVerdict(reward=earned, passed=earned, said=told, tampered=tampered, outcomes={}, work=work)


async def _fresh(task: JudgedTask, work: CarriedWork, instead_of: Runtime | None) -> Runtime:
    image = task.setup.image
    if instead_of is None:
        return await runtimes().start(image, snapshot=work.snapshot)
    return await runtimes().exchange(instead_of, image, snapshot=work.snapshot)


async def lay(runtime: Runtime, files: Mapping[str, RuntimeFile | None]) -> None:
    """Write files by absolute path, in place of whatever is there, and of bytecode of it; None takes one away. Raises
    RuntimeRefused.
    """
    # A link or a folder in the way of a file, or on the way to it, goes first.
    for at in range(0, len(files), 100):
        some = list(files)[at : at + 100]
        paths = [shlex.quote(path) for path in some]
        paths += [f"{shlex.quote(bytecode_names(path))}*.pyc" for path in some if path.endswith(".py")]
        await runtime.exec(RuntimeCommand(argv=("/bin/sh", "-c", f"rm -rf -- {' '.join(paths)}"), cwd="/"))
    await runtime.copy_in({path: file for path, file in files.items() if file is not None})


async def _by_names(
    fresh: Runtime, task: JudgedTask, tests: NamedTests, work: CarriedWork, chance: random.Random
) -> WorkVerdict:
    files, controls = await _controlled(fresh, task, tests, chance)
    await lay(fresh, {**files, _JUDGE: _program()})
    folder = tests.folder or task.setup.cwd
    argv = ("python3", _JUDGE, _RESULTS, task.setup.cwd, folder, *files_of(tests), "--", *tests.arguments)
    end = await fresh.exec(
        RuntimeCommand(
            argv=argv,
            cwd=task.setup.cwd,
            environment={**task.setup.environment, **tests.environment},
            wall_s=tests.wall_s,
        )
    )
    outcomes = await _outcomes(fresh) if end.exit_code == 0 else {}
    passed = [name for name in tests.all if has_passed(name, outcomes)]
    # A file that cannot be loaded has no test of which anything is told.
    told_of = {name.partition("::")[0] for name in outcomes}
    tampered = any(file in told_of and not made.have_failed(file, outcomes) for file, made in controls.items())
    own = {name for name in outcomes if any(made.own(file, name) for file, made in controls.items())}
    share = len(passed) / len(tests.all)
    return WorkVerdict(
        reward=float(len(passed) == len(tests.all) and not tampered),
        passed=0.0 if tampered else share,
        said=said_of(end),
        tampered=tampered,
        outcomes={name: end for name, end in outcomes.items() if name not in own},
        work=work,
    )


def has_passed(name: str, outcomes: Mapping[str, str]) -> bool:
    """True if a test passed, or, without one of that very id, all with other parameters did."""
    ends = (
        [outcomes[name]] if name in outcomes else [end for each, end in outcomes.items() if each.split("[")[0] == name]
    )
    return bool(ends) and all(end == "passed" for end in ends)


def _program() -> RuntimeFile:
    return RuntimeFile(Path(inside.__file__).read_bytes())


def files_of(tests: NamedTests) -> tuple[str, ...]:
    """The files that the tests are in, each once."""
    return tuple(dict.fromkeys(name.partition("::")[0] for name in tests.all))


async def _controlled(
    fresh: Runtime, task: JudgedTask, tests: NamedTests, chance: random.Random
) -> tuple[dict[str, RuntimeFile | None], dict[str, ControlledFile]]:
    """The files that are laid over, with controls; and those with controls by their names."""
    files, controls = dict(tests.files), {}
    named = {name.partition("[")[0] for name in tests.must_change} if tests.altered else set()
    for name in files_of(tests):
        path = str(PurePosixPath(tests.folder or task.setup.cwd) / name)
        file = files.get(path)
        if file is None and path not in files:
            try:
                file = (await fresh.copy_out(path)).get("")
            except RuntimeRefused:
                file = None
        if file is None or not name.endswith(".py"):
            continue
        altered = {each.removeprefix(f"{name}::") for each in named if each.startswith(f"{name}::")}
        made = with_controls(file.content.decode("utf-8", "surrogateescape"), chance, altered=altered)
        files[path] = RuntimeFile(made.text.encode("utf-8", "surrogateescape"), file.mode)
        controls[name] = made
    return files, controls


async def _outcomes(fresh: Runtime) -> Mapping[str, str]:
    try:
        found = (await fresh.copy_out(_RESULTS, most_bytes=_MOST_RESULTS)).get("", RuntimeFile())
        return {name: str(outcome) for name, outcome in OBJECT.validate_json(found.content).items()}
    except (RuntimeRefused, ValidationError):
        return {}


async def _by_script(fresh: Runtime, task: JudgedTask, tests: ScriptTests) -> tuple[float, str]:
    """The reward that the script writes; none if it does not come to its end."""
    await fresh.exec(RuntimeCommand(argv=("/bin/sh", "-c", f"rm -rf {LOGS} /tests; mkdir -p {LOGS} /tests"), cwd="/"))
    await lay(fresh, tests.files)
    end = await run_script(
        fresh,
        tests.script,
        place=tests.place,
        cwd=task.setup.cwd,
        environment={**task.setup.environment, **tests.environment},
        wall_s=tests.wall_s,
        programs=tests.programs,
    )
    if end.timed_out or end.signal is not None:
        return 0.0, said_of(end)
    try:
        written = await fresh.copy_out(LOGS, most_bytes=_MOST_RESULTS)
    except RuntimeRefused:
        written = {}
    return reward_of(written), "\n".join(filter(None, (said_of(end), lack_of_reward(written))))


async def run_script(
    runtime: Runtime,
    text: str,
    *,
    place: str,
    cwd: str,
    environment: Mapping[str, str],
    wall_s: float | None = None,
    programs: str = "",
) -> CommandEnd:
    """Run a script that the shell has read whole before its first line runs: nothing that it starts can change it.
    `programs`: a folder whose programs it finds before all others.
    """
    first = text.partition("\n")[0]
    shell = "sh" if first.startswith("#!") and first.split("/")[-1].split()[:1] in (["sh"], ["dash"]) else "bash"
    for name in ("${BASH_SOURCE[0]}", "${BASH_SOURCE}", "$BASH_SOURCE"):
        text = text.replace(name, place)
    words = (shell, "-c", text, place) if len(text) < _LONGEST_SCRIPT else (shell, place)
    if programs:
        words = ("/bin/sh", "-c", f'PATH="{programs}:$PATH" exec "$@"', "sh", *words)
    return await runtime.exec(RuntimeCommand(argv=words, cwd=cwd, environment=environment, wall_s=wall_s))


def reward_of(written: Mapping[str, RuntimeFile]) -> float:
    """The reward in reward.json, of which `reward` or the only number counts, or in reward.txt; 0 if there is none."""
    try:
        if "reward.json" in written:
            told = json.loads(written["reward.json"].content)
            worth = float(str(_only(told) if isinstance(told, dict) and "reward" not in told else told["reward"]))
        else:
            worth = float(written["reward.txt"].content.decode().strip())
    except (KeyError, ValueError, TypeError, RecursionError):
        return 0.0
    return worth if math.isfinite(worth) else 0.0


def lack_of_reward(written: Mapping[str, RuntimeFile]) -> str:
    """Says what is missing where a script wrote no file of rewards, or several numbers of which none is the reward."""
    if not {"reward.json", "reward.txt"} & written.keys():
        return f"there is no reward.txt or reward.json in {LOGS}: expected one of them from tests/test.sh"
    try:
        told = json.loads(written["reward.json"].content)
    except (KeyError, ValueError, RecursionError):
        return ""
    if not isinstance(told, dict) or "reward" in told or len(told) == 1:
        return ""
    names = ", ".join(map(str, told)) or "nothing"
    return f"reward.json has {names}, none of which is the reward: expected `reward` among them, or one number alone"


def _only(told: Mapping[str, object]) -> object:
    if len(told) != 1:
        raise ValueError("several numbers, none of which is the reward")
    return next(iter(told.values()))


async def _earned_for_nothing(
    task: JudgedTask, tests: ScriptTests, work: CarriedWork, reward: float, chance: random.Random
) -> bool:
    """True if the same work earns as much where tests have been added that have to fail.

    A script that has no tests in Python is believed.
    """
    changed = {}
    for path, file in tests.files.items():
        name = PurePosixPath(path).name
        if file.link or not (name.endswith("_test.py") or (name.startswith("test_") and name.endswith(".py"))):
            continue
        made = with_controls(file.content.decode("utf-8", "surrogateescape"), chance)
        changed[path] = RuntimeFile(made.text.encode("utf-8", "surrogateescape"), file.mode)
    if not changed:
        return False
    fresh = await runtimes().start(task.setup.image, snapshot=work.snapshot)
    try:
        again, _ = await _by_script(fresh, task, replace(tests, files={**tests.files, **changed}))
    except (RuntimeEnded, RuntimeRefused):
        return False
    finally:
        await fresh.stop()
    return again >= reward


def said_of(end: CommandEnd) -> str:
    """The end of what a command printed, and how it ended."""
    told = (end.stdout + end.stderr).decode(errors="replace").strip()[-_TOLD:]
    if end.timed_out:
        return f"{told}\nstopped after {end.wall_s:.0f} s".strip()
    return told if end.signal is None else f"{told}\nkilled by signal {end.signal}".strip()
