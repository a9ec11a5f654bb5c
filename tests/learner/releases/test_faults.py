"""Faults around releases: doubted generators, damaged files, a disk that is full, and rows of two threads."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from learner.releases.history import FILE, ReleaseEvent, ReleaseHistory, read_rows, state_of
from learner.releases.kept_weights import KeptWeights, TaskScores
from learner.releases.making import releases_without_learner
from learner.releases.releases import Releases
from learner.weights.fleet import JoinRefused
from learner.weights.senders import own_buckets
from services.append_file import AppendFile
from services.http.refusals import RequestRefused
from tests.learner.generators import ScriptedGenerator
from tests.learner.releases.evaluations import evaluation
from tests.learner.releases.promoting import CONFIG, packed
from tests.learner.releases.test_releases import packed as packed_of
from tests.learner.releases.test_releases import releasing
from tests.learner.weights.publishing import adapter, base_weights

TRIALS = CONFIG.model_copy(update={"canary_rewards": 5, "keep": 3})


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def damage(run: Path, version: str, *, name: str = "0.bucket") -> None:
    path = run / "releases" / version / name
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


@asynccontextmanager
async def released(run: Path, *solved: int, config: object = CONFIG) -> AsyncIterator[Releases]:
    """Releases in which versions 0, 10, 20 ... were judged, with so many solved tasks."""
    releases = releases_without_learner(
        config, run=run, secret_key_file=None, may_write=lambda: None  # type: ignore[arg-type]
    )  # fmt: skip
    for number, count in enumerate(solved):
        await releases.judge(evaluation(10 * number, solved=count), await packed(10 * number))
    yield releases


def state_in(run: Path) -> tuple[str | None, str | None]:
    state = ReleaseHistory(run / "releases").state
    return state.released, state.trial


async def test_a_generator_of_users_whose_proof_is_doubted_is_expelled(tmp_path: Path) -> None:
    async with ScriptedGenerator("u", gap=5.0).running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.judge(0, solved=5)
        await ours.until(lambda: not ours.releases.status().generators)
        with pytest.raises(JoinRefused, match=r"was expelled: its logprobs of the probe differ by"):
            ours.join(users)


def rows_of(*events: tuple[ReleaseEvent, str]) -> list[dict[str, object]]:
    return [{"event": event, "version": version, "time": 1.0} for event, version in events]


def test_versions_that_were_taken_back_are_withdrawn_until_they_are_released_again() -> None:
    rows = rows_of(("released", "1.20"), ("released", "1.40"), ("released", "1.60"), ("rolled_back", "1.40"))
    assert state_of(rows).withdrawn == ("1.60",)
    assert state_of([*rows, *rows_of(("rolled_back", "1.20"))]).withdrawn == ("1.60", "1.40")
    assert state_of([*rows, *rows_of(("rolled_back", "1.60"))]).withdrawn == ("1.40",)
    assert state_of([*rows, *rows_of(("released", "1.80"))]).withdrawn == ("1.60",)


async def test_damage_after_a_rollback_does_not_bring_the_withdrawn_version_back(tmp_path: Path) -> None:
    async with released(tmp_path, 0, 8, 18, config=CONFIG.model_copy(update={"keep": 2})):
        assert state_in(tmp_path)[0] == "1.20"
    async with released(tmp_path) as releases:
        await releases.roll_back("10", reason="", wait_s=0)
        assert KeptWeights(tmp_path).versions() == ["1.0", "1.10", "1.20"], "a way back is kept, though keep is 1"
    damage(tmp_path, "1.10")
    async with released(tmp_path, config=CONFIG.model_copy(update={"keep": 3})) as later:
        await later.open()
        assert state_in(tmp_path)[0] == "1.0"
        await later.roll_back("20", reason="by name", wait_s=0)
        assert state_in(tmp_path)[0] == "1.20"


async def test_a_first_proof_of_a_canary_binds_generators_of_users(tmp_path: Path) -> None:
    async with (
        ScriptedGenerator("c").running() as canary,
        ScriptedGenerator("u", loads_wrong=True).running() as users,
        releasing(tmp_path) as ours,
    ):
        ours.join(canary, channel="canary")
        await ours.judge(0, solved=5)
        await ours.until(lambda: ours.releases.status().generators[0].same_as_first)
        ours.join(users)
        await ours.until(lambda: users.version == "1.0")
        await ours.until(lambda: [each.generator_id for each in ours.releases.status().generators] == ["c"])
        with pytest.raises(JoinRefused, match=r"and was .* when that version was proven first"):
            ours.join(users)


class _SlowFile(AppendFile):
    """Looks for its end some time before it is written to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        time.sleep(0.01)


def test_rows_of_several_threads_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.releases.history.AppendFile", _SlowFile)
    history = ReleaseHistory(tmp_path)
    threads = [threading.Thread(target=history.add, args=("served", f"1.{number}")) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_rows(tmp_path)) == len(history.rows) == 6


async def test_the_event_loop_does_not_wait_for_the_row_of_a_proof(tmp_path: Path) -> None:
    wrote: list[int] = []
    releases = releases_without_learner(
        CONFIG, run=tmp_path, secret_key_file=None, may_write=lambda: wrote.append(threading.get_ident())
    )
    for generator in ("a", "b"):
        releases.proven("1.0", generator, "vllm/gloo/1", "0f")
    await releases.noted_proofs()
    assert wrote
    assert threading.get_ident() not in wrote
    assert [row["generator"] for row in read_rows(tmp_path / "releases")] == ["a"]


@pytest.mark.parametrize("event", ["released", "trial"])
async def test_a_full_disk_refuses_a_candidate_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    real = ReleaseHistory.add

    def full(self: ReleaseHistory, what: ReleaseEvent, version: str, **more: object) -> None:
        if what == event:
            raise OSError(28, "No space left on device")
        real(self, what, version, **more)

    async with released(tmp_path, 2, config=TRIALS if event == "trial" else CONFIG) as releases:
        monkeypatch.setattr(ReleaseHistory, "add", full)
        await releases.judge(evaluation(10, solved=18), await packed(10))
        assert state_in(tmp_path) == ("1.0", None)
        last = read_rows(tmp_path / "releases")[-1]
        assert (last["event"], last["version"]) == ("refused", "1.10")
        assert "No space left" in last["text"]
        monkeypatch.setattr(ReleaseHistory, "add", real)
        await releases.judge(evaluation(20, solved=18), await packed(20))
        assert "1.20" in state_in(tmp_path)


async def test_files_that_are_damaged_as_they_are_written_refuse_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = KeptWeights.write

    def write(self: KeptWeights, *given: object, **named: object) -> object:
        found = real(self, *given, **named)  # type: ignore[arg-type]
        damage(tmp_path, found.version)
        return found

    async with released(tmp_path, 2) as releases:
        monkeypatch.setattr(KeptWeights, "write", write)
        await releases.judge(evaluation(10, solved=18), await packed(10))
        assert state_in(tmp_path)[0] == "1.0"
        assert "0.bucket has the hash" in read_rows(tmp_path / "releases")[-1]["text"]


async def test_a_start_and_a_change_by_hand_with_a_full_disk_are_told_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with released(tmp_path, 0, 8, 18) as releases:
        pass

    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReleaseHistory, "add", full)
    with pytest.raises(RequestRefused, match="No space left on device"):
        await releases.roll_back("10", reason="", wait_s=0)
    damage(tmp_path, "1.20")
    async with released(tmp_path) as later:
        await later.open()
        assert "No space left on device" in later.problem
        assert later.channel_of("released").version is None, "the row decides"


async def test_a_damaged_candidate_on_trial_is_refused_and_not_released_by_hand(tmp_path: Path) -> None:
    async with released(tmp_path, 2, 18, config=TRIALS) as releases:
        damage(tmp_path, "1.10")
        with pytest.raises(RequestRefused, match=r"version 1\.10 is not released: .*0\.bucket has the hash"):
            await releases.promote("10", wait_s=0)
        releases.rewards = lambda version, since: [1.0] * 5
        await releases.look_at_trial()
        assert state_in(tmp_path) == ("1.0", None)
        assert releases.channel_of("canary").version == "1.0"


async def test_a_refused_candidate_leaves_the_canaries_though_the_released_files_are_damaged(tmp_path: Path) -> None:
    async with released(tmp_path, 2, 18, config=TRIALS) as releases:
        assert releases.channel_of("canary").version == "1.10"
        damage(tmp_path, "1.0")
        releases.rewards = lambda version, since: [0.0 if version == "1.10" else 1.0] * 5
        await releases.look_at_trial()
        assert state_in(tmp_path) == ("1.0", None)
        assert releases.channel_of("canary").version == "1.0"


async def test_time_without_a_learner_does_not_end_a_trial(tmp_path: Path) -> None:
    async with released(tmp_path, 2, 18, config=TRIALS):
        path = tmp_path / "releases" / FILE
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    path.write_text("".join(json.dumps({**row, "time": row["time"] - 1e6}) + "\n" for row in rows))
    async with released(tmp_path, config=TRIALS) as later:
        await later.open()
        await later.look_at_trial()
        assert state_in(tmp_path) == ("1.0", "1.10")
    async with released(tmp_path, config=TRIALS.model_copy(update={"canary_timeout_s": 1e-3})) as short:
        await short.open()
        await asyncio.sleep(0.01)
        await short.look_at_trial()
        assert state_in(tmp_path) == ("1.0", None)


async def test_a_trial_is_over_where_a_later_start_asks_users_for_nothing(tmp_path: Path) -> None:
    async with released(tmp_path, 2, 18, config=TRIALS):
        assert state_in(tmp_path) == ("1.0", "1.10")
    async with released(tmp_path, config=TRIALS.model_copy(update={"canary_rewards": 0})) as later:
        await later.open()
        await later.look_at_trial()
        assert state_in(tmp_path) == ("1.10", None)
        assert later.channel_of("released").version == "1.10"


async def test_scores_of_an_evaluation_with_other_settings_are_not_compared(tmp_path: Path) -> None:
    terms = {"evaluation.temperature": 1.0, "evaluation.success_reward": 1.0}
    async with released(tmp_path) as releases:
        releases._made = lambda _: terms
        await releases.judge(evaluation(0, solved=2), await packed(0))
        releases._made = lambda _: {**terms, "evaluation.temperature": 0.0}
        await releases.judge(evaluation(10, solved=18), await packed(10))
        assert state_in(tmp_path) == ("1.0", None), "greedy answers are better whatever was learned"
        said = ReleaseHistory(tmp_path / "releases").rows[-1]["text"]
        assert "1.0 was evaluated with other settings (evaluation.temperature 1.0, now 0.0)" in said
        assert f"move {tmp_path / 'releases'} away" in said
        releases._made = lambda _: terms
        await releases.judge(evaluation(20, solved=18), await packed(20))
        assert state_in(tmp_path) == ("1.20", None)


async def test_held_out_tasks_that_were_changed_are_said_beside_the_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with released(tmp_path, 2, 15) as releases:
        assert "another prompt" not in caplog.text
        judged = evaluation(20, solved=20)
        others = tuple(replace(task, prompt="r") if task.task_index < 7 else task for task in judged.tasks)
        await releases.judge(replace(judged, tasks=others), await packed(20))
        said = ReleaseHistory(tmp_path / "releases").rows[-1]["text"]
        assert "against version 1.10; 7 tasks have another prompt than when that one was evaluated" in said
        assert "held-out tasks of which 7 have another prompt now" in caplog.text


async def test_base_weights_are_linked_only_from_files_that_are_whole(tmp_path: Path) -> None:
    base, kept = base_weights(), KeptWeights(tmp_path)
    kept.write(await packed_of(adapter(0, base=base)), scores=TaskScores(), made={})
    (path,) = (tmp_path / "releases" / "1.0").glob("base-*.bucket")
    damage(tmp_path, "1.0", name=path.name)
    kept.write(await packed_of(adapter(10, base=base)), scores=TaskScores(), made={})
    (bucket,) = own_buckets(kept.load("1.10").base)
    assert xxhash.xxh3_64_hexdigest(bucket.data.numpy().data) == bucket.spec.xxh3
