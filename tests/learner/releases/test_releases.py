"""Releases over real HTTP with scripted generators: candidates, promotions, the way back, and damage."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from learner.releases.config import ReleaseConfig
from learner.releases.history import FILE, ReleaseHistory
from learner.releases.kept_weights import KeptWeights
from learner.releases.making import make_releases
from learner.releases.releases import Releases
from learner.releases.routes import FleetsByChannel, ShelvesByVersion
from learner.weights.fleet import FleetMembers, JoinRefused
from learner.weights.published import PackedWeights, Packer, PublishedWeights, Snapshot, add_routes
from protocol.status import Readiness
from services.http.app import create_app
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http
from services.process import DaemonThreads
from tests.learner.generators import FINGERPRINTS, ScriptedGenerator
from tests.learner.releases.evaluations import TASKS, evaluation
from tests.learner.weights.publishing import OPTIONS, adapter, base_weights, snapshot

CONFIG = ReleaseConfig(enabled=True, every_steps=10, tasks=TASKS, standard_errors=2.0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def packed(version: int | Snapshot, *, incarnation: int = 1) -> PackedWeights:
    packer = Packer(incarnation=incarnation, threads=DaemonThreads(name="t"))
    return await packer.pack(snapshot(version) if isinstance(version, int) else version)


@dataclass
class ReleasingLearner:
    """The releases of a run, over HTTP. `stirred` is set by each change of a fleet."""

    run: Path
    config: ReleaseConfig
    client: HttpClient
    url: str = ""
    stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.releases: Releases = make_releases(
            self.config,
            run=self.run,
            success=1.0,
            secret_key_file=None,
            may_write=lambda: None,
            make_fleet=self._fleet,
            client=self.client,
            options=OPTIONS,
        )
        self.latest = self._fleet(lambda: None)
        self.fleets = FleetsByChannel(self.latest, self.releases)

    def _fleet(self, changed: Callable[[], None]) -> FleetMembers:
        return FleetMembers(
            fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=1.0, silence_s=1e9, changed=changed
        )

    def join(self, generator: ScriptedGenerator, *, channel: str = "released") -> None:
        generator.learner = self.url
        self.fleets.announce(generator.announcement().model_copy(update={"channel": channel}), now=0.0)

    async def judge(self, version: int, *, solved: int) -> None:
        await self.releases.judge(evaluation(version, solved=solved), await packed(version))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - not all that is waited for stirs
                await asyncio.sleep(0.01)


@asynccontextmanager
async def releasing(run: Path, config: ReleaseConfig = CONFIG) -> AsyncIterator[ReleasingLearner]:
    async with HttpClient() as client:
        made = ReleasingLearner(run=run, config=config, client=client)
        app = create_app(
            service="learner", version="1", token=None, readiness=lambda: Readiness(ready=True),
            metrics=Metrics("learner"),
        )  # fmt: skip
        shelves = ShelvesByVersion((PublishedWeights(), *made.releases.shelves))
        add_routes(app, fleet=made.fleets, shelf=shelves)
        with Listener(host="127.0.0.1", port=0) as listener:
            made.url = listener.url
            tasks = [asyncio.create_task(serve_http(app, listener, finish_s=0)),
                     asyncio.create_task(made.releases.run())]  # fmt: skip
            try:
                yield made
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=10)


async def test_a_better_candidate_is_served_to_users_and_a_worse_one_is_not(tmp_path: Path) -> None:
    async with ScriptedGenerator("u").running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.judge(0, solved=5)
        await ours.until(lambda: users.version == "1.0")
        await ours.judge(10, solved=2)
        await ours.judge(20, solved=6)
        assert ours.releases.status().released == "1.0", "one task of 20 more is within the noise"
        await ours.judge(30, solved=15)
        await ours.until(lambda: users.version == "1.30")
        assert users.versions == ["1.0", "1.30"]
        assert torch.equal(users.weights["embedding"], torch.full((1000, 3), 30.0))
        assert ours.latest.members() == []
        reasons = [row["text"] for row in ReleaseHistory(tmp_path / "releases").rows if row["event"] == "refused"]
        assert [reason.split(" over")[0] for reason in reasons] == [
            "accuracy is 0.1500 worse", "accuracy is 0.0500 better",
        ]  # fmt: skip


async def test_a_rollback_gives_users_the_same_weights_by_every_hash_and_holds_promotions(tmp_path: Path) -> None:
    async with ScriptedGenerator("u").running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.judge(0, solved=5)
        await ours.until(lambda: users.version == "1.0")
        await ours.judge(10, solved=19)
        await ours.until(lambda: users.version == "1.10")
        status = await ours.releases.roll_back("0", reason="users complain", wait_s=30)
        (holder,) = status.generators
        assert (status.released, users.version, holder.serving_version) == ("1.0", "1.0", "1.0")
        assert (holder.same_as_first, status.digest) == (True, (await packed(0)).digest)
        await ours.judge(20, solved=20)
        assert ours.releases.status().released == "1.0"
        await ours.releases.promote(None, wait_s=30)
        await ours.judge(30, solved=20)
        await ours.until(lambda: users.version == "1.30")


async def test_a_rollback_is_done_when_a_generator_that_was_on_the_way_to_the_other_version_is_back(
    tmp_path: Path,
) -> None:
    async with ScriptedGenerator("u").running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.judge(0, solved=5)
        await ours.until(lambda: bool(ours.releases.status().generators[0].same_as_first))
        users.hold["commit"] = asyncio.Event()
        await ours.judge(10, solved=19)
        await ours.until(lambda: "1.10" in users.pulls)
        back = asyncio.create_task(ours.releases.roll_back("0", reason="", wait_s=30))
        await ours.until(lambda: ours.releases.status().released == "1.0")
        users.hold.pop("commit").set()
        (holder,) = (await back).generators
        assert (users.versions, holder.serving_version) == (["1.0", "1.10", "1.0"], "1.0")


async def test_a_generator_that_loads_something_else_on_the_way_back_is_expelled(tmp_path: Path) -> None:
    async with ScriptedGenerator("u").running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.judge(0, solved=5)
        await ours.until(lambda: users.version == "1.0")
        await ours.judge(10, solved=19)
        await ours.until(lambda: users.version == "1.10")
        users.loads_wrong = True
        status = await ours.releases.roll_back("1.0", reason="", wait_s=30)
        assert status.generators == ()
        with pytest.raises(JoinRefused, match=r"the checksum of its loaded weights|is expelled|was expelled"):
            ours.join(users)


async def test_a_later_life_serves_what_was_released_and_can_go_back(tmp_path: Path) -> None:
    async with releasing(tmp_path) as ours:
        for version, solved in ((0, 2), (10, 9), (20, 18)):
            await ours.judge(version, solved=solved)
    async with ScriptedGenerator("u").running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.until(lambda: users.version == "1.20")
        assert (await ours.releases.roll_back("10", reason="", wait_s=30)).released == "1.10"
        assert users.version == "1.10"


async def test_damaged_files_are_never_sent_and_the_release_before_is_served(tmp_path: Path) -> None:
    async with releasing(tmp_path) as ours:
        await ours.judge(0, solved=2)
        await ours.judge(10, solved=9)
        await ours.judge(20, solved=18)
    for version in ("1.20", "1.0"):
        path = tmp_path / "releases" / version / "0.bucket"
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    async with ScriptedGenerator("u").running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.until(lambda: users.version == "1.10")
        assert "its files are damaged" in ours.releases.status().held
        with pytest.raises(RequestRefused, match=r"release 1\.0 cannot be served: .*0\.bucket has the hash"):
            await ours.releases.roll_back("0", reason="", wait_s=0)
        assert ours.releases.status().released == "1.10"


@pytest.mark.parametrize(
    ("name", "said"),
    [("7", "no release 7; there are: 1.0"), ("10", "version 1.10 is the released one"), ("2.0", "no release 2.0")],
)
async def test_a_rollback_to_what_is_not_there_is_refused_by_name(tmp_path: Path, name: str, said: str) -> None:
    async with releasing(tmp_path) as ours:
        await ours.judge(0, solved=2)
        await ours.judge(10, solved=12)
        with pytest.raises(RequestRefused, match=said):
            await ours.releases.roll_back(name, reason="", wait_s=0)


async def test_former_releases_are_kept_as_many_as_wanted(tmp_path: Path) -> None:
    async with releasing(tmp_path, CONFIG.model_copy(update={"keep": 1})) as ours:
        for version, solved in ((0, 0), (10, 6), (20, 12), (30, 18)):
            await ours.judge(version, solved=solved)
        assert KeptWeights(tmp_path).versions() == ["1.20", "1.30"]


async def test_answers_of_other_versions_judge_nobody(tmp_path: Path) -> None:
    async with releasing(tmp_path) as ours:
        await ours.judge(0, solved=0)
        mixed = evaluation(10, solved=20, sampled_by=(10, 11))
        await ours.releases.judge(mixed, await packed(10))
        assert ours.releases.status().released == "1.0"
        assert "sampled by versions 10 to 11" in ReleaseHistory(tmp_path / "releases").rows[-1]["text"]


async def test_a_trial_with_users_decides_what_the_evaluation_cannot(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"canary_rewards": 50})
    users_say = {"1.0": [1.0, 0.0] * 25, "1.10": [0.0] * 50, "1.20": [1.0] * 50}
    async with ScriptedGenerator("c").running() as canary, releasing(tmp_path, config) as ours:
        ours.join(canary, channel="canary")
        await ours.judge(0, solved=5)
        await ours.until(lambda: canary.version == "1.0")
        await ours.judge(10, solved=19)
        await ours.until(lambda: canary.version == "1.10")
        assert ours.releases.status().released == "1.0"
        ours.releases.rewards = lambda version, since: users_say[version]
        await ours.until(lambda: ours.releases.status().trial is None)
        await ours.until(lambda: canary.version == "1.0")
        ours.releases.rewards = lambda version, since: []
        await ours.judge(20, solved=20)
        await ours.until(lambda: canary.version == "1.20")
        ours.releases.rewards = lambda version, since: users_say[version]
        await ours.until(lambda: ours.releases.status().released == "1.20")


async def test_adapters_are_released_with_their_base_weights_which_are_kept_once(tmp_path: Path) -> None:
    base = base_weights()
    async with ScriptedGenerator("u").running() as users, releasing(tmp_path) as ours:
        ours.join(users)
        await ours.releases.judge(evaluation(0, solved=2), await packed(adapter(0, base=base)))
        await ours.releases.judge(evaluation(10, solved=15), await packed(adapter(10, base=base)))
        await ours.until(lambda: users.version == "1.10")
        assert users.weights["base_model.model.layer.lora_A.weight"][0, 0] == 10
        kept = [path.stat().st_nlink for path in (tmp_path / "releases").glob("*/base-*.bucket")]
        assert kept
        assert set(kept) == {2}


def test_a_torn_row_counts_as_none_and_the_next_one_is_whole(tmp_path: Path) -> None:
    history = ReleaseHistory(tmp_path)
    history.add("released", "1.0")
    whole = (tmp_path / FILE).read_bytes()
    history.add("released", "1.10")
    row = (tmp_path / FILE).read_bytes()[len(whole) :]
    for cut in range(len(row) + 1):
        (tmp_path / FILE).write_bytes(whole + row[:cut])
        found = ReleaseHistory(tmp_path)
        assert found.state.released == ("1.10" if cut == len(row) else "1.0")
        found.add("released", "1.20")
        assert ReleaseHistory(tmp_path).state.released == "1.20"


def test_a_generator_of_users_is_refused_by_a_learner_that_releases_nothing() -> None:
    fleet = FleetMembers(
        fingerprints=FINGERPRINTS, incarnation=1, announce_every_s=1, silence_s=1, changed=lambda: None
    )
    announced = ScriptedGenerator("u", url="http://127.0.0.1:1").announcement()
    with pytest.raises(JoinRefused, match=r"set learner\.release\.enabled to true, or join\.channel"):
        FleetsByChannel(fleet, None).announce(announced.model_copy(update={"channel": "released"}), now=0.0)
    with suppress(JoinRefused):
        FleetsByChannel(fleet, None).announce(announced, now=0.0)
    assert [member.generator_id for member in fleet.members()] == ["u"]


async def test_a_later_life_knows_by_which_checksum_a_version_was_proven_first(tmp_path: Path) -> None:
    async with ScriptedGenerator("u").running() as users:
        async with releasing(tmp_path) as ours:
            ours.join(users)
            await ours.judge(0, solved=5)
            await ours.until(lambda: bool(ours.releases.status().generators[0].same_as_first))
        users.restart()
        users.loads_wrong = True
        async with releasing(tmp_path) as ours:
            ours.join(users)
            await ours.until(lambda: not ours.releases.status().generators)
            with pytest.raises(JoinRefused, match=r"and was .* when that version was proven first"):
                ours.join(users)
