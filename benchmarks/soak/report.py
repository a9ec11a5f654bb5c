"""The table and the curve of a soak, from the lines that it has written."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.measurements import MIB, ProcessEnd, Strike, SystemSample, is_resume
from benchmarks.soak.run_files import (
    CHECKPOINT_EVERY,
    GROUP_SIZE,
    GROUPS_PER_STEP,
    MAX_LAG,
    TASKS,
    TRAJECTORIES_MB,
)
from benchmarks.soak.soaking import Note, SoakEnd, SoakPlan, Verdict
from benchmarks.soak.system import NAMES
from benchmarks.soak.verdict import (
    GROWS_MIB,
    LONG_STEPS,
    SLOWS,
    WARM_STEPS,
    DiskGrowth,
    Growth,
    Slope,
    disks_of,
    growth_of,
    is_warm,
    resumes_of,
)

LINEAR = {
    "metrics.jsonl": "a line for each step and publish: it is what the run is read from afterwards",
    "samples.jsonl": "the best and the worst completion of two groups a step, to be read by people",
}
"""Files that grow with the run because that is what they are for."""

FLAT_SHARE = 1.5
"""A rotated file whose peak in the last quarter is more than so many times that of the first has grown."""

RECORDS: dict[str, type] = {
    "plan": SoakPlan,
    "sample": SystemSample,
    "fault": Strike,
    "ended": ProcessEnd,
    "end": SoakEnd,
    "verdict": Verdict,
    "note": Note,
}


@dataclass(frozen=True)
class SoakLines:
    """The lines of a soak's file, by kind."""

    plan: SoakPlan
    samples: list[SystemSample]
    strikes: list[Strike]
    ended: list[ProcessEnd]
    end: SoakEnd
    broken: list[str]
    notes: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> "SoakLines":
        """Raises IndexError for a soak that was not judged."""
        found: dict[str, list[Any]] = {kind: [] for kind in RECORDS}
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["kind"]].append(RECORDS[record["kind"]](**record))
        end, verdict = found["end"][-1], found["verdict"][-1]
        notes = tuple(dict.fromkeys(one.text for one in found["note"]))
        return cls(found["plan"][-1], found["sample"], found["fault"], found["ended"], end, verdict.broken, notes)


def write_report(results: Path, *, name: str) -> list[str]:
    """Writes NAME.md and NAME.png beside NAME.jsonl; everything that grew or broke."""
    lines = SoakLines.read(results / f"{name}.jsonl")
    growths = {name: growth_of(lines.samples, name) for name in NAMES}
    found = findings(lines, growths)
    (results / f"{name}.md").write_text(text_of(lines, growths, found, name=name), encoding="utf-8")
    figure(lines, results / f"{name}.png")
    return found


def findings(lines: SoakLines, growths: dict[str, Growth]) -> list[str]:
    """Everything that grew or broke, in words."""
    found = list(lines.broken)
    found += [f"ended by itself at step {one.step}: {one.text}" for one in lines.ended]
    if not lines.end.well:
        found.append("the learner did not end with code 0")
    for name, growth in growths.items():
        for what, slope in (("within a life", growth.within), ("from life to life", growth.across)):
            if slope.grows:
                found.append(f"memory of {name} grows {what}: {_slope(slope)} MiB per 10,000 steps")
    for kind, disk in disks_of(lines.samples).items():
        if kind not in LINEAR and disk.late > FLAT_SHARE * max(disk.early, MIB):
            found.append(f"disk of {kind} grows: {_mib(disk.early)} MiB at first, {_mib(disk.late)} MiB at last")
    resumes = resumes_of(lines.strikes)
    if resumes.slower:
        found.append(f"resumes take longer: {resumes.first_s:.1f} s at first, {resumes.last_s:.1f} s at last")
    return found


def text_of(lines: SoakLines, growths: dict[str, Growth], found: Sequence[str], *, name: str = "soak") -> str:
    """The whole of NAME.md."""
    return "\n".join(
        [
            "# The soak",
            "",
            *_setting(lines),
            "",
            f"**{'Nothing grew and nothing broke.' if not found else 'Findings:'}**",
            *(f"- {text}" for text in found),
            "",
            *(f"{text}\n" for text in lines.notes),
            *_memory(growths),
            "",
            *_disk(disks_of(lines.samples)),
            "",
            *_faults(lines),
            "",
            f"![memory, disk and resumes by step]({name}.png)",
            "",
        ]
    )


def _setting(lines: SoakLines) -> list[str]:
    end, plan = lines.end, lines.plan
    hours = end.at_s / 3600
    stepping = end.steps / max(end.at_s, 1.0)
    return [
        f"`python -m benchmarks.soak --steps {plan.steps} --faults {plan.steps / plan.faults_every_steps:.0f} "
        f"--seed {plan.seed}`: **{end.steps:,} steps** of "
        f"{plan.steps:,} planned, {len(lines.strikes)} faults (one every {plan.faults_every_steps:g} steps by chance),",
        f"{end.learner_starts} starts of the learner, {hours:.2f} hours, {stepping:.1f} steps/s over all, on two "
        "cores shared with other work. Steps are tiny:",
        f"{GROUPS_PER_STEP} groups of {GROUP_SIZE}, completions of 4 tokens, `max_lag` {MAX_LAG}, a checkpoint every "
        f"{CHECKPOINT_EVERY} steps, epochs of {TASKS:,} tasks, {TRAJECTORIES_MB} MiB of trajectories to be looked at. "
        "The learner (DeepSpeed, one rank),",
        "the env_service, the reward_service and all sockets are real. The generator is real but for its engine: a",
        "Llama of 11 thousand parameters in plain torch takes vLLM's place, so nothing here speaks of vLLM's memory.",
        "Its logprobs prove every publish all the same.",
        "Checked over the whole history, from outside: each task trained once an epoch, no token older than `max_lag`, "
        "no batch missing or twice, replayed steps equal to",
        "the first time, every publish proven within 1e-3 nats, the books against the files, the journal readable to "
        "its end.",
    ]


def _memory(growths: dict[str, Growth]) -> list[str]:
    return [
        f"Memory: RSS of a process and its children, in MiB, {WARM_STEPS} steps after a start at the earliest. Growth",
        f"per 10,000 steps, with its 95 % interval: within the second halves of lives of {LONG_STEPS:,} steps or more",
        "(the first halves fill caches of fixed size: 16,384 strings that pydantic has read, a reward service's newest",
        f"answers), and from life to life. More than {GROWS_MIB:g} MiB beyond its interval is a finding.",
        "",
        "| process | median | largest | longest life, steps | growth within a life | growth from life to life |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {one.median_mib:.0f} | {one.largest_mib:.0f} | {one.longest_steps:,} | {_slope(one.within)} "
            f"| {_slope(one.across)} |"
            for name, one in growths.items()
        ),
    ]


def _disk(disks: dict[str, DiskGrowth]) -> list[str]:
    return [
        "| on disk | peak in the first quarter, MiB | in the last | bytes a step | |",
        "|---|---|---|---|---|",
        *(
            f"| {kind} | {_mib(one.early)} | {_mib(one.late)} "
            f"| {f'{one.per_step:,.0f}' if kind in LINEAR else '—'} | {LINEAR.get(kind, 'kept flat by rotation')} |"
            for kind, one in disks.items()
        ),
    ]


def _faults(lines: SoakLines) -> list[str]:
    resumes = resumes_of(lines.strikes)
    counts = Counter((one.process, one.how) for one in lines.strikes)
    rows = []
    for (process, how), count in sorted(counts.items()):
        times = sorted(one.next_step_s for one in lines.strikes if (one.process, one.how) == (process, how))
        rows.append(f"| {process} | {how} | {count} | {times[len(times) // 2]:.1f} | {times[-1]:.1f} |")
    said = [
        f"The learner resumed {resumes.count} times, in {resumes.median_s:.1f} s from its start to its next step "
        f"(median): {resumes.first_s:.1f} s in the first tenth, {resumes.last_s:.1f} s in the last.",
        f"Beyond {SLOWS:g} times as long it would be a finding. Most of it is Python's imports on busy cores.",
        "",
    ]
    return [
        *(said if resumes.count else ()),
        "| fault | | times | next step after, s (median) | longest |",
        "|---|---|---|---|---|",
        *rows,
    ]


def _slope(slope: Slope) -> str:
    return "too few" if math.isnan(slope.value) else f"{slope.value:+.2f} ± {slope.half_width:.2f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}" if nbytes >= MIB / 10 else f"{nbytes / MIB:.3f}"


def figure(lines: SoakLines, path: Path) -> None:
    """Three panels over the step: memory of each process, disk by kind, and the time of each resume."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, (memory, disk, resumes) = pyplot.subplots(3, 1, figsize=(9, 10), sharex=True)
    for name in NAMES:
        there = [one for one in lines.samples if is_warm(one, name)]
        memory.plot([one.step for one in there], [one.rss_mib[name] for one in there], ".", markersize=3, label=name)
    for kind in disks_of(lines.samples):
        sizes = [one.disk_bytes.get(kind, 0) / MIB for one in lines.samples]
        disk.plot([one.step for one in lines.samples], sizes, linewidth=1, label=kind)
    again = [one for one in lines.strikes if is_resume(one)]
    resumes.plot([one.step for one in again], [one.next_step_s for one in again], ".", label="the learner resumes")
    memory.set(ylabel="RSS, MiB", ylim=(0, None))
    disk.set(ylabel="disk, MiB", yscale="log")
    resumes.set(ylabel="start to next step, s", ylim=(0, None), xlabel="step")
    for panel, place in ((memory, "lower left"), (disk, "center right"), (resumes, "lower left")):
        panel.legend(fontsize="small", loc=place, ncols=2)
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)
