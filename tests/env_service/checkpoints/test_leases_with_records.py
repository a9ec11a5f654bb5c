"""Records of leases, and what the learner says of them, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from env_service import app
from env_service.checkpoints.records import LeaseRecords
from env_service.config import EnvServiceConfig
from protocol.lease_keys import key_of
from protocol.messages import Goodbye, Heartbeat, Hello, LeaseCancellation, RunningLease
from services.http.metrics import Metrics
from services.process import WrongSettings
from tests.env_service.checkpoints.test_records import KEY, records_in, turn, two_turns
from tests.env_service.peers import eventually, lease
from tests.env_service.test_connection import LearnerConversation, acknowledged, conversing, finished


@asynccontextmanager
async def going_on(folder: Path) -> AsyncIterator[tuple[LearnerConversation, LeaseRecords]]:
    """A process that has begun with the leases 5 and 6 of run `r`, of which the former one had tokens of versions."""
    async with records_in(folder) as records:
        records.begin_run("r")
        await two_turns(records)
        records.record_of(lease(6), rules="r").add_turn(turn(version="1.2"))
    async with records_in(folder) as records, conversing(records=records) as talk:
        await app.go_on(talk.running, records)
        await talk.rollouts.next_started()
        await talk.rollouts.next_started()
        yield talk, records


def named(lease_id: int) -> RunningLease:
    return RunningLease(incarnation=1, lease_id=lease_id, attempt=0, purpose="train")


async def test_its_first_hello_names_the_run_and_all_that_it_goes_on_with(tmp_path: Path) -> None:
    async with going_on(tmp_path) as (talk, _):
        hello = await talk.learner.expect(Hello)
        while not hello.running:  # said before they had begun
            hello = await talk.learner.expect(Hello)
        assert hello.run == "r"
        assert {(each.lease_id, each.oldest_version) for each in hello.running} == {(5, "1.3"), (6, "1.2")}


async def test_a_record_is_there_until_the_outcome_is_acknowledged(tmp_path: Path) -> None:
    async with going_on(tmp_path) as (talk, records):
        await talk.learner.welcome()
        await talk.rollouts.finish(finished(lease(5)))
        await eventually(lambda: len(talk.outbox) == 1)
        await talk.learner.say(LeaseCancellation(leases=(named(5), named(6))))
        await eventually(lambda: records.keys() == (KEY,))
        await talk.learner.say(acknowledged(lease(5)))
        await eventually(lambda: records.keys() == ())


async def test_a_lease_that_the_learner_takes_back_loses_its_record(tmp_path: Path) -> None:
    async with going_on(tmp_path) as (talk, records):
        await talk.learner.welcome()
        await talk.learner.say(LeaseCancellation(leases=(named(5),)))
        await eventually(lambda: records.keys() == (key_of(lease(6)),))


async def test_a_learner_of_another_run_leaves_no_record(tmp_path: Path) -> None:
    async with going_on(tmp_path) as (talk, records):
        await talk.learner.welcome(run="another")
        await eventually(lambda: records.keys() == ())
        assert records.run == "another"
        await talk.learner.expect(Heartbeat)
        assert (await talk.learner.expect(Heartbeat)).running == ()


async def test_one_that_leaves_says_what_its_next_process_goes_on_with(tmp_path: Path) -> None:
    async with going_on(tmp_path) as (talk, _):
        await talk.learner.welcome()
        talk.running.cancel_all()
        await talk.link.leave("rolled", within_s=1.0)
        goodbye = await talk.learner.expect(Goodbye)
        assert sorted(goodbye.keeps, key=lambda each: each.lease_id) == [named(5), named(6)]
    async with records_in(tmp_path) as records:
        assert len(records.past()) == 2


async def test_the_folder_of_a_process_that_lives_is_refused_by_its_name(tmp_path: Path, model: Path) -> None:
    settings = {"folder": tmp_path}
    config = EnvServiceConfig.model_validate({"model": model, "env_id": "host:1", "checkpoints": settings})
    async with AsyncExitStack() as stack:
        metrics = Metrics("env-service")
        records = await app.opened_records(config, stack, env_id="host:1", metrics=metrics)
        assert records is not None
        assert (tmp_path / "host%3A1").is_dir()
        with pytest.raises(WrongSettings, match=r"host%3A1 is that of process \d+ .* give this one another env_id"):
            await app.opened_records(config, stack, env_id="host:1", metrics=Metrics("env-service"))
        assert await app.opened_records(config, stack, env_id="b", metrics=Metrics("env-service")) is not None
