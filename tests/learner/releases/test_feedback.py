"""Late rewards: each once, over restarts, by who was answered; and taken out for training, each into one file."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from learner.releases.feedback import FILE, FeedbackDamaged, FeedbackStore, key_hash, rows_in
from learner.releases.taking import FormerUnfinished, NothingRated, take, taken
from protocol.feedback import Feedback, ServedCompletion
from services.append_file import AppendFile
from services.http.refusals import RequestRefused

KEY = "k" * 32
ROOM = 1 << 20
ROOT = str(Path(__file__).parents[3])


def answer(name: str, *, version: str = "1.10", until: str | None = None, at: float = 100.0) -> ServedCompletion:
    return ServedCompletion(
        id=name, key_hash=key_hash(KEY), version=version, until=until or version, served_at=at,
        prompt=[{"role": "user", "content": "2+2="}], choices=("4", "5"),
    )  # fmt: skip


def rate(store: FeedbackStore, name: str, reward: float = 1.0, *, key: str = KEY, choice: int = 0) -> str:
    return store.rate(Feedback(id=name, key=key, reward=reward, choice=choice)).outcome


@pytest.fixture
def store(tmp_path: Path) -> FeedbackStore:
    return FeedbackStore(tmp_path, room_bytes=ROOM)


def test_a_reward_days_later_and_after_restarts_is_kept_once_with_its_version(tmp_path: Path) -> None:
    FeedbackStore(tmp_path, room_bytes=ROOM).served(answer("chatcmpl-1"))
    assert rate(FeedbackStore(tmp_path, room_bytes=ROOM), "chatcmpl-1") == "kept"
    again = FeedbackStore(tmp_path, room_bytes=ROOM)
    assert rate(again, "chatcmpl-1") == "repeated"
    again.served(answer("chatcmpl-1", version="1.20"))
    (row,) = rows_in(tmp_path / FILE)
    assert (row["version"], row["prompt"][0]["content"], row["completion"], row["label"]) == ("1.10", "2+2=", "4", True)
    assert again.rewards("1.10", 0.0) == [1.0]


def test_the_choices_of_an_answer_are_rated_apart(store: FeedbackStore, tmp_path: Path) -> None:
    store.served(answer("chatcmpl-1"))
    assert (rate(store, "chatcmpl-1"), rate(store, "chatcmpl-1", 0.0, choice=1)) == ("kept", "kept")
    assert [(row["completion"], row["label"]) for row in rows_in(tmp_path / FILE)] == [("4", True), ("5", False)]


def test_what_is_forged_unknown_or_contradicts_itself_is_refused_by_name(store: FeedbackStore, tmp_path: Path) -> None:
    store.served(answer("chatcmpl-1"))
    rate(store, "chatcmpl-1", 1.0)
    for name, key, reward, choice, kind in (
        ("chatcmpl-2", KEY, 1.0, 0, "unknown_completion"),
        ("chatcmpl-1", "x" * 32, 1.0, 0, "wrong_key"),
        ("chatcmpl-1", KEY, 0.0, 0, "rated_already"),
        ("chatcmpl-1", KEY, 1.0, 2, "no_such_choice"),
    ):
        with pytest.raises(RequestRefused) as refusal:
            rate(store, name, reward, key=key, choice=choice)
        assert refusal.value.problem.kind == kind
    assert len(list(rows_in(tmp_path / FILE))) == 1


def test_answers_beyond_the_room_are_forgotten_the_oldest_first_and_their_rewards_stay(tmp_path: Path) -> None:
    store = FeedbackStore(tmp_path, room_bytes=16 * 600)
    for number in range(200):
        store.served(answer(f"chatcmpl-{number}"))
        if number == 0:
            rate(store, "chatcmpl-0")
    assert sum(path.stat().st_size for path in tmp_path.glob("served-*")) <= 17 * 600
    assert rate(store, "chatcmpl-199") == "kept"
    with pytest.raises(RequestRefused, match="it was never answered here, or so long ago"):
        rate(store, "chatcmpl-0")
    assert len(list(rows_in(tmp_path / FILE))) == 2
    assert rate(FeedbackStore(tmp_path, room_bytes=16 * 600), "chatcmpl-199") == "repeated"


def test_rewards_of_a_trial_are_those_of_its_time_and_of_one_version_alone(store: FeedbackStore) -> None:
    for name, until, at in (("before", "1.10", 50.0), ("mixed-one", "1.20", 150.0), ("within", "1.10", 150.0)):
        store.served(answer(f"chatcmpl-{name}", until=until, at=at))
        rate(store, f"chatcmpl-{name}", 0.5)
    assert store.rewards("1.10", 100.0) == [0.5]
    assert store.rewards("1.20", 100.0) == []


def test_who_reads_rewards_waits_for_no_disk(
    store: FeedbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop reads them, each second."""
    store.served(answer("chatcmpl-1"))
    begun, ended = threading.Event(), threading.Event()
    sync = AppendFile.sync

    def slow(file: AppendFile) -> None:
        begun.set()
        ended.wait(10)
        sync(file)

    monkeypatch.setattr(AppendFile, "sync", slow)
    with ThreadPoolExecutor(2) as threads:
        rating = threads.submit(rate, store, "chatcmpl-1")
        assert begun.wait(10)
        try:
            assert threads.submit(store.rewards, "1.10", 0.0).result(timeout=5) == []
        finally:
            ended.set()
        assert rating.result() == "kept"
    assert store.rewards("1.10", 0.0) == [1.0]


def test_a_start_holds_the_rewards_of_the_versions_that_are_kept_and_no_others_in_memory(tmp_path: Path) -> None:
    """4,000 rows of others are read one by one: held, they would be half a megabyte."""
    row = {"id": "chatcmpl-0", "choice": 0, "completion": "4", "reward": 0.25, "served_at": 100.0}
    row |= {"version": "1.1", "until": "1.1"}
    lines = [json.dumps({**row, "id": f"chatcmpl-{number}", "served_at": number / 7}) + "\n" for number in range(4000)]
    kept = json.dumps({**row, "version": "1.2", "until": "1.2"}) + "\n"
    (tmp_path / FILE).write_text("".join([*lines, kept]))
    del lines
    gc.collect()
    tracemalloc.start()
    try:
        store = FeedbackStore(tmp_path, room_bytes=ROOM, versions={"1.2"})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (store.rewards("1.1", 0.0), store.rewards("1.2", 0.0)) == ([], [0.25])
    assert peak < 200_000
    assert FeedbackStore(tmp_path, room_bytes=ROOM).rewards("1.1", 0.0)[:1] == [0.25]


def test_rewards_of_versions_that_are_not_kept_take_no_memory(store: FeedbackStore, tmp_path: Path) -> None:
    for version in ("1.10", "1.20"):
        store.served(answer(f"chatcmpl-{version}", version=version))
        rate(store, f"chatcmpl-{version}")
    store.keep_rewards({"1.20", "1.30"})
    assert (store.rewards("1.10", 0.0), store.rewards("1.20", 0.0)) == ([], [1.0])
    assert len(list(rows_in(tmp_path / FILE))) == 2


def test_each_rated_answer_is_taken_into_one_file(store: FeedbackStore, tmp_path: Path) -> None:
    for number in range(5):
        store.served(answer(f"chatcmpl-{number}"))
    for number in range(3):
        rate(store, f"chatcmpl-{number}")
    assert take(tmp_path, tmp_path / "one.jsonl") == (3, [])
    with pytest.raises(NothingRated):
        take(tmp_path, tmp_path / "two.jsonl")
    rate(store, "chatcmpl-4")
    with pytest.raises(FileExistsError):
        take(tmp_path, tmp_path / "one.jsonl")
    assert take(tmp_path, tmp_path / "two.jsonl") == (1, [])
    lines = [line for name in ("one", "two") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    taken = [json.loads(line)["id"] for line in lines]
    assert taken == [f"chatcmpl-{number}" for number in (0, 1, 2, 4)]


def test_an_empty_answer_is_in_no_file(store: FeedbackStore, tmp_path: Path) -> None:
    """Its reward counts in trials, but what learns from files refuses a completion without a token."""
    for number, text in enumerate(("4", "", "5")):
        store.served(answer(f"chatcmpl-{number}").model_copy(update={"choices": (text,)}))
        rate(store, f"chatcmpl-{number}", 0.0)
    assert take(tmp_path, tmp_path / "one.jsonl") == (2, [])
    taken_texts = [json.loads(line)["completion"] for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert taken_texts == ["4", "5"]
    assert store.rewards("1.10", 0.0) == [0.0, 0.0, 0.0]
    with pytest.raises(NothingRated):
        take(tmp_path, tmp_path / "two.jsonl")


def test_an_answer_that_was_cut_off_is_in_no_file(store: FeedbackStore, tmp_path: Path) -> None:
    """It would be trained with an end token that the policy never said there."""
    store.served(answer("chatcmpl-1").model_copy(update={"cut_off": (1,)}))
    for choice in (0, 1):
        rate(store, "chatcmpl-1", choice=choice)
    assert take(tmp_path, tmp_path / "one.jsonl") == (1, [])
    assert json.loads((tmp_path / "one.jsonl").read_text())["completion"] == "4"


@pytest.mark.parametrize("line", ["not a row", "[]", "{}", "\xff"])
def test_a_line_that_is_no_rated_answer_is_named_and_nothing_is_taken(
    line: str, store: FeedbackStore, tmp_path: Path
) -> None:
    store.served(answer("chatcmpl-1"))
    rate(store, "chatcmpl-1")
    with (tmp_path / FILE).open("ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    with pytest.raises(FeedbackDamaged, match=rf"{FILE}, line 2, is no rated answer: .* take it out"):
        FeedbackStore(tmp_path, room_bytes=ROOM)
    with pytest.raises(FeedbackDamaged, match=rf"{FILE}, behind byte 0, is no rated answer"):
        take(tmp_path, tmp_path / "one.jsonl")
    assert [path.name for path in tmp_path.glob("one*")] == []
    assert not (tmp_path / "feedback_taken.jsonl").exists()


def test_a_kill_while_a_file_is_taken_leaves_it_to_the_next_call(
    store: FeedbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.served(answer("chatcmpl-1"))
    store.served(answer("chatcmpl-2"))
    rate(store, "chatcmpl-1")
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            take(tmp_path, tmp_path / "one.jsonl")
    rate(store, "chatcmpl-2")
    assert take(tmp_path, tmp_path / "two.jsonl") == (1, [tmp_path / "one.jsonl"])
    rows = [json.loads((tmp_path / f"{name}.jsonl").read_text())["id"] for name in ("one", "two")]
    assert rows == ["chatcmpl-1", "chatcmpl-2"]


def test_a_file_that_was_moved_or_deleted_is_not_written_a_second_time(store: FeedbackStore, tmp_path: Path) -> None:
    store.served(answer("chatcmpl-1"))
    store.served(answer("chatcmpl-2"))
    rate(store, "chatcmpl-1")
    take(tmp_path, tmp_path / "one.jsonl")
    (tmp_path / "one.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(NothingRated):
        take(tmp_path, tmp_path / "one.jsonl")
    rate(store, "chatcmpl-2")
    assert take(tmp_path, tmp_path / "one.jsonl") == (1, [])
    assert "chatcmpl-2" in (tmp_path / "one.jsonl").read_text()


def test_a_file_that_cannot_be_written_takes_nothing(store: FeedbackStore, tmp_path: Path) -> None:
    store.served(answer("chatcmpl-1"))
    rate(store, "chatcmpl-1")
    with pytest.raises(FileNotFoundError):
        take(tmp_path, tmp_path / "no such folder" / "one.jsonl")
    assert taken(tmp_path) == []
    assert take(tmp_path, tmp_path / "one.jsonl") == (1, [])


def test_a_file_that_was_cut_off_and_whose_folder_is_gone_is_named_until_it_is_there(
    store: FeedbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.served(answer("chatcmpl-1"))
    rate(store, "chatcmpl-1")
    (elsewhere := tmp_path / "stick").mkdir()
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            take(tmp_path, elsewhere / "one.jsonl")
    shutil.rmtree(elsewhere)
    with pytest.raises(FormerUnfinished, match=r"stick/one\.jsonl: No such file.*see that .*stick is there"):
        take(tmp_path, tmp_path / "two.jsonl")
    elsewhere.mkdir()
    with pytest.raises(NothingRated, match=r"stick/one\.jsonl is finished now"):
        take(tmp_path, tmp_path / "two.jsonl")
    assert (elsewhere / "one.jsonl").read_text().count("chatcmpl-1") == 1


RATING = """
    import os, signal, sys
    from pathlib import Path
    from learner.journal import files
    from learner.releases.feedback import FeedbackStore
    from protocol.feedback import Feedback
    calls = {"append": "pwrite", "sync": "fdatasync", "folder": "fsync"}
    def rate_and_die(folder):
        when, step = folder.name.split("-")
        name = calls[step]
        real = getattr(os, name)
        def call(*given):
            if when == "after":
                real(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        store = FeedbackStore(folder, room_bytes=1 << 20)
        setattr(files.os, name, call)
        store.rate(Feedback(id="chatcmpl-1", key="k" * 32, reward=1.0))
    for folder in map(Path, sys.argv[1:]):
        child = os.fork()
        if child == 0:
            try:
                rate_and_die(folder)
            finally:
                os._exit(0)
        print(folder.name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_kill_at_any_step_of_a_reward_leaves_it_once_when_it_is_told_again(tmp_path: Path) -> None:
    """In one process that forks for each kill: its imports take longer than all of them."""
    folders = [tmp_path / f"{when}-{step}" for when in ("before", "after") for step in ("append", "sync", "folder")]
    for folder in folders:
        folder.mkdir()
        FeedbackStore(folder, room_bytes=ROOM).served(answer("chatcmpl-1"))
    words = [sys.executable, "-c", textwrap.dedent(RATING), *map(str, folders)]
    ended = subprocess.run(
        words, check=True, env={**os.environ, "PYTHONPATH": ROOT}, timeout=120, capture_output=True, text=True
    )
    assert ended.stdout.splitlines() == [f"{folder.name} {-signal.SIGKILL}" for folder in folders]
    for folder in folders:
        assert rate(FeedbackStore(folder, room_bytes=ROOM), "chatcmpl-1") in ("kept", "repeated"), folder.name
        assert len(list(rows_in(folder / FILE))) == 1, folder.name
