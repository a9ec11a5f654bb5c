"""Scripted conversations, and that a trajectory which is not what was said is seen: each in a process of its own."""

import pytest

from tests.simulation.simulating import Simulator

RUN = """
from collections import Counter
from dataclasses import replace
from simulation.install import install
install()
from simulation.actors import trainer
from simulation.actors.cluster import ClusterSettings
from simulation.checking.invariants import simulate
from simulation.checking.scenario import Paces, Scenario, TaskShape
settings = ClusterSettings(generators=2, reward_services=2, steps=6, groups_per_step=3, hedged=1.0, hedged_after_s=0.1)
shape = TaskShape(turns=3, tokens=16, stop="w5", most_invalid=1)
scenario = Scenario(seed=5, profile="test", settings=settings, shape=shape, stalls=0.3, redundant=1)
seen = Counter()
checked = trainer.ScriptedTrainer._check_conversation
def count(self, trajectory, *, task):
    seen.update((trajectory.stop_reason, f"{len(trajectory.turns)} turns"))
    checked(self, trajectory, task=task)
trainer.ScriptedTrainer._check_conversation = count
"""


def _run(simulator: Simulator, program: str) -> str:
    ended = simulator.run(RUN + program)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_conversations_have_several_turns_end_in_several_ways_and_are_judged_by_either_service(
    simulator: Simulator,
) -> None:
    said = _run(
        simulator,
        """
from services.rewards.settings import Hedges
from simulation.actors.rewards import StubRewardService
def counted(owner, name, what):
    real = getattr(owner, name)
    def call(*arguments):
        seen[what] += 1
        return real(*arguments)
    setattr(owner, name, call)
counted(Hedges, "afford", "hedged")
counted(StubRewardService, "_in_parts", "streamed")
result = simulate(scenario)
assert result.violation is None, result.violation
expected = ("", "done", "token_budget", "turn_limit", "1 turns", "2 turns", "3 turns", "hedged", "streamed")
print([each for each in expected if not seen[each]])
""",
    )
    assert said == "[]"


BROKEN = {
    "contexts": """
from env_service.rollouts.conversation import Conversation
real = Conversation._request
def request(self):
    asked = real(self)
    shorter = asked.prompt_token_ids[:-1] if self.speech.transcript.turns else asked.prompt_token_ids
    return asked.model_copy(update={"prompt_token_ids": shorter})
Conversation._request = request
""",
    "conversations": """
from env_service.rollouts.speech import Transcript
real = Transcript.show
Transcript.show = lambda self, ids: real(self, ids[:1] if self.turns else ids)
""",
    "rewards": """
from env_service.rollouts.speech import Transcript
def earn(self, reward):
    self._turns[0].reward += reward
Transcript.earn = earn
""",
    "teachers": """
from learner.teachers.teachers import RemoteTeacher
real = RemoteTeacher.scores
async def scores(self, sequences, *, top=0):
    return [replace(one, logprobs=one.logprobs[::-1]) for one in await real(self, sequences, top=top)]
RemoteTeacher.scores = scores
scenario = replace(scenario, settings=replace(settings, teachers=2))
""",
    "groups": """
from env_service.rollouts import rollout
async def hold(members, *, wanted):
    await rollout.beside_each_other(each.hold() for each in members)
    return members
rollout._hold_first = hold
""",
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_trajectory_that_is_not_what_was_said_is_seen(simulator: Simulator, promise: str) -> None:
    said = _run(simulator, f"{BROKEN[promise]}\nprint(simulate(scenario).violation)")
    assert said.startswith(f"{promise}: "), said


BRANCHES = """
from simulation.checking.scenario import ScheduledFault
shape = TaskShape(turns=4, branch_after=(2,))
scenario = replace(
    scenario, shape=shape, redundant=0, settings=replace(settings, group_size=4),
    faults=tuple(ScheduledFault(at, "kill", name) for at, name in ((9.0, "gen-0"), (14.0, "env-0"), (19.0, "learner"))),
)
def count(self, trajectory, *, task):
    seen.update([len(trajectory.forks), "old beginnings" if len(trajectory.version_spans) > 2 else ""])
    checked(self, trajectory, task=task)
trainer.ScriptedTrainer._check_conversation = count
"""


def test_branches_share_their_beginnings_whoever_dies(simulator: Simulator) -> None:
    said = _run(
        simulator,
        f"""{BRANCHES}
result = simulate(scenario)
assert result.violation is None, result.violation
print([each for each in (1, 2, "old beginnings") if not seen[each]], seen[0])
""",
    )
    assert said == "[] 0"


def test_branches_that_are_one_are_seen(simulator: Simulator) -> None:
    said = _run(
        simulator,
        f"""{BRANCHES}
from env_service.rollouts import conversation
real = conversation.Fork
conversation.Fork = lambda at, branch: real(at=at, branch=0)
print(simulate(scenario).violation)
""",
    )
    assert said.startswith("trees: two of lease "), said


def test_branches_that_have_other_beginnings_are_seen(simulator: Simulator) -> None:
    said = _run(
        simulator,
        f"""{BRANCHES}
from env_service.rollouts.speech import Transcript
real = Transcript.copy
def copied(self):
    made = real(self)
    made._spans = [span.model_copy(update={{"cache": "1.0"}}) for span in made._spans]
    return made
Transcript.copy = copied
print(simulate(scenario).violation)
""",
    )
    assert said.startswith("trees: two branches of lease "), said


def test_a_lease_that_is_another_task_after_a_resume_is_seen(simulator: Simulator) -> None:
    said = _run(
        simulator,
        """
from learner.leases.curriculum import LevelLog
from simulation.checking.scenario import ScheduledFault
levels, read, broken = {"window": 2, "raise_at": 0.3, "lower_at": 0.0}, LevelLog.read, None
for at in (10.8, 11.5, 12.2, 12.9, 15.0, 16.4):  # one moment or another falls between a grant and the next checkpoint
    given = replace(
        scenario, shape=TaskShape(levels=3),
        faults=tuple(ScheduledFault(at, "kill", service) for service in ("env-0", "learner")),
        settings=replace(settings, steps=12, curriculum=levels, success_reward=0.5),
    )
    LevelLog.read = read
    whole = simulate(given).violation
    LevelLog.read = lambda self: []
    if whole or (broken := simulate(given).violation):
        break
print(whole, broken)
""",
    )
    assert said.startswith("None a lease is one task: "), said


def test_a_lease_that_is_of_another_drawn_task_after_a_resume_is_seen(simulator: Simulator) -> None:
    """Two groups a step: what was accepted since moves the draws, if those of before are not in the folder."""
    said = _run(
        simulator,
        """
from learner.leases.run_rows import RunRows
from simulation.checking.scenario import ScheduledFault
tasks, read, broken = {"by": "signal", "candidates": 32}, RunRows.read, None
for at in (10.8, 12.2, 15.0, 16.4):
    given = replace(
        scenario, faults=tuple(ScheduledFault(at, "kill", service) for service in ("env-0", "learner")),
        settings=replace(settings, steps=12, tasks=tasks, success_reward=0.5),
    )
    RunRows.read = read
    whole = simulate(given).violation
    RunRows.read = lambda self: iter(())
    if whole or (broken := simulate(given).violation):
        break
print(whole, broken)
""",
    )
    assert said.startswith("None a lease is one task: "), said
