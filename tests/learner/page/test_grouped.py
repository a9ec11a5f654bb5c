import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.page.grouped import groups_page, ordered_groups
from learner.page.reading import Filter, Key, Order, page, parts_of
from learner.page.store import TrajectoryStore
from learner.page.taken import TakenStep
from protocol.trajectories import RewardRecord
from tests.learner.page.made_run import group as made_group
from tests.learner.page.made_run import make_run, taken


def _record(reward: float | None, explanation: str) -> RewardRecord:
    failed = "it hung" if reward is None else None
    return RewardRecord(reward=reward, error=failed, verifier="exact", explanation=explanation)


def _rewarded(lease: int, *, step: int, rewards: tuple[float | None, ...]) -> TakenStep:
    """A step of one group with these rewards, whose completions are as long as their place, and one token more."""
    made = made_group(lease, step=step, texts=[f"word{place}" for place in range(len(rewards))])
    trajectories = [
        one.model_copy(update={"reward": _record(reward, "given: six" if place else "no words")})
        for place, (one, reward) in enumerate(zip(made.trajectories, rewards, strict=True))
    ]
    return taken(step, made.model_copy(update={"trajectories": tuple(trajectories)}))


def _write(folder: Path, *steps: TakenStep, part_bytes: int = 64 << 20) -> Path:
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0, part_bytes=part_bytes) as store:
        for step in steps:
            store.put(step)
            store.wait_idle()
    return folder


def _steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_a_group_is_one_row_with_its_rewards_and_the_ends_of_its_numbers(tmp_path: Path) -> None:
    made = _rewarded(4, step=3, rewards=(0.0, 1.0, 0.5, None))
    values = {name: each.copy() for name, each in made.values.items()}
    values["learner_logprobs"][4] = made.groups[0].trajectories[0].behavior_logprobs[4] + np.log(3)
    values["advantages"][9:18] = -0.25
    _write(tmp_path, replace(made, values=values))

    (row,) = groups_page(tmp_path, Filter()).rows

    ratio, gap = row["ranges"].pop("ratio"), row["ranges"].pop("gap")
    assert ratio == pytest.approx((np.exp(0.25), 3.0), rel=1e-5)
    assert gap == pytest.approx((0.25, np.log(3)), rel=1e-5)
    assert row == {
        "key": "3-4", "group": "3-1", "step": 3, "environment": "words", "task": 4, "why": "", "size": 4,
        "reward_mean": 0.5, "reward_std": pytest.approx(np.std([0.0, 1.0, 0.5])), "prompt": "a prompt",
        "excerpt": "word3", "expected": "six", "rewards": [0.0, 1.0, 0.5, None],
        "ranges": {"length": (6, 6), "lag": (1, 1), "advantage": (-0.25, 0.5)},
    }  # fmt: skip


def test_numbers_that_nobody_knows_have_no_ends(tmp_path: Path) -> None:
    left_out = replace(_rewarded(4, step=1, rewards=(None, None)), places=[], values={}, why="uniform")
    _write(tmp_path, left_out)

    (row,) = groups_page(tmp_path, Filter(why="uniform")).rows

    assert (row["ranges"]["ratio"], row["ranges"]["advantage"], row["reward_mean"]) == (None, None, None)
    assert ordered_groups(tmp_path, Filter(), order="reward").rows == []
    assert groups_page(tmp_path, Filter(why="trained")).rows == []


@pytest.mark.parametrize("part_bytes", [1, 64 << 20], ids=["a part for each step", "one part"])
@pytest.mark.parametrize("wanted", [Filter(), Filter(words="wo*"), Filter(words="word3"), Filter(min_reward=0.5)])
def test_pages_of_groups_go_on_in_both_directions_without_a_gap(
    tmp_path: Path, wanted: Filter, part_bytes: int
) -> None:
    """Each has rows at both sides of a page's end, which are of its group, and neither lost nor there twice."""
    steps = (taken(step, *(made_group(2 * step + n, step=step) for n in range(2))) for step in range(1, 8))
    _write(tmp_path, *steps, part_bytes=part_bytes)

    def keys(**more: Any) -> list[str]:
        return [row["group"] for row in groups_page(tmp_path, wanted, **more).rows]

    whole = keys()
    first = keys(limit=3)
    second = keys(limit=3, start=Key.parse(first[-1]))

    assert len(whole) == len(set(whole)) == 14
    assert first + second == whole[:6]
    assert keys(limit=3, start=Key.parse(second[0]), direction="newer") == first
    assert keys(limit=2, start=Key.parse(second[0]), direction="newer") == first[1:]
    assert keys(limit=1, start=Key(0, 0), direction="newer") == whole[-1:]
    assert keys(start=Key.parse(whole[-1])) == []


def test_a_group_is_there_if_one_of_its_trajectories_fits_and_its_row_leads_to_that(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3, texts=("word1 word2", "word3"))

    found = groups_page(folder, Filter(words="word2", step=2)).rows
    (fits, _) = page(folder, Filter(words="word2", step=2)).rows

    assert len(found) == 2
    assert found[0]["key"] == fits["key"]
    assert found[0]["excerpt"] == "word1 \x02word2\x03"
    assert found[0]["rewards"] == [0.0, 1.0]


@pytest.mark.parametrize("part_bytes", [1, 64 << 20], ids=["a part for each step", "one part"])
def test_groups_come_in_the_order_of_their_first_trajectory(tmp_path: Path, part_bytes: int) -> None:
    rewards = {1: (0.0, 3.0), 2: (2.0, 2.0), 3: (1.0, 5.0), 4: (-1.0, 4.0), 5: (None, 0.5)}
    steps = (_rewarded(step, step=step, rewards=each) for step, each in rewards.items())
    _write(tmp_path, *steps, part_bytes=part_bytes)

    def order(name: Order, wanted: Filter = Filter(), **more: int) -> list[int]:  # noqa: B008 - frozen
        return _steps(ordered_groups(tmp_path, wanted, order=name, **more).rows)

    assert order("reward") == [3, 4, 1, 2, 5]
    assert order("-reward") == [4, 1, 5, 3, 2]
    assert order("reward", Filter(max_reward=2.5)) == [2, 3, 5, 1, 4], "only what fits counts"
    assert order("reward", limit=2, skip=1) == [4, 1]
    assert order("-reward", limit=2, skip=4) == [2]


def test_a_damaged_part_is_named_and_the_groups_of_others_are_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    (folder / "trajectories" / "part-0000000009.db").write_bytes(b"no database" * 1000)

    for found in (groups_page(folder, Filter()), ordered_groups(folder, Filter(), order="reward")):
        assert len(found.rows) == 4
        assert [text.split(":")[0] for text in found.unreadable] == ["part-0000000009.db"]
        assert json.dumps(found.rows, allow_nan=False)


def test_only_the_groups_of_a_page_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many fit: of all others their numbers alone are looked at."""
    folder = make_run(tmp_path / "run", steps=20)
    assert len(parts_of(folder)) == 1
    read: list[int] = []
    monkeypatch.setattr("learner.page.grouped._range", lambda values: read.append(len(values)))

    groups_page(folder, Filter(), limit=3)
    ordered_groups(folder, Filter(), order="length", limit=3, skip=10)

    assert read == [2] * (5 * 3 * 2)
