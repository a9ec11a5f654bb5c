"""Members that fail, die or hang within a round: who goes on, who catches up, and who leaves."""

import asyncio
import socket
from dataclasses import replace

import pytest
import torch

from services.process import WrongSettings
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import OPTIONS, learner, snapshot

LARGE = 3 << 20
"""Elements of a tensor that no socket buffer holds: who does not take it lets the others wait."""

QUICK = replace(OPTIONS, meet_timeout_s=1.5)
"""For tests in which a meeting is waited out."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_a_member_that_dies_in_prepare_is_left_behind_and_the_others_go_on_serving() -> None:
    dying = ScriptedGenerator("a", dies_in_prepare=lambda prepare: prepare.version == "1.1")
    async with dying.running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        begun = len(ours.history)
        await ours.publish(1, b)
        assert b.versions == ["1.0", "1.1"]
        assert all("b" in serving for serving in ours.history[begun:]), "b was never told to be gone"
        assert [member.generator_id for member in ours.fleet.members()] == ["b"]


@pytest.mark.parametrize("step", ["group", "prepare"])
@pytest.mark.parametrize("elements", [3000, LARGE], ids=["small", "large"])
async def test_a_member_that_hangs_before_it_is_prepared_does_not_keep_the_version_from_the_others(
    step: str, elements: int
) -> None:
    options = replace(OPTIONS, bucket_timeout_s=1.0, meet_timeout_s=1.0)
    async with (
        ScriptedGenerator("a").running() as a,
        ScriptedGenerator("b").running() as b,
        ScriptedGenerator("c").running() as c,
        learner(options) as ours,
    ):
        ours.join(a, b, c)
        await ours.publish(0, a, b, c)
        a.hold[step] = asyncio.Event()
        ours.publisher.offer(snapshot(1, elements=elements, bucket_bytes=1 << 30))
        await ours.until_served(b=1, c=1)
        assert [member.generator_id for member in ours.fleet.members()] == ["b", "c"]
        assert b.weights["embedding"].shape == (elements // 3, 3)
        await ours.publish(2, b, c)


async def test_a_member_that_hangs_in_commit_lets_the_others_serve_at_once_and_counts_when_it_is_done() -> None:
    options = replace(OPTIONS, commit_timeout_s=60.0)
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner(options) as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.hold["commit"] = asyncio.Event()
        await ours.publish(1, b)
        assert ours.fleet.served == 1
        await ours.publish(2, b)
        a.hold.pop("commit").set()
        await ours.until_served(a=2, b=2)
        assert a.versions == ["1.0", "1.1", "1.2"]


@pytest.mark.parametrize(
    ("step", "said"), [("prepare", "generator a is dropped, version 1.1"), ("commit", "a did not commit version 1.1")]
)
async def test_the_silence_of_a_process_does_not_take_its_successor_from_the_fleet(
    caplog: pytest.LogCaptureFixture, step: str, said: str
) -> None:
    async with (
        ScriptedGenerator("a").running() as a,
        ScriptedGenerator("b").running() as b,
        ScriptedGenerator("a", instance="2").running() as again,
        learner() as ours,
    ):
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.hold[step] = asyncio.Event()
        ours.publisher.offer(snapshot(1))
        async with asyncio.timeout(60):
            await a.preparing.wait()
        ours.join(again)
        await ours.until(lambda: said in caplog.text)
        await ours.publish(2, again, b)
        assert [member.instance for member in ours.fleet.members()] == ["a-2", "b-1"]


async def test_a_member_whose_commit_never_ends_leaves_after_the_deadline() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.hold["commit"] = asyncio.Event()
        await ours.publish(1, b)
        await ours.until(lambda: [member.generator_id for member in ours.fleet.members()] == ["b"])
        del a.hold["commit"]
        ours.join(a)
        await ours.until_served(a=1, b=1)


@pytest.mark.parametrize("step", ["group", "prepare", "commit"])
async def test_a_member_that_fails_alone_catches_up_by_a_download(step: str) -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner(QUICK) as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        left = [step]
        a.refuses = lambda at: at in left and not left.remove(at)  # type: ignore[func-returns-value]
        ours.publisher.offer(snapshot(1))
        await ours.until_served(a=1, b=1)
        assert a.pulls == ["1.0", "1.1"]
        assert b.pulls == ["1.0"]
        await ours.publish(2, a, b)
        assert a.pulls == ["1.0", "1.1"], "it is broadcast to again"


async def test_one_that_is_alone_is_met_anew_after_it_has_caught_up() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        for version in (0, 1):
            await ours.publish(version, a)
        left = ["commit"]
        a.refuses = lambda at: at in left and not left.remove(at)  # type: ignore[func-returns-value]
        for version in (2, 3):
            await ours.publish(version, a)
        assert a.pulls == ["1.0", "1.2"]
        assert [join.epoch for join in a.joins] == [1, 2]


async def test_a_member_that_fails_broadcasts_in_a_row_gets_its_weights_by_download_from_then_on() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner(QUICK) as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.refuses = lambda at: at == "group"
        for version in range(1, 6):
            await ours.publish(version, a, b)
        assert a.pulls == [f"1.{version}" for version in range(6)]
        assert b.pulls == ["1.0"]
        assert [join.world_size for join in b.joins][-1] == 2, "b is alone with the learner"


async def test_one_that_was_started_afresh_under_its_name_is_broadcast_to_again_once_it_has_caught_up() -> None:
    """In a new process group: its predecessor's place in the old one is not its own."""
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        for version in (0, 1):
            await ours.publish(version, a, b)
        a.restart()
        ours.join(a)
        await ours.until_served(a=1, b=1)
        assert a.pulls == ["1.0", "1.1"]
        for version in (2, 3):
            await ours.publish(version, a, b)
        assert a.pulls == ["1.0", "1.1"], "it was left behind"
        assert [join.epoch for join in a.joins] == [1, 2]


async def test_generators_of_several_workers_all_get_a_broadcast() -> None:
    names = [ScriptedGenerator(name, workers=workers) for name, workers in (("a", 2), ("b", 1), ("c", 3))]
    async with names[0].running() as a, names[1].running() as b, names[2].running() as c, learner() as ours:
        ours.join(a, b, c)
        for version in (0, 1):
            await ours.publish(version, a, b, c)
        for generator in names:
            assert generator.pulls == ["1.0"], "it was left behind"
            assert [join.world_size for join in generator.joins] == [7]


async def test_a_member_that_is_gone_before_the_meeting_does_not_hold_up_the_others() -> None:
    async with ScriptedGenerator("b").running() as b, learner(QUICK) as ours:
        async with ScriptedGenerator("a").running() as a:
            ours.join(a, b)
            await ours.publish(0, a, b)
        await ours.publish(1, b)


async def test_at_a_configured_port_all_epochs_meet_also_while_one_still_waits_for_a_member_that_hangs() -> None:
    port = _free_port()
    options = replace(OPTIONS, port=port, meet_timeout_s=1.0)
    async with (
        ScriptedGenerator("a").running() as a,
        ScriptedGenerator("b").running() as b,
        learner(options) as ours,
    ):
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.hold["group"] = asyncio.Event()
        await ours.publish(1, b)
        a.hold.pop("group").set()
        await ours.publish(2, b)
        assert {join.port for join in (*a.joins, *b.joins)} == {port}
        assert len({join.epoch for join in b.joins}) > 1


async def test_a_configured_port_that_is_taken_ends_the_learner_with_a_line_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with ScriptedGenerator("a").running() as a, learner(replace(OPTIONS, port=port)) as ours:
            ours.join(a)
            await ours.publish(0, a)
            ours.publisher.offer(snapshot(1))
            with pytest.raises(ExceptionGroup) as raised:
                async with asyncio.timeout(60):
                    await asyncio.shield(ours.publishing)
    problem = _first(raised.value)
    assert isinstance(problem, WrongSettings)
    assert str(problem) == (
        f"cannot listen on 127.0.0.1:{port} for meetings with generators: Address already in use: "
        "stop what listens there, or set another weights.port (0: any that is free)"
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
