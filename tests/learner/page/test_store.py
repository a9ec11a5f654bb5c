import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.page.grouped import groups_page
from learner.page.reading import (
    MAX_TEXT,
    MAX_TOKENS,
    Filter,
    Key,
    Order,
    decoder_of,
    group,
    kept_of_step,
    ordered,
    overview,
    page,
    parts_of,
    pieces_of,
    whole_text,
)
from learner.page.store import TrajectoryStore, columns_of, packed, unpacked
from learner.page.taken import TakenStep
from protocol.trajectories import RewardRecord
from tests.learner.page.made_run import (
    HUGE_COMPLETION,
    HUGE_PROMPT,
    HUGE_TOKEN,
    TOKENIZER,
    compared,
    huge_run,
    make_run,
    taken,
)
from tests.learner.page.made_run import group as made_group

NASTY = "<script>alert(1)</script>\x00\x1b[31m\u202egnp.exe\u2066 \ud7ff"


def _keys(folder: Path, wanted: Filter = Filter(), **more: object) -> list[str]:  # noqa: B008 - frozen
    return [row["key"] for row in page(folder, wanted, **more).rows]  # type: ignore[arg-type]


def test_what_was_packed_comes_back_as_it_was() -> None:
    ((_, columns),) = columns_of(taken(3, made_group(7, step=3)))

    back = unpacked(packed(columns))

    for before, after in zip(columns, back, strict=True):
        for name in ("token_ids", "loss_mask", "versions", "behavior_logprobs", "advantages"):
            assert np.array_equal(before[name], after[name]), name
        assert np.allclose(before["learner_logprobs"], after["learner_logprobs"], atol=1e-3)


def test_the_store_keeps_the_arrays_of_the_groups(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)

    found = group(folder, Key(1, 1), decode=decoder_of(folder))

    assert found is not None
    expected = made_group(2, step=1).trajectories
    assert found["shared"] == 3
    assert found["prompt"] == "word5 word6 word7 "
    for shown, trajectory in zip(found["trajectories"], expected, strict=True):
        tokens = shown["tokens"]
        assert tokens["ids"] == trajectory.token_ids[3:].tolist()
        assert tokens["versions"] == trajectory.token_versions()[3:].tolist()
        assert tokens["behavior_logprobs"] == pytest.approx(trajectory.behavior_logprobs[3:].tolist(), abs=1e-4)
        gaps = np.array(tokens["learner_logprobs"]) - np.array(tokens["behavior_logprobs"])
        assert gaps == pytest.approx(np.full(6, 0.25), abs=1e-2)


def test_an_answer_has_the_ends_of_what_is_huge_and_the_whole_can_be_had(tmp_path: Path) -> None:
    folder = huge_run(tmp_path / "run", nasty="<b>")
    newest = page(folder, Filter(environment="huge"), limit=1).rows[0]
    key = Key.parse(newest["group"])

    found = group(folder, key, decode=decoder_of(folder))

    assert found is not None
    assert len(json.dumps({**found, "trajectories": []})) < 4 * MAX_TEXT
    assert all(each["tokens"] is None and len(each["text"]) < 2 * MAX_TEXT for each in found["trajectories"])
    assert "characters …" in found["trajectories"][1]["text"]
    assert found["trajectories"][1]["text"].startswith("<b>word8 ")
    assert f"{HUGE_PROMPT - (1 << 12):,} tokens …" in found["prompt"]
    whole = [whole_text(folder, key, place=place) for place in (0, 1, None)]
    assert [None if text is None else len(text) for text in whole] == [
        1 << 20,
        len("<b>") + 6 * HUGE_COMPLETION,
        196_608,
    ]
    assert whole_text(folder, key, place=2) is None


def test_a_long_trajectory_is_shown_from_any_of_its_tokens_on(tmp_path: Path) -> None:
    folder = huge_run(tmp_path / "run", nasty="<b>")
    key = Key.parse(page(folder, Filter(environment="huge"), limit=1).rows[0]["group"])

    def tokens(place: int, begin: int) -> dict[str, Any]:
        found = group(folder, key, decode=decoder_of(folder), only=place, begin=begin)
        assert found is not None
        shown: dict[str, Any] = found["trajectories"][place]["tokens"]
        return shown

    last = HUGE_PROMPT + HUGE_COMPLETION - 1
    ranges = [(shown["begin"], len(shown["ids"])) for shown in (tokens(1, begin) for begin in (0, 300_000, 1 << 40))]
    assert ranges == [(HUGE_PROMPT, MAX_TOKENS), (300_000, MAX_TOKENS), (last, 1)]
    huge = tokens(0, 0)
    assert huge["ids"] == [1, HUGE_TOKEN, 2]
    assert huge["pieces"][1].startswith("<b>yyy")
    assert max(map(len, huge["pieces"])) < 400


@pytest.mark.parametrize("wanted", [Filter(), Filter(words="wo*"), Filter(min_reward=0.0), Filter(task=1)])
def test_pages_of_a_filter_go_on_in_both_directions_without_a_gap(tmp_path: Path, wanted: Filter) -> None:
    folder = make_run(tmp_path / "run", steps=20)

    whole = _keys(folder, wanted, limit=200)
    first = _keys(folder, wanted, limit=3)
    second = _keys(folder, wanted, limit=3, start=Key.parse(first[-1]))

    assert len(whole) > 6
    assert whole == sorted(whole, key=lambda key: (Key.parse(key).part, Key.parse(key).row), reverse=True)
    assert first + second == whole[:6]
    assert _keys(folder, wanted, limit=3, start=Key.parse(second[0]), direction="newer") == first


@pytest.mark.parametrize(
    "wanted", [Filter(), Filter(words="wo*"), Filter(words="word3", task=2), Filter(task=2), Filter(prompt="a")]
)
def test_no_page_sorts_all_that_fits(tmp_path: Path, wanted: Filter, monkeypatch: pytest.MonkeyPatch) -> None:
    """As would take long where a word is in nearly all texts: SQLite says itself how it goes about each query."""
    folder = make_run(tmp_path / "run", steps=2)
    asked: list[str] = []
    connect = sqlite3.connect

    def connected(*words: object, **more: object) -> sqlite3.Connection:
        database = connect(*words, **more)  # type: ignore[call-overload]
        database.set_trace_callback(asked.append)
        assert isinstance(database, sqlite3.Connection)
        return database

    monkeypatch.setattr("learner.page.reading.sqlite3.connect", connected)
    assert _keys(folder, wanted)
    monkeypatch.undo()

    pages = [text for text in asked if text.startswith("SELECT rows.id")]
    with connect(parts_of(folder)[0]) as database:
        plans = [database.execute(f"EXPLAIN QUERY PLAN {text}").fetchall() for text in pages]
    assert plans
    assert not [step for plan in plans for *_, step in plan if "TEMP B-TREE" in step]


def test_pages_go_through_all_parts_and_back(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0, part_bytes=1) as store:
        for step in range(1, 6):
            store.put(taken(step, made_group(step, step=step)))
            store.wait_idle()
    assert len(parts_of(tmp_path)) == 5

    whole = _keys(tmp_path)
    first = _keys(tmp_path, limit=4)
    second = _keys(tmp_path, limit=4, start=Key.parse(first[-1]))
    back = _keys(tmp_path, limit=4, start=Key.parse(second[0]), direction="newer")

    assert len(whole) == 10
    assert first + second == whole[:8]
    assert back == first


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (Filter(max_step=3), 12),
        (Filter(step=3), 4), (Filter(environment="sums"), 20), (Filter(min_reward=0.5), 20), (Filter(min_length=7), 0),
        (Filter(words="word3"), 20), (Filter(words="word3", max_reward=0.5), 0), (Filter(words="wo*", step=1), 4),
        (Filter(words='" OR 1'), 0), (Filter(why="trained"), 40), (Filter(why="uniform"), 0), (Filter(task=2), 6),
    ],
)  # fmt: skip
def test_filters_find_what_fits(tmp_path: Path, wanted: Filter, count: int) -> None:
    folder = make_run(tmp_path / "run", steps=10)

    assert len(page(folder, wanted, limit=200).rows) == count


def test_a_part_of_the_prompt_finds_all_that_answers_it(tmp_path: Path) -> None:
    prompts = {1: "What is 100% of 3_4?", 2: "what is 1000 of 354?", 3: NASTY, 4: "What is left?"}
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        for step, prompt in prompts.items():
            store.put(taken(step, made_group(step, step=step, prompt=prompt)))

    def steps(wanted: Filter) -> list[int]:
        return [row["step"] for row in page(tmp_path, wanted).rows]

    assert steps(Filter(prompt="WHAT is")) == [4, 4, 2, 2, 1, 1]
    assert steps(Filter(prompt="100%")) == steps(Filter(prompt="3_4")) == [1, 1]
    assert steps(Filter(prompt="gnp.exe")) == [3, 3], "beyond the zero in it, too"
    assert steps(Filter(prompt="' OR 1 --")) == []
    assert steps(Filter(prompt="what is", words="word3", max_step=2)) == [2, 1]
    assert [row["step"] for row in groups_page(tmp_path, Filter(prompt="what is")).rows] == [4, 2, 1]
    assert [row["step"] for row in ordered(tmp_path, Filter(prompt="what is 1"), order="reward").rows] == [2, 1, 2, 1]


def test_a_resume_forgets_the_steps_beyond(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=6)
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
        store.take_up(version=4)
        store.put(taken(5, made_group(99, step=5)))

    assert overview(folder)["last_step"] == 5
    assert len(page(folder, Filter(step=5)).rows) == 2
    assert page(folder, Filter(words="word3", step=6)).rows == []


def test_over_the_budget_the_oldest_part_goes(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=4 << 20, share=1.0) as store:
        for step in range(1, 40):
            store.put(taken(step, *(made_group(8 * step + n, step=step, length=9000) for n in range(8))))
            store.wait_idle()

    kept = sum(path.stat().st_size for path in (tmp_path / "trajectories").iterdir())
    found = overview(tmp_path)
    assert kept < 5 << 20
    assert found["first_step"] > 1
    assert found["last_step"] == 39


def test_a_part_that_begins_with_an_old_step_is_the_newest_and_stays(tmp_path: Path) -> None:
    """A notable group that was held is written long after its step."""
    with TrajectoryStore(tmp_path, budget_bytes=1, part_bytes=1, share=1.0) as store:
        for step in (10, 3, 4, 20):
            store.put(taken(step, made_group(step, step=step)))
            store.wait_idle()
            assert len(page(tmp_path, Filter(step=step)).rows) == 2
            assert len(parts_of(tmp_path)) == 1, "over the budget the oldest goes"
    assert store.left_out == 0


def test_beyond_its_share_of_time_one_group_for_a_step_is_kept_and_the_rest_counted(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=0.0) as store:
        store.spent_s = 0.055
        for step in (1, 2):
            store.put(taken(step, *(made_group(8 * step + n, step=step) for n in range(8))))
            store.wait_idle()
        assert overview(tmp_path)["groups"] == 2

    found = overview(tmp_path)
    assert found["groups"] + found["left_out"] == 16, "what was held for its turn is kept at the end"
    assert store.left_out_trajectories == found["left_out"] * len(made_group(1, step=1).trajectories)
    shown = group(tmp_path, Key.parse(page(tmp_path, Filter()).rows[0]["group"]), decode=None)
    assert shown is not None
    assert None not in shown["trajectories"][0]["tokens"]["learner_logprobs"]


def _notable_step(step: int) -> TakenStep:
    """Of 32 groups whose rewards, lengths and ratios are much alike."""
    groups = [made_group(32 * step + n, step=step) for n in range(32)]
    return taken(step, *groups)


def _changed(one: TakenStep, number: int, **changes: Any) -> TakenStep:
    """The step with a change to the first trajectory of a group."""
    groups = list(one.groups)
    first, *rest = groups[number].trajectories
    groups[number] = groups[number].model_copy(update={"trajectories": (first.model_copy(update=changes), *rest)})
    return replace(one, groups=tuple(groups))


def _with_ratio(one: TakenStep, number: int, gap: float) -> TakenStep:
    values = {name: values.copy() for name, values in one.values.items()}
    at = next(sum(p.length for p in one.places[:i]) for i, p in enumerate(one.places) if p.group == number)
    values["learner_logprobs"][at + 4] += gap
    return replace(one, values=values)


def _rewarded(reward: float) -> RewardRecord:
    return RewardRecord(reward=reward, verifier="exact")


def test_of_a_run_that_is_too_fast_the_extremes_are_kept(tmp_path: Path) -> None:
    """Ten steps of 32 groups, of which a group a step finds room."""
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=0.0) as store:
        for step in range(1, 11):
            made = _notable_step(step)
            if step == 4:
                made = _changed(made, 7, reward=_rewarded(-9.0))
                made = _with_ratio(made, 9, 3.0)
            if step == 6:
                made = _changed(made, 20, reward=_rewarded(9.0))
            if step == 7:
                made = _changed(made, 3, stop_reason="turn_limit")
            store.spent_s = 0.06
            store.put(made)
            store.wait_idle()

    rows = page(tmp_path, Filter(), limit=200).rows
    assert len({row["group"] for row in rows}) < 20
    rewards = [row["reward"] for row in rows]
    assert (min(rewards), max(rewards)) == (-9.0, 9.0)
    assert "turn_limit" in {row["finish"] for row in rows}
    assert max(row["ratio"] for row in rows) == pytest.approx(math.exp(3.25), rel=1e-4)
    assert {row["step"] for row in rows} >= {4, 6, 7}


def test_rows_come_in_the_order_of_a_number_over_all_parts(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0, part_bytes=1) as store:
        for step in range(1, 9):
            made = _changed(taken(step, made_group(step, step=step)), 0, reward=_rewarded(float(step * 7 % 8)))
            store.put(_with_ratio(made, 0, (step * 3 % 8) / 10))
            store.wait_idle()

    orders: tuple[Order, ...] = ("reward", "-ratio", "lag", "-advantage")
    for order in orders:
        name = order.removeprefix("-")
        whole = ordered(tmp_path, Filter(), order=order, limit=200).rows
        values = [row[name] for row in whole]
        assert values == sorted(values, reverse=not order.startswith("-"))
        assert len(values) == 16
        parts = [ordered(tmp_path, Filter(), order=order, limit=5, skip=skip).rows for skip in (0, 5, 10, 15)]
        assert [row["key"] for part in parts for row in part] == [row["key"] for row in whole]
    (most, *_) = ordered(tmp_path, Filter(), order="ratio").rows
    assert most["step"] == 5
    assert {row["step"] for row in page(tmp_path, Filter(min_ratio=most["ratio"])).rows} == {5}
    assert {row["step"] for row in page(tmp_path, Filter(min_step=3, max_step=4)).rows} == {3, 4}


def test_a_gap_counts_where_the_learner_finds_a_token_less_likely_too(tmp_path: Path) -> None:
    made = taken(1, made_group(4, step=1))
    learner = made.values["learner_logprobs"].copy()
    learner[5] -= 2.25  # of the first trajectory: it was 0.25 above the generator's
    learner[10] += 9.0  # of the second one's prompt
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        store.put(replace(made, values={**made.values, "learner_logprobs": learner}))

    rows = ordered(tmp_path, Filter(), order="gap").rows
    assert [row["gap"] for row in rows] == pytest.approx([2.0, 0.25], rel=1e-5)
    assert [row["ratio"] for row in rows] == pytest.approx([math.exp(0.25)] * 2, rel=1e-5)
    assert [row["gap"] for row in ordered(tmp_path, Filter(), order="-gap").rows] == pytest.approx([0.25, 2.0])


def test_a_row_has_its_prompt_what_was_expected_and_the_rewards_of_its_group(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        judged = _rewarded(0.5).model_copy(update={"verifier": "other"})
        store.put(_changed(taken(1, made_group(4, step=1), made_group(5, step=1)), 1, reward=judged, player="first"))

    rows = page(tmp_path, Filter()).rows
    assert [(row["prompt"], row["expected"], row["rewards"]) for row in rows] == [
        ("a prompt", "an answer 5", [0.5, 1.0]), ("a prompt", "", [0.5, 1.0]),
        ("a prompt", "an answer 4", [0.0, 1.0]), ("a prompt", "an answer 4", [0.0, 1.0]),
    ]  # fmt: skip
    assert [row["reward"] for row in page(tmp_path, Filter(verifier="other")).rows] == [0.5]
    assert [row["reward"] for row in page(tmp_path, Filter(player="first")).rows] == [0.5]
    assert (overview(tmp_path)["verifiers"], overview(tmp_path)["players"]) == (["exact", "other"], ["first"])


def test_a_step_tells_how_many_of_its_groups_are_kept(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=0.0) as store:
        store.put(taken(1, *(made_group(n, step=1) for n in range(3))))
        store.wait_idle()
        store.spent_s = 1.0
        store.put(taken(2, *(made_group(n, step=2) for n in range(4))))
        store.spent_s = 0.0
        store.put(taken(3, made_group(1, step=3)))

    assert kept_of_step(tmp_path, 1) == {"groups": 3, "left_out": 0}
    assert kept_of_step(tmp_path, 2) == {"groups": 0, "left_out": 4}
    assert kept_of_step(tmp_path, 4) == {"groups": 0, "left_out": 0}


def test_a_part_of_an_earlier_release_is_gone_on_with(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    (part,) = (folder / "trajectories").glob("part-*.db")
    with closing(sqlite3.connect(part)) as database:
        database.execute("DROP INDEX by_ratio")
        for column in ("ratio", "gap", "advantage"):
            database.execute(f"ALTER TABLE rows DROP COLUMN {column}")
        database.commit()
    assert [row["ratio"] for row in page(folder, Filter()).rows] == [None] * 8
    assert ordered(folder, Filter(), order="gap").rows == []
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
        store.put(taken(3, made_group(9, step=3)))
    ratios = [row["ratio"] for row in page(folder, Filter()).rows]
    assert ratios == [*[pytest.approx(math.exp(0.25), rel=1e-4)] * 2, *[None] * 8]


def test_a_group_has_the_reward_of_its_greedy_answer_and_parts_of_before_have_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    (part,) = (folder / "trajectories").glob("part-*.db")
    with closing(sqlite3.connect(part)) as database:
        database.execute("ALTER TABLE groups DROP COLUMN greedy_reward")
        database.commit()
    before = group(folder, Key(1, 1), decode=None)
    assert before is not None
    assert "greedy_reward" not in before
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
        store.put(taken(2, compared(made_group(9, step=2), 0.25), made_group(10, step=2)))
    found = [group(folder, Key(1, number), decode=None) for number in (1, 3, 4)]
    assert [each and each["greedy_reward"] for each in found] == [None, 0.25, None]


def test_steps_that_come_at_once_are_all_kept(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        for step in range(1, 9):
            store.put(taken(step, made_group(step, step=step)))

    assert store.left_out == 0
    assert {row["step"] for row in page(tmp_path, Filter()).rows} == set(range(1, 9))


def test_beyond_twice_its_share_of_time_nothing_is_kept(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=0.0) as store:
        store.spent_s = 1.0
        store.put(taken(1, *(made_group(n, step=1) for n in range(8))))

    assert store.left_out == overview(tmp_path)["left_out"] == 8
    assert store.left_out_trajectories == 8 * len(made_group(1, step=1).trajectories)
    assert page(tmp_path, Filter()).rows == []


def test_what_the_trainers_thread_spends_on_handing_a_step_over_counts_as_the_stores_time(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=0.0) as store:
        store.put(replace(taken(1, made_group(1, step=1)), spent_s=1.0))
        assert store.spent_s >= 1.0
        store.put(taken(2, made_group(2, step=2)))

    assert [row["step"] for row in page(tmp_path, Filter()).rows] == [1, 1]
    assert store.left_out == 1


def test_a_group_that_was_left_out_of_training_says_why(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        store.put_left_out(made_group(4, step=1), step=1, why="uniform")

    (first, _) = page(tmp_path, Filter(why="uniform")).rows
    assert first["why"] == "uniform"


def test_a_disk_that_takes_nothing_costs_trajectories_alone(tmp_path: Path) -> None:
    (tmp_path / "trajectories").write_text("a file is in the way")
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        store.put(taken(1, made_group(1, step=1)))
        store.wait_idle()

    assert store.left_out == 1


def test_a_damaged_part_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    (folder / "trajectories" / "part-0000000009.db").write_bytes(b"no database" * 1000)

    found = page(folder, Filter())

    assert len(found.rows) == 8
    assert [text.split(":")[0] for text in found.unreadable] == ["part-0000000009.db"]


def test_numbers_that_are_not_finite_are_shown_as_unknown(tmp_path: Path) -> None:
    made = taken(1, made_group(1, step=1))
    infinite = {name: np.full_like(values, np.inf) for name, values in made.values.items()}
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        store.put(replace(made, values=infinite))

    found = page(tmp_path, Filter())
    shown = group(tmp_path, Key.parse(found.rows[0]["group"]), decode=None) if found.rows else None
    assert (found.unreadable, overview(tmp_path)["unreadable"]) == ([], [])
    assert [row["advantage"] for row in found.rows] == [None, None]
    assert json.dumps([found.rows, shown], allow_nan=False), "as the page's answers are written"


def test_text_of_any_kind_is_kept_and_found(tmp_path: Path) -> None:
    texts = (NASTY, "x" * ((1 << 20) - 8) + " needle")
    folder = make_run(tmp_path / "run", steps=1, texts=texts)

    (row,) = [row for row in page(folder, Filter(words="alert")).rows if row["step"] == 1][:1]
    assert "script" in row["excerpt"]
    (long,) = page(folder, Filter(words="needle"), limit=1).rows
    assert len(long["excerpt"]) < 1000


def test_a_reader_sees_whole_steps_beside_the_writer(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, budget_bytes=1 << 30, share=1.0) as store:
        for step in range(1, 30):
            store.put(taken(step, *(made_group(2 * step + n, step=step) for n in range(2))))
            for row in page(tmp_path, Filter(), limit=5).rows:
                assert len(page(tmp_path, Filter(step=row["step"])).rows) == 4
            store.wait_idle()


def test_a_file_that_nobody_may_write_beside_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    for path in parts_of(folder):
        with sqlite3.connect(path) as database:
            assert database.execute("PRAGMA wal_checkpoint").fetchone() is not None
        database.close()
        path.chmod(0o444)

    assert len(page(folder, Filter()).rows) == 4


def test_characters_of_several_tokens_stand_at_the_last_one() -> None:
    parts = {1: b"\xe2\x82", 2: b"\xac", 3: b" five", 4: b"\xff"}

    def decode(ids: object) -> str:
        return b"".join(parts[each] for each in ids).decode(errors="replace")  # type: ignore[attr-defined]

    assert pieces_of([1, 2, 3], decode) == ["", "€", " five"]
    assert pieces_of([3, 4], decode) == [" five", "\ufffd"]
    assert pieces_of([1, 2], None) == ["⟨1⟩", "⟨2⟩"]
    assert TOKENIZER["model"]
