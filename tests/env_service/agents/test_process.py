"""The real process: a lease goes from the learner to an agent program, and comes back as trajectories."""

import asyncio
import os
import sys
from pathlib import Path

from learner.leases.admission import GroupRules, admissible
from learner.leases.filters import GroupFilter
from protocol.messages import FinishedLease, Fleet, Goodbye, Hello, OutcomeReceipt, Welcome
from services.zmq.sockets import RouterSocket
from tests.env_service.agents.served import Saying
from tests.env_service.peers import ScriptedCompletions, ScriptedLearner, ScriptedRewards, lease, served, serving

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from env_service.command import main; main()"]
PROGRAM = Path(__file__).parent / "sample_program.py"


def settings(model: Path, learner: str, rewards: str, tasks: Path) -> str:
    return f"""
[env-service]
model = "{model}"
learner = "{learner}"
reward_urls = ["{rewards}"]
http = {{ port = 0, token = "secret-of-the-process" }}
[[env-service.environments]]
name = "mine"
source = "agent"
options = {{ command = ["{sys.executable}", "{PROGRAM}", "prints"], train_file = "{tasks}", verifier = "exact_match" }}
"""


async def test_a_lease_goes_to_a_program_and_comes_back(chat_model: Path, tmp_path: Path) -> None:
    tasks, file = tmp_path / "tasks.jsonl", tmp_path / "run.toml"
    tasks.write_text('{"question": "first", "answer": "no"}\n{"question": "second", "answer": "well"}\n')
    generator = ScriptedCompletions(Saying(chat_model, lambda prompt: "well" if "second" in prompt else "oh"))
    rewards = ScriptedRewards(lambda text, arguments: 1.0 if text == arguments["answer"] else 0.0)
    async with (
        RouterSocket.bind("tcp://127.0.0.1:*") as router,
        served(generator.handle, "/v1/generate") as generator_url,
        served(rewards.handle, "/v1/score") as reward_url,
    ):
        file.write_text(settings(chat_model, router.address, reward_url, tasks))
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--config", str(file), cwd=ROOT, env=dict(os.environ), stderr=asyncio.subprocess.PIPE
        )
        try:
            learner = ScriptedLearner(router)
            hello = await learner.expect(Hello, within_s=90)
            learner.answer = Welcome(run="r", incarnation=1, heartbeat_every_s=0.1)
            await learner.say(learner.answer, Fleet(generators=(serving("g0", generator_url),)))
            (offered,) = hello.environments
            assert (offered.name, offered.train_tasks) == ("mine", 2)
            await learner.grant(lease(5, environment="mine", task_index=1))
            group = (await learner.expect(FinishedLease, within_s=90)).group
            await learner.say(OutcomeReceipt(incarnation=1, lease_id=5, attempt=0, purpose="train"))
            process.terminate()
            await learner.expect(Goodbye, within_s=30)
            assert process.stderr is not None
            assert b"hw-" not in await process.stderr.read()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    assert [trajectory.reward.reward for trajectory in group.trajectories] == [1.5, 1.5]
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [1, 1]
    assert "second" in group.prompt_text
    rules = GroupRules(vocabulary_size=1000, min_group_size=2, filters=GroupFilter())
    assert admissible(group, rules=rules, belongs=lambda version: version.incarnation == 1) == group
