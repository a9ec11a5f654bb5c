"""Cost of a trajectory for the learner before it is trained: CPU by stage, at four lengths.

    python -m benchmarks.intake [--against OTHER] [--rounds 3]

Two processes on this machine, as in a run: a learner with its real event loop, socket, intake, ledger, journal (on
disk) and batches, and a scripted env_service that finishes every lease at once with a group of eight trajectories. All
of the learner's CPU is counted, its I/O threads and the kernel's work for it included; importing and the first groups
are not.
OTHER is a folder with another commit: both are measured in turn. Stages come from a run of their own, in which clocks
are read around them. "wire" is what is left: ZeroMQ, asyncio, and the kernel's copies.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/intake.md"
LENGTHS = (12, 512, 2048, 8192)
GROUP_SIZE = 8
GROUPS_PER_STEP = 32
CAPACITY = 64
TEXT_CHARS_PER_TOKEN = 4
GROUPS = {12: 960, 512: 960, 2048: 640, 8192: 256}
WARM_UP = 96
STAGES = ("wire", "decode", "checks", "journal", "ledger", "answers", "batch")
INSTANCE = "0123456789abcdef"


# The learner's process


class StageTimes:
    """CPU seconds of the calling thread by stage, each without what others inside of it count."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def _counted(self) -> float:
        return sum(self.spent.values())

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Counts the calls of a function or of a coroutine function."""
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began, before = time.thread_time(), self._counted()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent[stage] += time.thread_time() - began - (self._counted() - before)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            began, before = time.thread_time(), self._counted()
            try:
                return await original(*args, **kwargs)
            finally:
                self.spent[stage] += time.thread_time() - began - (self._counted() - before)

        setattr(owner, name, call_async if asyncio.iscoroutinefunction(original) else call)


def watch_stages() -> StageTimes:
    """Clocks around the stages, in whatever release this process runs."""
    import learner.leases.conversation as conversation
    import services.zmq.sockets as sockets
    from learner.journal.journal import Journal
    from learner.leases.filters import GroupFilter
    from learner.leases.flow import GroupFlow
    from learner.leases.incarnations import Incarnations
    from learner.ledger import Ledger
    from learner.weights.provenance import Provenance

    stages = StageTimes()
    for owner, name, stage in (
        (sockets, "decode", "decode"),
        (Provenance, "standing", "checks"),
        (conversation, "admissible", "checks"),
        (Journal, "append_group", "journal"),
        (Incarnations, "verdict", "ledger"),
        (Incarnations, "admit", "ledger"),
        (GroupFilter, "reason", "ledger"),
        (GroupFlow, "grant_all", "answers"),
        (sockets.RouterSocket, "send", "answers"),
        (Ledger, "take", "batch"),
        (Journal, "append_batch", "batch"),
    ):
        stages.watch(owner, name, stage)
    return stages


async def serve(folder: Path, *, groups: int, stages: StageTimes | None) -> dict[str, Any]:
    """Takes in `WARM_UP` groups, then measures `groups` of them."""
    from learner.journal.journal import Journal
    from services.zmq.sockets import RouterSocket

    async with RouterSocket.bind("tcp://127.0.0.1:*") as router:
        print(router.address, flush=True)
        with Journal.open(folder / "journal") as journal:
            intake = intake_of(router, journal, folder)
            await intake.fleet_changed()
            loops = [asyncio.create_task(intake.receive()), asyncio.create_task(intake.tick())]
            version = await train(intake, groups=WARM_UP, version=0)
            if stages is not None:
                stages.spent.clear()
            began, wall = time.process_time(), time.perf_counter()
            await train(intake, groups=groups, version=version)
            cpu_s, wall_s = time.process_time() - began, time.perf_counter() - wall
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
    steps = -(-groups // GROUPS_PER_STEP)
    trajectories = steps * GROUPS_PER_STEP * GROUP_SIZE
    spent = {} if stages is None else {name: 1e6 * s / trajectories for name, s in stages.spent.items()}
    return {
        "cpu_us": 1e6 * cpu_s / trajectories,
        "wall_us": 1e6 * wall_s / trajectories,
        "stages": spent,
    }


def as_a_process(work: Coroutine[object, object, dict[str, Any]]) -> dict[str, Any]:
    """Runs `work` with event loop, garbage collection and malloc as in Headway's processes; returns the result."""
    from learner.command import keep_freed_memory
    from services.process import run_process

    import_module("learner.leases.intake")  # before the heap is frozen, as in the process
    keep_freed_memory()
    found: list[dict[str, Any]] = []

    async def main(_: object) -> None:
        found.append(await work)

    run_process("learner", main)
    return found[0]


async def train(intake: Any, *, groups: int, version: int) -> int:
    """Takes batches of so many groups, and trains on nothing. Returns the version after it."""
    for _ in range(-(-groups // GROUPS_PER_STEP)):
        batch = await intake.take()
        version = batch.version + 1
        await intake.trained(version)
    return version


def intake_of(router: Any, journal: Any, folder: Path) -> Any:
    """An intake as a run's, of which nothing is ever too old."""
    from learner.evaluation.config import EvaluationConfig
    from learner.leases.admission import GroupRules
    from learner.leases.dead_letters import DeadLetters
    from learner.leases.evaluation_leases import Evaluator
    from learner.leases.filters import GroupFilter
    from learner.leases.granting import LeaseTerms
    from learner.leases.intake import Intake
    from learner.leases.options import IntakeEvents, IntakeOptions
    from learner.ledger import Ledger, LedgerConfig
    from protocol.generation import Sampling
    from services.http.waiting import Waiting

    waits = Waiting()
    waits.started()
    return Intake(
        socket=router,
        ledger=Ledger(
            LedgerConfig(
                groups_per_step=GROUPS_PER_STEP,
                max_lag=1 << 20,
                on_lag="wait",
                straggler_timeout_s=30.0,
                lease_timeout_s=60.0,
                infrastructure_retries=2,
                data_retries=0,
            )
        ),
        journal=journal,
        fleet=fleet(),
        evaluator=Evaluator(config=EvaluationConfig(), max_tokens=8, timeout_s=60.0, incarnation=1),
        terms=LeaseTerms(
            group_size=GROUP_SIZE, sampling=Sampling(max_tokens=8), seed=0, timeout_s=60.0, total_groups=1 << 30
        ),
        dead_letters=DeadLetters(folder / "dead_letters.jsonl", largest_share=0.25),
        waits=waits,
        events=IntakeEvents(),
        options=IntakeOptions(
            run="measured",
            incarnation=1,
            environment="addition",
            heartbeat_every_s=1.0,
            lease_timeout_s=60.0,
            tokenizer="t",
            chat_template="c",
            rules=GroupRules(vocabulary_size=1 << 17, min_group_size=2, filters=GroupFilter(drop_uniform=True)),
        ),
    )


def fleet() -> Any:
    """A fleet of one generator, which has proven what it serves."""
    from learner.weights.fleet import FleetMembers
    from learner.weights.provenance import LoadedWeights
    from protocol.fleet import Announcement, Fingerprints
    from protocol.model import PROTOCOL_VERSION, PolicyVersion

    fingerprints = Fingerprints(model="m", tokenizer="t", chat_template="c")
    made = FleetMembers(
        fingerprints=fingerprints, incarnation=1, announce_every_s=1.0, silence_s=3600.0, changed=lambda: None
    )
    made.announce(
        Announcement(
            generator_id="g",
            instance=INSTANCE,
            condition="able",
            url="http://127.0.0.1:1",
            protocol_version=PROTOCOL_VERSION,
            fingerprints=fingerprints,
            world_size=1,
            backend="gloo",
            max_model_len=1 << 16,
            serving_version=None,
        ),
        now=0.0,
    )
    version = PolicyVersion(1, 0)
    made.committed("g", version=version, fingerprint="f")
    made.provenance.prove(INSTANCE, LoadedWeights(version, digest="", fingerprint=""))
    return made


# The env_service's process


def group_of(tokens: int) -> Any:
    """Eight trajectories: a quarter of each is the prompt, and what was sampled has a text."""
    import numpy as np

    from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

    prompt = tokens // 4
    mask = (np.arange(tokens) >= prompt).astype(np.uint8)

    def trajectory(number: int) -> Trajectory:
        return Trajectory(
            token_ids=(np.arange(tokens) * 7919 % 100_000).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, np.float32(-0.25), np.float32(0)),
            version_spans=(VersionSpan(version="1.0", start=prompt, end=tokens, instance=INSTANCE),),
            turns=(Turn(start=0, completion_start=prompt, end=tokens, finish_reason="stop", generator_ids=("g-0",)),),
            reward=RewardRecord(
                reward=float(number % 2),
                components={"format": 1.0, "answer": float(number % 2)},
                verifier="math",
                verifier_version="2",
                service_id="rewards-0",
                endpoint="http://127.0.0.1:7320",
                latency_s=0.0123,
            ),
            completion_text="word" * (TEXT_CHARS_PER_TOKEN * (tokens - prompt) // 4),
        )

    return TrajectoryGroup(
        incarnation=1,
        lease_id=0,
        attempt=0,
        purpose="train",
        environment="addition",
        task_index=0,
        prompt_text="what" * (TEXT_CHARS_PER_TOKEN * prompt // 4),
        trajectories=tuple(map(trajectory, range(GROUP_SIZE))),
        rollout_s=1.5,
    )


async def finish_all(address: str, *, tokens: int) -> None:
    """Answers every lease with the same group under the lease's name, until it is ended."""
    from protocol.messages import EnvironmentInfo, FinishedLease, Hello, LeaseGrant
    from services.zmq.sockets import DealerSocket

    template = group_of(tokens)
    async with DealerSocket.connect(address, identity="env/i0") as dealer:
        info = EnvironmentInfo(name="addition", train_tasks=1000, evaluation_tasks=0)
        await dealer.send(
            Hello(
                env_id="env", instance="i0", capacity=CAPACITY, environments=(info,), tokenizer="t", chat_template="c"
            )
        )
        while True:
            message = await dealer.receive()
            for lease in message.leases if isinstance(message, LeaseGrant) else ():
                named = {"lease_id": lease.lease_id, "attempt": lease.attempt, "task_index": lease.task_index}
                await dealer.send(FinishedLease(group=template.model_copy(update=named)), deadline_s=60.0)


# The measurement


def measured(checkout: Path, *, tokens: int, stages: bool) -> dict[str, Any]:
    """Runs both processes once with the code of a checkout; returns the measurements."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(HERE / "benchmarks/intake.py")]
    begun = [*script, "--learner", str(tokens), *(["--stages"] if stages else [])]
    with subprocess.Popen(begun, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        address = learner.stdout.readline().strip()
        env = subprocess.Popen([*script, "--env", str(tokens), "--address", address], cwd=checkout, env=environment)
        try:
            found, _ = learner.communicate(timeout=300)
        finally:
            env.kill()
            env.wait()
            learner.kill()
    result: dict[str, Any] = json.loads(found)
    return result


def commit(checkout: Path) -> str:
    """The short name of its commit."""
    asked = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def bytes_of(tokens: int) -> float:
    """Of a trajectory on the wire and in the journal, as this release encodes it."""
    from protocol.codec import encode
    from protocol.messages import FinishedLease

    return sum(map(len, encode(FinishedLease(group=group_of(tokens))))) / GROUP_SIZE


def rows(found: dict[str, dict[int, list[dict[str, Any]]]]) -> list[str]:
    """A line for each commit and length."""
    lines = [
        "| commit | tokens | bytes | CPU us (smallest, largest) | wall us | trajectories/s a core | MB/s a core |",
        "|---|---|---|---|---|---|---|",
    ]
    sizes = {tokens: bytes_of(tokens) for lengths in found.values() for tokens in lengths}
    for name, lengths in found.items():
        for tokens, runs in lengths.items():
            cpus = [run["cpu_us"] for run in runs]
            cpu, size = statistics.median(cpus), sizes[tokens]
            lines.append(
                f"| `{name}` | {tokens} | {size:,.0f} | {cpu:.1f} ({min(cpus):.1f}, {max(cpus):.1f}) | "
                f"{statistics.median(run['wall_us'] for run in runs):.0f} | {1e6 / cpu:,.0f} | {size / cpu:,.0f} |"
            )
    return lines


def stage_rows(found: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Rows of the table of CPU by stage."""
    lines = ["| commit | tokens | " + " | ".join(STAGES) + " | with clocks |", "|---" * (len(STAGES) + 3) + "|"]
    for name, lengths in found.items():
        for tokens, run in lengths.items():
            spent = {stage: run["stages"].get(stage, 0.0) for stage in STAGES}
            spent["wire"] = run["cpu_us"] - sum(spent.values())
            values = " | ".join(f"{spent[stage]:.1f}" for stage in STAGES)
            lines.append(f"| `{name}` | {tokens} | {values} | {run['cpu_us']:.1f} |")
    return lines


def measure(checkouts: Sequence[Path], *, rounds: int, lengths: Sequence[int]) -> str:
    """The tables, as Markdown."""
    names = {checkout: commit(checkout) for checkout in checkouts}
    found: dict[str, dict[int, list[dict[str, Any]]]] = {name: defaultdict(list) for name in names.values()}
    staged: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in names.values()}
    for tokens in lengths:
        for number in range(rounds):
            for checkout in checkouts if number % 2 else reversed(checkouts):
                run = measured(checkout, tokens=tokens, stages=False)
                found[names[checkout]][tokens].append(run)
                print(names[checkout], tokens, run, flush=True)
        for checkout in checkouts:
            staged[names[checkout]][tokens] = measured(checkout, tokens=tokens, stages=True)
            print(names[checkout], tokens, staged[names[checkout]][tokens], flush=True)
    title = ["# What a trajectory costs the learner before it is trained", "", "`python -m benchmarks.intake`", ""]
    return "\n".join([*title, *rows(found), "", "By stage, us of CPU a trajectory:", "", *stage_rows(staged), ""])


def main() -> None:
    """Measures, or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.intake", description=__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--learner", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--env", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--stages", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.learner is not None:
        stages = watch_stages() if arguments.stages else None
        with tempfile.TemporaryDirectory() as folder:
            groups = GROUPS.get(arguments.learner, 1000)
            print(json.dumps(as_a_process(serve(Path(folder), groups=groups, stages=stages))))
    elif arguments.env is not None:
        asyncio.run(finish_all(arguments.address, tokens=arguments.env))
    else:
        checkouts = [HERE] if arguments.against is None else [HERE, arguments.against.resolve()]
        table = measure(checkouts, rounds=arguments.rounds, lengths=arguments.lengths)
        RESULT.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
