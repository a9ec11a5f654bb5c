from pathlib import Path

import pytest

from learner.page.same_task import (
    MAX_BESIDE,
    MAX_CHARS,
    MAX_CHOICES,
    MAX_WORDS,
    Member,
    cut_short,
    differences,
    same_task,
)
from learner.page.store import TrajectoryStore
from tests.learner.page.made_run import group, make_run, taken
from tests.learner.page.test_routes import _client

NASTY = "<script>alert(1)</script>\x00\x1b[31m\u202egnp.exe\u2066 \ud7ff"


def _run(folder: Path, texts: dict[int, tuple[str, ...]]) -> Path:
    """A run that keeps task 0 of `words` at these steps, with a completion for each text: the last one is the best."""
    folder.mkdir()
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0) as store:
        for step, own in texts.items():
            store.put(taken(step, group(0, step=step, texts=own)))
            store.wait_idle()
    return folder


def _parts(folder: Path, member: Member = "best", steps: tuple[int, ...] = ()) -> list[list[tuple[str, str]]]:
    return [one["parts"] for one in same_task(folder, "words", 0, steps=steps, member=member)["shown"]]


def test_words_that_are_new_and_gone_stand_at_their_places() -> None:
    assert differences("the cat sat on the mat", "the black cat sat on a mat!") == [
        ("same", "the"),
        ("new", " black"),
        ("same", " cat sat on"),
        ("gone", " the mat"),
        ("new", " a mat!"),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""), ("", "a b"), ("a b", ""), ("a b", "a  b "), ("a a a", "a a"), ("x a y", "x b y"),
        (" lead", "lead"), ("a " * 900 + "b", "a " * 901), ("1 2 3 4", "4 3 2 1"),
    ],
)  # fmt: skip
def test_the_differences_have_all_words_of_both(before: str, after: str) -> None:
    found = differences(before, after)

    assert "".join(text for kind, text in found if kind != "gone").rstrip() == after.rstrip()
    assert " ".join(text for kind, text in found if kind != "new").split() == before.split()


def test_words_that_repeat_are_still_compared() -> None:
    assert differences("a " * 900 + "b", "a " * 900 + "c") == [
        ("same", ("a " * 900).rstrip()),
        ("gone", " b"),
        ("new", " c"),
    ]


def test_a_long_text_is_cut_before_it_is_compared() -> None:
    assert cut_short("word " * (MAX_WORDS + 3)) == (("word " * MAX_WORDS).rstrip(), 16)
    assert cut_short("x" * (MAX_CHARS + 5)) == ("x" * MAX_CHARS, 5)
    assert cut_short("as it is \n") == ("as it is \n", 0)


def test_the_first_the_middle_and_the_last_kept_step_stand_beside_each_other(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", {step: ("bad", f"answer {step}") for step in (2, 5, 6, 9, 12)})

    found = same_task(folder, "words", 0)

    assert [(one["step"], one["reward"], one["reward_mean"]) for one in found["shown"]] == [
        (2, 1.0, 0.5), (6, 1.0, 0.5), (12, 1.0, 0.5),
    ]  # fmt: skip
    assert [one["versions"] for one in found["shown"]] == [["1.0", "1.1"], ["1.4", "1.5"], ["1.10", "1.11"]]
    assert [choice["step"] for choice in found["choices"]] == [2, 5, 6, 9, 12]
    assert _parts(folder) == [
        [("same", "answer 2")],
        [("same", "answer"), ("gone", " 2"), ("new", " 6")],
        [("same", "answer"), ("gone", " 6"), ("new", " 12")],
    ]


def test_the_nearest_kept_steps_are_shown_each_once(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", dict.fromkeys(range(10, 80, 10), ("one",)))

    found = same_task(folder, "words", 0, steps=(68, 11, 9, 31))
    many = same_task(folder, "words", 0, steps=tuple(range(10, 80, 10)))

    assert [one["step"] for one in found["shown"]] == [10, 30, 70]
    assert len(many["shown"]) == MAX_BESIDE
    assert same_task(folder, "words", 7)["shown"] == []
    assert same_task(folder, "sums", 0)["choices"] == []


def test_a_member_is_the_best_the_worst_or_the_first(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", {1: ("low", "middle", "high")})

    assert [_parts(folder, member) for member in ("best", "worst", "first")] == [
        [[("same", "high")]], [[("same", "low")]], [[("same", "low")]],
    ]  # fmt: skip


def test_a_damaged_part_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", {1: ("one",)})
    (folder / "trajectories" / "part-0000000009.db").write_bytes(b"this is no database" * 1000)

    found = same_task(folder, "words", 0)

    assert [one["step"] for one in found["shown"]] == [1]
    assert ["part-0000000009.db" in text for text in found["unreadable"]] == [True]


def test_no_more_groups_are_offered_than_a_list_can_hold(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", dict.fromkeys(range(1, MAX_CHOICES + 101), ("one",)))

    steps = [choice["step"] for choice in same_task(folder, "words", 0)["choices"]]

    assert len(steps) == len(set(steps)) == MAX_CHOICES
    assert (steps[0], steps[-1]) == (1, MAX_CHOICES + 100)


async def test_the_page_is_told_of_a_task_at_several_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=30, texts=("word1", NASTY))
    asked: dict[str, str | int] = {"environment": "sums", "task": 3}
    faults: list[dict[str, str | int]] = [{"steps": "one"}, {"task": 1 << 70}, {"member": "any"}, {"run": 4}]

    async with _client(folder) as client:
        found = (await client.get("/page/data/same_task", params={**asked, "steps": "1,30"})).json()
        wrong = [(await client.get("/page/data/same_task", params={**asked, **more})).status_code for more in faults]

    assert [one["step"] for one in found["shown"]] == [1, 29]
    assert found["shown"][1]["parts"] == [["same", NASTY.replace("\0", "\u2400")]]
    assert wrong == [422, 422, 422, 404]
