"""A small run's folder as a learner leaves it, for the tests of its page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from learner.leases.lease_times import LeaseTimes
from learner.page.store import TrajectoryStore
from learner.page.taken import SequencePlace, TakenStep
from protocol.trajectories import GreedyBaseline, RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

TOKENIZER: dict[str, object] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
    "model": {"type": "WordLevel", "unk_token": "<unk>",
              "vocab": {"<unk>": 0, **{f"word{i} ": i for i in range(1, 100)}}},
}  # fmt: skip


def step_line(step: int, **more: object) -> dict[str, object]:
    """A line of metrics.jsonl, of a step whose reward grows."""
    numbers = {
        "reward_mean": 1 - 1 / (1 + step / 20), "reward_std": 0.4, "length_mean": 12.5,
        "entropy": 1.2 / (1 + step / 50), "lag_mean": 1.2, "lag_max": 2,
        "behavior_kl": 0.004, "mismatch_kl": 0.0003, "grad_norm": 0.8, "loss": 0.1, "learning_rate": 1e-4,
        "truncated_share": 0.1, "uniform_groups_share": 0.2, "effective_sample_share": 0.9,
        "lag_counts": {"0": 2, "1": 4, "2": 2}, "lag_bound": 4, "wait_s": 0.1, "train_s": 0.15, "copy_s": 0.01,
        "forward_backward_s": 0.1, "optimizer_s": 0.03, "trajectories": 8, "sampled_tokens": 100, "groups": 2,
        "time_s": 0.26 * step, "lease_ids": [2 * step, 2 * step + 1],
    }  # fmt: skip
    return {"kind": "step", "step": step, **numbers, **more}


def write_lines(folder: Path, lines: Sequence[dict[str, object]]) -> None:
    """Appends lines to the run's metrics."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def group(
    lease: int,
    *,
    step: int,
    texts: Sequence[str] = ("word1 word2", "word3"),
    length: int = 6,
    prompt: str = "a prompt",
) -> TrajectoryGroup:
    """Of a trajectory for each text, all after the same prompt of three tokens; the last one has the best reward."""
    return TrajectoryGroup(
        incarnation=1, lease_id=lease, attempt=0, purpose="train", environment="sums" if lease % 2 else "words",
        task_index=lease % 7, prompt_text=prompt,
        trajectories=tuple(_one(lease, place, text, step=step, length=length) for place, text in enumerate(texts)),
    )  # fmt: skip


def _one(lease: int, place: int, text: str, *, step: int, length: int) -> Trajectory:
    drawn = np.random.default_rng([lease, place])
    total = 3 + length
    ids = np.concatenate([[5, 6, 7], drawn.integers(1, 100, length)]).astype(np.int32)
    half = 3 + length // 2
    old, new = max(0, step - 2), step - 1
    spans = (VersionSpan(version=f"1.{old}", start=3, end=half), VersionSpan(version=f"1.{new}", start=half, end=total))
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[3:] = -drawn.random(length)
    return Trajectory(
        token_ids=ids, loss_mask=(np.arange(total) >= 3).astype(np.uint8), behavior_logprobs=logprobs,
        version_spans=spans, completion_text=text,
        turns=(Turn(start=0, completion_start=3, end=total, finish_reason="stop", generator_ids=("gen-0",)),),
        reward=RewardRecord(reward=float(place), verifier="exact", components={"right": float(place)}, service_id="rs",
                            explanation=f"got {text[:9]}\ngiven: an answer {lease % 7}"),
    )  # fmt: skip


def taken(step: int, *groups: TrajectoryGroup) -> TakenStep:
    """The groups with values of the learner's own: logprobs a little above the sampling ones."""
    places, parts = [], []
    for number, one in enumerate(groups):
        for index, trajectory in enumerate(one.trajectories):
            places.append(SequencePlace(number, index, 0, len(trajectory.token_ids)))
            parts.append(trajectory.behavior_logprobs)
    behavior = np.concatenate(parts)
    values = {
        "learner_logprobs": behavior + np.float32(0.25),
        "entropies": np.abs(behavior),
        "advantages": np.full(len(behavior), 0.5, dtype=np.float32),
    }
    return TakenStep(step=step, groups=groups, places=places, values=values)


def compared(made: TrajectoryGroup, reward: float) -> TrajectoryGroup:
    """The group with a greedy answer of this reward."""
    spans = made.trajectories[0].version_spans
    record = RewardRecord(reward=reward, verifier="exact")
    baseline = GreedyBaseline(reward=record, version_spans=spans, sampled_tokens=3)
    return made.model_copy(update={"greedy_baseline": baseline})


def make_run(
    folder: Path,
    *,
    steps: int = 40,
    texts: Sequence[str] = ("word1 word2", "word3"),
    settings: Mapping[str, object] = {},
    prompt: str = "a prompt",
) -> Path:
    """A folder with metrics, settings, a tokenizer and trajectories of each step."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, object]] = [{"kind": "evaluation", "version": 0, "accuracy": 0.1, "tasks": 20}]
    for step in range(1, steps + 1):
        lines += [step_line(step), {"kind": "publish", "version": step, "members": 2, "total_s": 0.2, "pause_s": 0.02}]
    lines += [{"kind": "checkpoint", "version": steps // 2, "seconds": 1.5, "unix_s": 1790000000.0}]
    lines += [{"kind": "leave", "version": steps // 3, "generator_id": "gen-1"}]
    lines += [{"kind": "evaluation", "version": steps, "accuracy": 0.8, "tasks": 20}]
    write_lines(folder, lines)
    all_settings = {"steps": steps, "max_lag": 4, "algo.type": "grpo", **settings}
    made = {"settings": all_settings, "differs": ["steps"], "began": "today"}
    (folder / "made_with.json").write_text(json.dumps(made), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
        for step in range(1, steps + 1):
            store.put(taken(step, *(group(2 * step + n, step=step, texts=texts, prompt=prompt) for n in range(2))))
            store.wait_idle()
    return folder


def timed_run(folder: Path) -> Path:
    """A run of five steps. Of the last one a group is kept, two trajectories of two turns, with its times: granted at
    1000 s, accepted at 1007.5 s, taken at 1010 s, trained at 1012 s. Its greedy answer's reward is 0.25.
    """
    folder.mkdir()
    ends = {4: 1009.0, 5: 1012.0}
    published = {3: 999.0, 4: 1003.0, 5: 1012.5}
    write_lines(folder, [step_line(step, train_s=1.5, copy_s=0.25, unix_s=ends.get(step)) for step in range(1, 6)])
    write_lines(folder, [{"kind": "publish", "version": each, "unix_s": at} for each, at in published.items()])
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    turns = [((0.5, 2.0), (2.5, 4.0)), ((0.5, 3.0), (3.5, 6.0))]
    made = group(8, step=5, length=6)
    trajectories = [
        one.model_copy(update={"turns": tuple(
            Turn(start=3 * number, completion_start=3 + 3 * number, end=6 + 3 * number, finish_reason="stop",
                 generator_ids=("gen-0",), asked_s=asked, ended_s=ended)
            for number, (asked, ended) in enumerate(own)
        )})
        for one, own in zip(made.trajectories, turns, strict=True)
    ]  # fmt: skip
    made = made.model_copy(update={"trajectories": tuple(trajectories), "rollout_s": 7.0, "scoring_s": (6.0, 7.0)})
    times = LeaseTimes(granted_unix_s=1000.0, accepted_unix_s=1007.5, taken_unix_s=1010.0)
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
        store.put(replace(taken(5, compared(made, 0.25)), times=(times,)))
        store.wait_idle()
    return folder


def huge_group(lease: int, *, step: int, nasty: str) -> TrajectoryGroup:
    """A prompt, a token and a completion of a megabyte each, and `nasty` in all of them; see `huge_run`."""
    prompt = np.full(HUGE_PROMPT, 5, dtype=np.int32)
    prompt[10] = HUGE_TOKEN

    def one(place: int, sampled: list[int], text: str) -> Trajectory:
        total = len(prompt) + len(sampled)
        return Trajectory(
            token_ids=np.concatenate([prompt, np.array(sampled, dtype=np.int32)]),
            loss_mask=(np.arange(total) >= len(prompt)).astype(np.uint8),
            behavior_logprobs=np.zeros(total, dtype=np.float32),
            version_spans=(VersionSpan(version=f"1.{step - 1}", start=len(prompt), end=total),),
            completion_text=text[: 1 << 20],
            turns=(Turn(start=0, completion_start=len(prompt), end=total, finish_reason="stop", generator_ids=("g",)),),
            reward=RewardRecord(reward=float(place), verifier="exact", components={nasty: 1.0}, service_id="rs"),
        )  # fmt: skip

    return TrajectoryGroup(
        incarnation=1, lease_id=lease, attempt=0, purpose="train", environment="huge", task_index=0,
        prompt_text=(nasty * (1 << 16))[: 1 << 20],
        trajectories=(
            one(0, [1, HUGE_TOKEN, 2], nasty + "x" * (1 << 20)),
            one(1, [8] * HUGE_COMPLETION, nasty + "word8 " * HUGE_COMPLETION),
        ),
    )  # fmt: skip


HUGE_TOKEN = 100
HUGE_PROMPT = 200_000
HUGE_COMPLETION = 170_000


def huge_run(folder: Path, *, nasty: str) -> Path:
    """A run whose newest group is huge."""
    make_run(folder, steps=1)
    vocabulary = {**TOKENIZER["model"]["vocab"], nasty + "y" * (1 << 20): HUGE_TOKEN}  # type: ignore[index]
    tokenizer = {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": vocabulary}}  # type: ignore[dict-item]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
        store.put(TakenStep(step=2, groups=(huge_group(9, step=2, nasty=nasty),)))
        store.wait_idle()
    return folder
