import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from learner.page.curves import PublishMoment, RunCurves, RunMoments
from learner.page.life import MAX_TURN_LANES, LeaseLife, TimedTurn, kept_life, life_of, turns_in
from learner.page.reading import Key, parts_of
from tests.learner.page.made_run import make_run, timed_run, write_lines
from tests.learner.page.test_routes import _client

TIMES = {
    "granted_unix_s": 1000.0, "accepted_unix_s": 1007.5, "taken_unix_s": 1010.0, "rollout_s": 7.0,
    "scoring_s": [6.0, 7.0],
}  # fmt: skip
TURNS = [TimedTurn(0, 0, 0.5, 2.0), TimedTurn(1, 0, 0.5, 3.0), TimedTurn(0, 1, 2.5, 4.0), TimedTurn(1, 1, 3.5, 6.0)]
MOMENTS = RunMoments(
    published=(PublishMoment(3, 999.0), PublishMoment(4, 1003.0), PublishMoment(5, 1012.5)),
    ended_unix_s=1012.0,
    took_s=1.75,
)


def _drawn(life: LeaseLife) -> dict[str, list[tuple[float, float]]]:
    return {lane.name: [(bar.begin, bar.end) for bar in lane.bars] for lane in life.lanes}


def _missing(life: LeaseLife) -> list[str]:
    return [name for name, _ in life.missing]


def test_each_lane_has_its_stretch_of_time_since_the_grant() -> None:
    life = life_of(TIMES, TURNS, MOMENTS)

    assert _drawn(life) == {
        "queue": [(0.0, 0.5)],
        "turn 1": [(0.5, 2.0), (0.5, 3.0)],
        "turn 2": [(2.5, 4.0), (3.5, 6.0)],
        "score": [(6.0, 7.0)],
        "delivery": [(7.0, 7.5)],
        "buffer": [(7.5, 10.0)],
        "step": [(10.0, 12.0)],
    }
    assert [bar.place for bar in life.lanes[1].bars] == [0, 1]
    assert (life.missing, life.seconds) == ([], 12.0)


def test_only_versions_that_were_published_meanwhile_are_told() -> None:
    assert life_of(TIMES, TURNS, MOMENTS).published == [(4, 3.0)]


def test_a_time_that_nobody_noted_leaves_its_lane_out_with_a_word() -> None:
    named = {"granted_unix_s": ["queue", "turns", "score"], "accepted_unix_s": ["delivery", "buffer"],
             "rollout_s": ["delivery"], "scoring_s": ["score"]}  # fmt: skip
    for name, lanes in named.items():
        life = life_of({other: value for other, value in TIMES.items() if other != name}, TURNS, MOMENTS)
        assert _missing(life) == lanes, name
        assert all(why for _, why in life.missing)
    assert _missing(life_of(TIMES, [], MOMENTS)) == ["queue", "turns"]
    assert _missing(life_of(TIMES, TURNS, RunMoments())) == ["step"]


def test_a_group_whose_grant_is_not_known_begins_with_its_acceptance_and_has_no_rollout() -> None:
    life = life_of({**TIMES, "granted_unix_s": None}, TURNS, MOMENTS)

    assert _drawn(life) == {"buffer": [(0.0, 2.5)], "step": [(2.5, 4.5)]}
    assert life.published == []


def test_a_run_of_an_earlier_release_has_its_step_alone() -> None:
    life = life_of({}, [], MOMENTS)

    assert _drawn(life) == {"step": [(0.0, 1.75)]}
    assert _missing(life) == ["queue", "turns", "score", "buffer"]


def test_a_group_that_was_left_out_has_its_rollout_alone() -> None:
    life = life_of({"rollout_s": 7.0, "scoring_s": [6.0, 7.0]}, TURNS[:1], MOMENTS, left_out=True)

    assert _drawn(life) == {"opening": [(0.0, 0.5)], "turn 1": [(0.5, 2.0)], "score": [(6.0, 7.0)]}
    assert life.missing == [
        ("buffer", "the group was left out of training"),
        ("step", "the group was left out of training"),
    ]


def test_times_that_run_backwards_are_not_drawn() -> None:
    life = life_of({**TIMES, "rollout_s": 8.0}, TURNS, MOMENTS)

    assert "delivery" not in _drawn(life)
    assert life.missing == [("delivery", "the clocks of the learner and of the env_service disagree")]


def test_the_many_turns_of_a_long_conversation_share_a_lane() -> None:
    turns = [TimedTurn(0, number, float(number), number + 0.5, [f"1.{number // 10}"]) for number in range(20)]

    lanes = {lane.name: lane.bars for lane in life_of({}, turns, RunMoments()).lanes}

    assert len([name for name in lanes if name.startswith("turn")]) == MAX_TURN_LANES + 1
    (shared,) = lanes["turns 13 to 20"]
    assert (shared.begin, shared.end, shared.versions) == (12.0, 19.5, ["1.1"])


def test_a_turn_tells_the_versions_that_sampled_its_own_tokens() -> None:
    facts: dict[str, Any] = {
        "spans": [["1.3", 3, 6], ["1.4", 6, 8], ["1.5", 8, 9]],
        "turns": [
            {"completion_start": 3, "end": 6, "asked_s": 0.5, "ended_s": 1.0, "generator_ids": ["g"]},
            {"completion_start": 7, "end": 9, "asked_s": 1.5, "ended_s": 2.0, "generator_ids": ["g", "h"]},
            {"completion_start": 9, "end": 10, "generator_ids": ["g"]},
        ],
    }

    assert turns_in([(4, facts)]) == [
        TimedTurn(4, 0, 0.5, 1.0, ["1.3"], ["g"]),
        TimedTurn(4, 1, 1.5, 2.0, ["1.4", "1.5"], ["g", "h"]),
    ]


async def test_the_page_is_told_the_life_of_a_kept_group(tmp_path: Path) -> None:
    folder = timed_run(tmp_path / "run")

    async with _client(folder) as client:
        found = (await client.get("/page/data/life", params={"key": "5-1"})).json()
        unknown = await client.get("/page/data/life", params={"key": "5-9"})

    lanes = {lane["name"]: [(bar["begin"], bar["end"]) for bar in lane["bars"]] for lane in found["lanes"]}
    assert list(lanes) == ["queue", "turn 1", "turn 2", "score", "delivery", "buffer", "step"]
    assert lanes["turn 2"] == [(2.5, 4.0), (3.5, 6.0)]
    assert (found["published"], found["missing"], found["step"]) == ([[4, 3.0]], [], 5)
    assert unknown.status_code == httpx.codes.NOT_FOUND


def test_moments_follow_the_file_and_a_resume_that_cuts_it(tmp_path: Path) -> None:
    folder = timed_run(tmp_path / "run")
    curves = RunCurves(folder)
    before = curves.moments(5)
    write_lines(folder, [{"kind": "resume", "version": 3, "incarnation": 2}])

    assert (before.ended_unix_s, before.took_s) == (1012.0, 1.75)
    assert [each.version for each in before.published] == [3, 4, 5]
    assert curves.moments(5) == RunMoments(published=(PublishMoment(3, 999.0),))


def test_a_part_of_an_earlier_release_is_read_and_written_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    (part,) = parts_of(folder)
    with closing(sqlite3.connect(part)) as database:
        database.execute("ALTER TABLE groups DROP COLUMN times")
        database.commit()

    old = kept_life(folder, Key(1, 1), RunCurves(folder).moments)
    make_run(folder, steps=2)
    new = kept_life(folder, Key(1, 1), RunCurves(folder).moments)

    assert old is not None
    assert new is not None
    assert old["lanes"] == new["lanes"] == []
    with closing(sqlite3.connect(part)) as database:
        assert "times" in {row[1] for row in database.execute("PRAGMA table_info(groups)")}


def test_a_group_that_went_has_no_life(tmp_path: Path) -> None:
    assert kept_life(tmp_path, Key(1, 1), RunCurves(tmp_path).moments) is None
