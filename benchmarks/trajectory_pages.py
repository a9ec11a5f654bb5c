"""How fast 100,000 kept trajectories are written and read: python -m benchmarks.trajectory_pages [--trajectories N].

Prints a table of milliseconds, the median and the largest of several repetitions, with the files in the page cache.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from learner.page.reading import Filter, Key, group, overview, page, parts_of
from learner.page.store import Place, TakenStep, TrajectoryStore
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

GROUP, GROUPS, TOKENS, PROMPT = 8, 8, 300, 60
REPEATS = 15


def _trajectory(drawn: np.random.Generator, prompt: np.ndarray, step: int) -> Trajectory:
    ids = np.concatenate([prompt, drawn.integers(0, 50_000, TOKENS - PROMPT)]).astype(np.int32)
    mask = (np.arange(TOKENS) >= PROMPT).astype(np.uint8)
    words = " ".join(f"w{number}" for number in ids[PROMPT : PROMPT + 60])
    return Trajectory(
        token_ids=ids,
        loss_mask=mask,
        behavior_logprobs=(-drawn.random(TOKENS) * mask).astype(np.float32),
        version_spans=(VersionSpan(version=f"1.{max(0, step - 1)}", start=PROMPT, end=TOKENS),),
        turns=(Turn(start=0, completion_start=PROMPT, end=TOKENS, finish_reason="stop", generator_ids=("g",)),),
        reward=RewardRecord(reward=float(drawn.random() > 0.5), verifier="v"),
        completion_text=words,
    )


def _step(drawn: np.random.Generator, step: int) -> TakenStep:
    groups = []
    for number in range(GROUPS):
        prompt = drawn.integers(0, 50_000, PROMPT)
        made = tuple(_trajectory(drawn, prompt, step) for _ in range(GROUP))
        groups.append(
            TrajectoryGroup(
                incarnation=1,
                lease_id=step * GROUPS + number,
                attempt=0,
                purpose="train",
                environment=f"environment-{number % 4}",
                task_index=int(drawn.integers(1000)),
                trajectories=made,
            )
        )
    places = [Place(g, t, 0, TOKENS) for g in range(GROUPS) for t in range(GROUP)]
    values = {
        name: drawn.random(TOKENS * len(places), dtype=np.float32)
        for name in ("learner_logprobs", "entropies", "advantages")
    }
    return TakenStep(step=step, groups=groups, places=places, values=values)


def _write(folder: Path, trajectories: int) -> float:
    """Milliseconds of its thread's CPU that a step of 64 trajectories takes."""
    drawn = np.random.default_rng(0)
    steps = trajectories // (GROUP * GROUPS)
    with TrajectoryStore(folder, budget_bytes=1 << 40, share=1.0) as store:
        for step in range(1, steps + 1):
            store.put(_step(drawn, step))
            store.wait_idle()
    return 1000 * store.spent_s / steps


def _measured(work: Callable[[], object]) -> tuple[float, float]:
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken), max(taken)


def main() -> None:
    """Writes a store into a temporary folder, reads it in several ways, and removes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=100_000)
    count = parser.parse_args().trajectories
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spent = _write(folder, count)
        size = sum(path.stat().st_size for path in (folder / "trajectories").iterdir()) / 2**20
        parts = parts_of(folder)
        print(
            f"{count} trajectories of {TOKENS} tokens: {size:.0f} MiB in {len(parts)} parts, {spent:.2f} ms CPU a step"
        )
        middle = Key(int(parts[len(parts) // 2].stem.removeprefix("part-")), 100)
        reads: dict[str, Callable[[], object]] = {
            "newest 50": lambda: page(folder, Filter()),
            "50 in the middle": lambda: page(folder, Filter(), start=middle),
            "environment, reward and length": lambda: page(
                folder, Filter(environment="environment-1", min_reward=0.5, max_length=290)
            ),
            "a word that is rare": lambda: page(folder, Filter(words="w17")),
            "a word that is nowhere": lambda: page(folder, Filter(words="nowhere")),
            "the beginning of a word": lambda: page(folder, Filter(words="w49*")),
            "one task": lambda: page(folder, Filter(task=17)),
            "nothing fits": lambda: page(folder, Filter(min_reward=2.0)),
            "a group's tokens": lambda: group(folder, middle, decode=None),
            "what there is": lambda: overview(folder),
        }
        print("| read | median, ms | largest, ms |\n|---|---|---|")
        for label, work in reads.items():
            median, most = _measured(work)
            print(f"| {label} | {median:.1f} | {most:.1f} |")


if __name__ == "__main__":
    main()
