"""The page's form of a what-if: real HTTP on loopback, the real trainer, and a process of its own that trains."""

import asyncio
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest

from learner.command import to_replay
from learner.page.store import TrajectoryStore
from learner.page.what_if_results import MAX_GROUPS, keys_of, result_of
from learner.page.what_if_runs import FOLDER, LOCK, WhatIfRunner
from learner.training.ranks import CommandChannel
from learner.what_if_form import _literals, spelled
from services.run_lock import RunLock
from tests.learner.page.chromium import Viewed
from tests.learner.page.made_run import group, make_run, step_line, taken, write_lines
from tests.learner.page.untrained_run import untrained
from tests.learner.page.what_if_page import DEADLINE_S, KEPT_STEPS, WIDE, ended, kept_run, served
from tests.learner.training.tiny_model import write_tiny_llama
from tests.learner.what_if_run import STEPS, TrainedRun

TRAINS = pytest.mark.timeout(900)  # torch is loaded twice, and the process that trains leaves the cores to all others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), tied=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path, commands: CommandChannel) -> TrainedRun:
    return kept_run(tmp_path_factory.mktemp("runs"), model, commands)


@pytest.fixture
def run(tmp_path: Path, trained: TrainedRun) -> TrainedRun:
    """A copy for each test."""
    return replace(trained, folder=shutil.copytree(trained.folder, tmp_path / "runs" / "one"))


def files_in(folder: Path) -> dict[Path, bytes]:
    """Everything but what-ifs, and what SQLite keeps beside a file that somebody reads."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".db-wal", ".db-shm"))
    return {path: path.read_bytes() for path in found if FOLDER not in path.parts}


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, str(answer.json()["error"]["message"])


@TRAINS
async def test_a_form_trains_in_a_process_of_its_own_and_shows_both_curves_and_the_groups(run: TrainedRun) -> None:
    before = files_in(run.folder)
    async with served(run.folder) as client:
        form = (await client.get("/page/data/what_if_form")).json()
        fields = {each["key"]: each for each in form["fields"]}
        assert form["refused"] == ""
        assert fields["algo.clip_high"]["value"] == "0.01"
        assert fields["algo.clip_high"]["default"] == "0.2"
        assert "groups_per_step" not in fields

        answer = await client.post("/page/what_if", json={"changes": WIDE})
        assert (answer.status_code, answer.json()) == (202, {"name": "what-if-1"})
        again = await client.post("/page/what_if", json={"changes": WIDE})
        assert refusal(again) == (
            409, "what-if-1 is being trained: one at a time for a run. Wait for its end, or stop it",
        )  # fmt: skip
        (pid,) = trainers_of(run.folder)
        await has_given_way(pid)
        found = await ended(client, "what-if-1")
        assert found["state"] == "done", found["why"]
        assert found["changes"] == ["algo.clip_low: 0.01 → 1.0", "algo.clip_high: 0.01 → 1000000.0"]
        result = (await client.get("/page/data/what_if?name=what-if-1")).json()

    assert files_in(run.folder) == before
    assert result["steps"] == [1, 2, 3, 4]
    assert (result["first_apart"], result["unlike"]) == (1, "")
    curves = {each["name"]: each for each in result["curves"]}
    held, free = curves["clip_fraction"]["run"], curves["clip_fraction"]["now"]
    assert held == [each["clip_fraction"] for each in run.lines()]
    assert held[0] > 0.2
    assert free == [0.0] * STEPS
    assert curves["loss"]["run"] == [each["loss"] for each in run.lines()]
    _check_groups(run, result)


def _check_groups(run: TrainedRun, result: dict[str, Any]) -> None:
    written = [json.loads(line) for line in _file(run, "groups.jsonl").read_text().splitlines()]
    most = sorted((each for each in written if each["pull_change"]), key=lambda each: -each["pull_change"])
    assert [(each["step"], each["lease_id"]) for each in result["groups"]] == [
        (each["step"], each["lease_id"]) for each in most
    ]
    assert (result["group_count"], result["changed_count"]) == (2 * STEPS, len(most))
    for each in result["groups"]:  # two a step, written to the first part in their order
        assert each["key"] == (f"1-{each['lease_id'] + 1}" if each["step"] <= KEPT_STEPS else None)


def _file(run: TrainedRun, name: str) -> Path:
    return run.folder / FOLDER / "what-if-1" / name


def trainers_of(folder: Path) -> list[int]:
    """The processes that hold the lock of its what-ifs."""
    lock, found = str(folder / FOLDER / LOCK), []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if lock in {os.readlink(each) for each in (path / "fd").iterdir()}:
                found.append(int(path.name))
    return found


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.1)


async def has_given_way(pid: int) -> None:
    """Waits until the process is as nice as it can be."""
    await until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19)


async def none_trains(folder: Path) -> None:
    """Waits until the last one has ended."""
    await until(lambda: not trainers_of(folder))


@TRAINS
async def test_a_what_if_ends_with_its_page_and_with_a_stop_and_says_so(run: TrainedRun) -> None:
    async with served(run.folder) as client:
        assert (await client.post("/page/what_if", json={"changes": WIDE})).status_code == 202
        (pid,) = trainers_of(run.folder)
        await has_given_way(pid)
        assert (await client.post("/page/what_if/stop", json={"name": "what-if-1"})).status_code == 202
        assert (await ended(client, "what-if-1"))["state"] == "ended"
        assert (await client.post("/page/what_if", json={"changes": WIDE})).json() == {"name": "what-if-2"}
        assert trainers_of(run.folder) != [pid]
    await none_trains(run.folder)
    async with served(run.folder) as client:
        states = [each["state"] for each in (await client.get("/page/data/what_ifs")).json()]
    assert states == ["ended", "ended"]


@TRAINS
async def test_a_what_if_dies_with_the_process_of_its_page(run: TrainedRun) -> None:
    """As if by SIGKILL: nothing of the page's own runs any more."""
    with Viewed(run.folder) as viewed:
        async with httpx.AsyncClient(base_url=viewed.url, timeout=60) as client:
            assert (await client.post("/page/what_if", json={"changes": WIDE})).status_code == 202
        (pid,) = trainers_of(run.folder)
        await has_given_way(pid)
        viewed.end(signal.SIGKILL)
        await none_trains(run.folder)


@TRAINS
async def test_a_run_that_goes_on_is_trained_as_far_as_its_journal_reaches(run: TrainedRun) -> None:
    with await RunLock.held(run.folder):
        async with served(run.folder) as client:
            assert (await client.get("/page/data/what_if_form")).json()["refused"] == ""
            await client.post("/page/what_if", json={"changes": WIDE, "groups": False})
            found = await ended(client, "what-if-1")
            assert found["state"] == "done", found["why"]
            result = (await client.get("/page/data/what_if?name=what-if-1")).json()
    assert (result["steps"], result["compared_groups"], result["groups"]) == ([1, 2, 3, 4], False, [])
    assert sorted(path.name for path in (run.folder / FOLDER).iterdir()) == [
        LOCK, "what-if-1", "what-if-1.json", "what-if-1.log",
    ]  # fmt: skip


@TRAINS
async def test_a_failure_of_the_training_is_told_with_what_it_said(
    tmp_path: Path, model: Path, commands: CommandChannel
) -> None:
    run = kept_run(tmp_path / "runs", model, commands, checkpoint_at=2)
    async with served(run.folder) as client:
        needs = {"changes": ["algo.kl_coefficient=0.1", "training.reference.mode=ema"], "version": 2}
        assert (await client.post("/page/what_if", json=needs)).status_code == 202
        found = await ended(client, "what-if-1")
    assert (found["state"], len(found["changes"]), found["changes"][0]) == (
        "ended", 2, "algo.kl_coefficient: 0.0 → 0.1",
    )  # fmt: skip
    assert "checkpoint-00000002 does not hold what these settings need" in found["why"]


@pytest.mark.parametrize(
    "change",
    [
        "algo.clip_hihg=0.3", "algo.clip_high", "algo.clip_high=-1", "algo.clip_high=wide", "algo.clip_high=0.01",
        "groups_per_step=4", "algo=sft", "algo=gspo2", "training.optimizer.learning_rate=", "--to=elsewhere", "\n",
    ],
)  # fmt: skip
async def test_bad_settings_get_the_message_of_the_command_line(
    tmp_path: Path, model: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = untrained(tmp_path / "one", model)
    with pytest.raises(SystemExit):
        to_replay(["replay", str(folder), f"--set={change}"])
    said = capsys.readouterr().err
    async with served(folder) as client:
        answer = await client.post("/page/what_if", json={"changes": [change]})

    status, message = refusal(answer)
    assert (status, f"learner replay: {message}\n") == (422, said)
    assert not (folder / FOLDER).exists()


async def test_a_page_names_no_code_to_run(tmp_path: Path, model: Path) -> None:
    folder = untrained(tmp_path / "one", model)
    async with served(folder) as client:
        code = {"changes": ["algo=custom", "algo.path=os:getcwd"]}
        status, message = refusal(await client.post("/page/what_if", json=code))
        (kinds,) = [
            each["choices"]
            for each in (await client.get("/page/data/what_if_form")).json()["fields"]
            if each["key"] == "algo.type"
        ]
    assert status == 422
    assert "a page cannot name code" in message
    assert "gspo" in kinds
    assert not {"custom", "sft", "dpo"} & set(kinds)


async def test_a_run_without_journal_and_one_whose_gpu_is_in_use_are_refused_by_name(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = untrained(tmp_path / "without", model, checkpoint={"journal": False})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with_gpu = untrained(tmp_path / "with_gpu", model)
    for folder, reason in ((without, "kept no journal"), (with_gpu, "train on a GPU of this machine (5)")):
        with await RunLock.held(folder):
            async with served(folder) as client:
                form = (await client.get("/page/data/what_if_form")).json()
                status, message = refusal(await client.post("/page/what_if", json={"changes": WIDE}))
        assert reason in form["refused"]
        assert (status, message) == (422, form["refused"])
        assert not (folder / FOLDER).exists()
    async with served(with_gpu) as client:
        assert (await client.get("/page/data/what_if_form")).json()["refused"] == ""


async def test_another_page_of_the_run_is_told_which_one_is_being_trained(tmp_path: Path, model: Path) -> None:
    folder = untrained(tmp_path / "one", model)
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "what-if-7.log").write_text("")
    with (folder / FOLDER / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with served(folder) as client:
            assert [each["state"] for each in (await client.get("/page/data/what_ifs")).json()] == ["running"]
            status, message = refusal(await client.post("/page/what_if", json={"changes": WIDE}))
            stopped = refusal(await client.post("/page/what_if/stop", json={"name": "what-if-7"}))
    assert status == 409
    assert message.startswith("what-if-7 is being trained")
    assert stopped == (409, "what-if-7 is being trained by another page of this run: stop it there")
    assert WhatIfRunner(folder).running() is None


async def test_only_who_may_read_the_page_can_train_and_only_with_a_body_that_no_other_page_can_send(
    tmp_path: Path, model: Path
) -> None:
    folder = untrained(tmp_path / "one", model)
    body, plain = json.dumps({"changes": WIDE}), {"content-type": "text/plain"}
    as_json = {"content-type": "application/json"}
    async with served(folder) as client:
        foreign = [
            await client.post("/page/what_if", content=body, headers={**as_json, "host": "evil.example"}),
            await client.post("/page/what_if", content=body, headers={**as_json, "origin": "https://evil.example"}),
            await client.post("/page/what_if", content=body, headers=plain),
        ]
    async with served(folder, token="a long enough secret") as client:
        stranger = [
            await client.get(f"/page/data/{name}") for name in ("what_ifs", "what_if_form", "what_if?name=what-if-1")
        ] + [await client.post(f"/page/{name}", json={"changes": WIDE}) for name in ("what_if", "what_if/stop")]
        await client.post("/page/login", json={"token": "a long enough secret"})
        assert (await client.get("/page/data/what_ifs")).json() == []
        typed = await client.post("/page/what_if", content=body, headers=plain)
    assert [each.status_code for each in foreign] == [403, 403, 415]
    assert {each.status_code for each in stranger} == {401}
    assert typed.status_code == 415
    assert not (folder / FOLDER).exists()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/page/data/what_if?name=what-if-1", None, 404),
        ("GET", "/page/data/what_if?name=../../etc", None, 404),
        ("GET", "/page/data/what_if_form?run=3", None, 404),
        ("GET", "/page/data/what_ifs?run=-1", None, 404),
        ("POST", "/page/what_if", {"changes": []}, 422),
        ("POST", "/page/what_if", {"changes": WIDE, "to": "/tmp/x"}, 422),
        ("POST", "/page/what_if", {"changes": WIDE, "version": -1}, 422),
        ("POST", "/page/what_if", {"changes": WIDE, "run": 5}, 404),
        ("POST", "/page/what_if", {"changes": ["x" * 3000]}, 422),
        ("POST", "/page/what_if/stop", {"run": 5, "name": "what-if-1"}, 404),
        ("POST", "/page/what_if/stop", {"name": "what-if-1"}, 409),
        ("POST", "/page/what_if/stop", {"run": 0}, 422),
    ],
)
async def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    async with served(make_run(tmp_path / "one", steps=1)) as client:
        answer = await client.request(method, path, json=body)
    assert answer.status_code == status


def test_a_group_is_found_by_step_and_lease_in_the_newest_part_that_has_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", steps=3)
    assert keys_of(folder, [(1, 2), (1, 3), (3, 6), (2, 6), (9, 9)]) == ["1-1", "1-2", "1-5", None, None]
    with TrajectoryStore(folder, budget_bytes=1 << 30, share=1.0, part_bytes=1) as store:
        store.put(taken(4, group(8, step=4)))
        store.wait_idle()
    assert keys_of(folder, [(4, 8)]) == [keys_of(folder, [(4, 8), (1, 2)])[0]]


def test_of_many_groups_those_that_changed_most_are_shown_and_of_many_steps_some_evenly(tmp_path: Path) -> None:
    made, what_if = tmp_path / "one", tmp_path / "one" / FOLDER / "what-if-1"
    what_if.mkdir(parents=True)
    write_lines(made, [step_line(step, loss=0.5, entropy=1.0) for step in range(1, 5001)])
    write_lines(
        what_if, [{"kind": "step", "step": step, "loss": 0.5 + (step > 3), "entropy": 1.0} for step in range(1, 5001)]
    )
    groups = [{"step": n, "lease_id": n, "pull_change": float(n % 100)} for n in range(1, 301)]
    (what_if / "groups.jsonl").write_text("".join(json.dumps(each) + "\n" for each in groups) + '{"step": 9, "pu')
    found = result_of(made, what_if)

    assert (len(found["steps"]), found["steps"][0], found["steps"][-1]) == (2000, 1, 5000)
    assert (found["first_apart"], [each["name"] for each in found["curves"]]) == (4, ["loss"])
    assert found["same"] == ["entropy"]
    assert (found["group_count"], found["changed_count"], len(found["groups"])) == (300, 297, MAX_GROUPS)
    assert [each["step"] for each in found["groups"][:4]] == [99, 199, 299, 98]


def test_a_value_is_spelled_as_a_command_line_takes_it() -> None:
    values = [None, True, 3e-5, "std", (0.5, 5.0), {"right": 1.0}]
    assert [spelled(each) for each in values] == ["none", "true", "3e-05", "std", "[0.5, 5.0]", '{"right": 1.0}']


@pytest.mark.parametrize(
    ("kind", "listed"),
    [
        (Literal["a", "b"], ("a", "b")), (Literal["a"] | None, ("a",)), (Annotated[Literal[0, 1], "x"], ("0", "1")),
        (float | Literal["auto"], ()), (float | None, ()), (str, ()), (Literal["a"] | Literal["b"], ("a", "b")),
    ],
)  # fmt: skip
def test_a_setting_has_choices_where_all_its_values_are_listed(kind: object, listed: tuple[str, ...]) -> None:
    assert _literals(kind) == listed
