"""Judging task sets of others in Harbor's format: how many are read, why others are not, and which are solved by their
own solution and not without it.

    git clone … SET        # or an export of one commit
    python -m benchmarks.others_tasks SET --source owner/name@commit                       # reads all, runs none
    python -m benchmarks.others_tasks SET --source owner/name@commit --image py --try 40   # and runs as many
    python -m benchmarks.others_tasks --write                                              # the table of all so far

Tasks are run one after the other in runtimes of bubblewrap, with `network_steps = "skip"`: the image has to have what
their Dockerfiles install. What was found is kept in `--records`, a line for each task, and not run again. Nothing of a
set is in that file or in the table but its name, names of tasks, and how they ended.
"""

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.result_files import print_and_write
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.pool import RuntimePool, use_runtimes
from env_service.task_sets.harbor import harbor_folders, no_tasks_in, read_harbor_task
from env_service.task_sets.records import JudgedTask, TaskUnfit
from env_service.task_sets.trying import fault_of

_OUTPUT = Path("benchmarks/results/others_tasks.md")
_SOLVED, _NOT_RUN = "solved, and not without", "not run"
# First what a line of the reader says, then what the table says of it.
_REFUSALS = {
    "in several steps": "several steps",
    "environment_mode": "an image of the tests' own",
    "docker-compose.yaml": "services or mounts of its own",
    "wants the variable": "a variable that task.toml asks for, such as a key",
    "wants the network": "a Dockerfile that fetches",
    "GPUs": "GPUs",
    "there is no such file": "a Dockerfile that copies what is not there",
    "COPY --from": "COPY --from",
    "in several stages": "a build in several stages",
    "no tests/test.sh": "no tests/test.sh",
    "instruction.md is empty": "an empty instruction.md",
    "is no instruction": "a Dockerfile that is none",
    "has no environment/Dockerfile": "no Dockerfile",
    "first form": "Terminal-Bench's first form",
}
_FAULTS = {
    r"has no solution": "no solution",
    r"before anything is done": "rewarded before anything is done",
    r"No such file or directory: '/tests/": "a file of its tests that the set lacks",
    r"stopped after|takes too long": "too slow",
    r"resolve|[Nn]ame resolution|[Nn]etwork is unreachable": "fetches while it runs",
    r"(?<!directory )not found|No module named|no such option|unrecognized arguments": "a program that the image lacks",
    r"\(carry\)": "changes outside of its folder",
    r"after its solution": "0 after its solution",
}


@dataclass(frozen=True)
class TaskRecord:
    """The end of a task of a set: `outcome` is a phrase of the table, `said` is for whoever looks at this task."""

    source: str
    task: str
    read: bool
    outcome: str
    said: str = ""


def main(words: Sequence[str]) -> int:
    """Run the command; the exit code is 2 for a folder without tasks."""
    given = _arguments(words)
    if given.folder is not None:
        folders = harbor_folders(given.folder) or _older(given.folder)
        if not folders:
            sys.stderr.write(f"{no_tasks_in(given.folder)}\n")
            return 2
        asyncio.run(_set(given, folders))
    print_and_write(table(list(read_records(given.records))), _OUTPUT if given.write else None)
    return 0


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--source", default="", help="owner/name@commit; the folder's name if not given")
    parser.add_argument("--image", default="host", help="image of every task that is run")
    parser.add_argument("--images", type=Path, default=Path("runtimes"), help="folder of images")
    parser.add_argument("--try", dest="tries", type=int, default=0, metavar="N", help="run so many tasks")
    parser.add_argument("--only", default="", help="run only those that this expression is found in the path of")
    parser.add_argument("--from", dest="base", default="", help="run only those whose FROM has this in it")
    parser.add_argument("--command-s", type=float, default=240.0)
    parser.add_argument("--memory-mib", type=int, default=1536)
    parser.add_argument("--records", type=Path, default=Path("others_tasks.jsonl"))
    parser.add_argument("--write", action="store_true", help=f"write {_OUTPUT}")
    return parser.parse_args(words)


async def _set(given: argparse.Namespace, folders: Sequence[Path]) -> None:
    source = given.source or given.folder.resolve().name
    known = {each.task for each in read_records(given.records) if each.source == source and each.outcome != _NOT_RUN}
    limits = RuntimeLimits(
        memory_mib=given.memory_mib, disk_mib=512, command_s=given.command_s, processes=256, files=200_000
    )
    pool = use_runtimes(RuntimePool(RuntimesConfig(spare=0, folder=given.images, limits=limits)))
    left = given.tries
    try:
        for folder in folders:
            name = str(folder.relative_to(given.folder))
            if name in known:
                continue
            record, task = _read(folder, source, name, given.image)
            if task is not None and task.solution is not None and left > 0 and _is_chosen(folder, given):
                left -= 1
                fault = await _fault(task)
                record = TaskRecord(source, name, read=True, outcome=outcome_of(fault), said=fault)
                print(f"{name}: {record.outcome}", flush=True)
            with given.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
    finally:
        await pool.close()


def _older(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("task.yaml"))


def _is_chosen(folder: Path, given: argparse.Namespace) -> bool:
    if not re.search(given.only, str(folder)):
        return False
    file = folder / "environment/Dockerfile"
    return not given.base or (file.is_file() and re.search(f"(?m)^FROM .*{given.base}", file.read_text()) is not None)


def _read(folder: Path, source: str, name: str, image: str) -> tuple[TaskRecord, JudgedTask | None]:
    try:
        task = read_harbor_task(folder, images={"*": image}, network_steps="skip")
    except TaskUnfit as refusal:
        said = str(refusal)
        reason = next((phrase for told, phrase in _REFUSALS.items() if told in said), "other")
        return TaskRecord(source, name, read=False, outcome=f"refused: {reason}", said=said), None
    return TaskRecord(source, name, read=True, outcome=_NOT_RUN if task.solution else "no solution"), task


async def _fault(task: JudgedTask) -> str:
    try:
        return await fault_of(task)
    except TaskUnfit as fault:
        return str(fault)


def outcome_of(fault: str) -> str:
    """The phrase of the table for what `fault_of` says."""
    if not fault:
        return _SOLVED
    return next((phrase for said, phrase in _FAULTS.items() if re.search(said, fault)), "its computer cannot be made")


def read_records(path: Path) -> Iterator[TaskRecord]:
    """The last record of each task in a file of records."""
    if not path.is_file():
        return
    last: dict[tuple[str, str], TaskRecord] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = TaskRecord(**json.loads(line))
        last[record.source, record.task] = record
    yield from last.values()


def table(records: Sequence[TaskRecord]) -> str:
    """The report: a row for each set, then how the tasks that did not do ended."""
    sets: dict[str, list[TaskRecord]] = {}
    for record in records:
        sets.setdefault(record.source, []).append(record)
    lines = [
        "# Task sets of others",
        "",
        f"By `python -m benchmarks.others_tasks`, {datetime.now(UTC).date()}. Each set is a folder of tasks in "
        "Harbor's format at one commit of its repository, read by the source `harbor` with `network_steps` as `skip`. "
        "Of a task that was run, its own solution ran in a runtime of bubblewrap, and its own tests judged that in a "
        "fresh one; and they judged a computer to which nothing had been done.",
        "",
        "| set | tasks | read | refused | run | solved by its solution, and 0 without |",
        "|---|---|---|---|---|---|",
    ]
    for source, found in sorted(sets.items()):
        ended = Counter(each.outcome for each in found)
        read = sum(each.read for each in found)
        run = read - ended[_NOT_RUN] - ended["no solution"]
        lines.append(f"| {_named(source)} | {len(found)} | {read} | {len(found) - read} | {run} | {ended[_SOLVED]} |")
    lines += ["", "Not read, and run without being solved:", "", "| set | how many | why |", "|---|---|---|"]
    for source, found in sorted(sets.items()):
        ended = Counter(each.outcome for each in found if each.outcome not in (_SOLVED, _NOT_RUN))
        lines += [f"| {_named(source)} | {count} | {reason} |" for reason, count in ended.most_common()]
    return "\n".join([*lines, *_all_of(sets), ""])


def _named(source: str) -> str:
    name, _, commit = source.partition("@")
    return f"`{name}` at {commit[:10]}" if commit else f"`{name}`"


def _all_of(sets: Mapping[str, Sequence[TaskRecord]]) -> list[str]:
    every = [each for found in sets.values() for each in found]
    solved = sum(each.outcome == _SOLVED for each in every)
    read = sum(each.read for each in every)
    told = (
        f"{len(every)} tasks in {len(sets)} sets: {read} read, {solved} solved by their own solution and not without it"
    )
    return ["", f"{told}."]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
