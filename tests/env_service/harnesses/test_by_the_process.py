"""The real process: a lease goes from the learner to a harness on a computer, and comes back; a kill leaves nothing."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from env_service.harnesses.catalog import HARNESSES
from protocol.messages import FinishedLease, Fleet, Hello, OutcomeReceipt, Welcome
from services.zmq.sockets import RouterSocket
from tests.env_service.harnesses.conftest import COUNT, ChosenTokens, call, turns_of
from tests.env_service.harnesses.installed import python_with
from tests.env_service.peers import ScriptedCompletions, ScriptedLearner, lease, served, serving
from tests.process_ends import all_end, children_of

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from env_service.command import main; main()"]
SOLVES = [call("shell", command="grep -c ^ERROR app.log > answer.txt"), "It is done."]


def settings(model: Path, learner: str, tasks: Path) -> str:
    return f"""
[env-service]
model = "{model}"
learner = "{learner}"
reward_urls = []
http = {{ port = 0 }}
runtimes = {{ spare = 0 }}

[[env-service.environments]]
name = "mine"
source = "harness"

[env-service.environments.options]
harness = "anthropic"
python = "{python_with("anthropic")}"

[env-service.environments.options.tasks.computer]
train_file = "{tasks}"
"""


@dataclass(frozen=True)
class BegunProcess:
    process: asyncio.subprocess.Process
    learner: ScriptedLearner


@asynccontextmanager
async def begun(policy: ChosenTokens, model: Path, folder: Path) -> AsyncIterator[BegunProcess]:
    """An env_service with a lease of two."""
    (folder / "tasks.jsonl").write_text(json.dumps(COUNT))
    generator = ScriptedCompletions(policy)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*") as router,
        served(generator.handle, "/v1/generate") as generator_url,
    ):
        (folder / "run.toml").write_text(settings(model, router.address, folder / "tasks.jsonl"))
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--config", str(folder / "run.toml"), cwd=ROOT, env=dict(os.environ)
        )
        try:
            learner = ScriptedLearner(router)
            await learner.expect(Hello, within_s=120)
            learner.answer = Welcome(run="r", incarnation=1, heartbeat_every_s=0.1)
            await learner.say(learner.answer, Fleet(generators=(serving("g0", generator_url),)))
            await learner.grant(lease(5, environment="mine", group_size=2).model_copy(update={"timeout_s": 120.0}))
            yield BegunProcess(process, learner)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_a_lease_goes_to_a_harness_and_comes_back(chat_model: Path, tmp_path: Path) -> None:
    policy = ChosenTokens(chat_model, SOLVES, before=lambda _: None)
    policy.by_turns = True
    async with begun(policy, chat_model, tmp_path) as made:
        group = (await made.learner.expect(FinishedLease, within_s=120)).group
        await made.learner.say(OutcomeReceipt(incarnation=1, lease_id=5, attempt=0, purpose="train"))

    assert [one.reward.reward for one in group.trajectories] == [1.0, 1.0]
    told = [turn for one in group.trajectories for turn in turns_of(one)]
    assert sorted(told) == sorted(zip(policy.shown, policy.sampled, strict=True))


async def test_a_process_that_is_killed_leaves_no_harness_and_no_runtime(chat_model: Path, tmp_path: Path) -> None:
    asked = asyncio.Event()
    policy = ChosenTokens(chat_model, [call("shell", command="sleep 60")], before=lambda _: asked.set())
    async with begun(policy, chat_model, tmp_path) as made:
        async with asyncio.timeout(120):
            await asked.wait()
        below = _family(made.process.pid)
        assert [pid for pid in below if str(HARNESSES["anthropic"].driver) in _command(pid)]
        made.process.kill()
        assert await asyncio.to_thread(lambda: all_end(below))


def _family(pid: int) -> list[int]:
    below = children_of(pid)
    return [*below, *(each for child in below for each in _family(child))]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
