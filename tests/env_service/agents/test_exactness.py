"""Whatever the template and whatever an agent does with its history: what is trained is what was sampled and shown."""

import json
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from env_service.agents.messages import AgentMessage, MadeCall
from env_service.agents.registry import AgentSessions
from env_service.agents.sessions import AgentRequest, AgentSession, CallRefused, PendingTurn
from env_service.environments.bridges import Bridges
from env_service.environments.interface import OfferedEnvironment, Opening, Task, Tool
from env_service.environments.rules import Rules
from env_service.environments.tokenization import TemplateArguments, Tokenization
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.conversation import Speaker
from env_service.rollouts.environment_calls import EnvironmentCalls
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.speech import Language
from protocol.generation import GenerateRequest, Sampling
from protocol.trajectories import RewardRecord, Trajectory
from services.http.metrics import Metrics
from tests.env_service.chat_models import TEMPLATES, ends_of, model_with
from tests.env_service.random_engine import RandomEngine

TOOL: Tool = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
NOTHING: TemplateArguments = {}
TEXTS = ("no", " spaces ", '{"a": 2, "b": [1]}', "<think>hm</think> 7", "ünïcödé 漢字", "two\nlines")


def session_of(folder: Path, name: str, chance: random.Random) -> tuple[AgentSession, RandomEngine, Tokenization]:
    tokenization = Tokenization(model_with(name, folder))
    special = tokenization.special_tokens
    engine = RandomEngine(chance, 256, [special[end] for end in ends_of(name)])
    language = Language(
        tokenization=tokenization,
        bridges=Bridges(tokenization),
        rules=Rules(max_turns=64),
        opening=Opening(()),
        opening_ids=(),
        stop_ids=frozenset(),
        now=datetime(2026, 1, 2),
    )
    speaker = Speaker(
        offered=OfferedEnvironment(name="agent", tasks=None, start=None),  # type: ignore[arg-type]
        language=language,
        request=GenerateRequest(
            request_id="r", prompt_token_ids=(0,), sampling=Sampling(max_tokens=8), routed_experts=True
        ),
        sample=engine.sample,
        calls=EnvironmentCalls(timeout_s=5),
        progress=RolloutProgress(),
        metrics=RolloutMetrics(Metrics("test")),
    )
    return AgentSessions(url="http://here").open(task=Task(), speaker=speaker, index=0), engine, tokenization


def sent_back(reply: AgentMessage, chance: random.Random) -> AgentMessage:
    """As clients do: other spacing in calls, and around the text."""
    spacing = chance.choice([None, 1])
    calls = tuple(MadeCall("other", call.name, json.dumps(call.value, indent=spacing)) for call in reply.calls)
    return AgentMessage("assistant", f"{reply.text} " if chance.random() < 0.2 else reply.text, calls)


async def told(
    session: AgentSession,
    messages: Sequence[AgentMessage],
    tools: tuple[Tool, ...],
    arguments: TemplateArguments = NOTHING,
) -> PendingTurn | None:
    try:
        answering = session.answer(AgentRequest(messages=tuple(messages), tools=tools, template_arguments=arguments))
    except CallRefused as refusal:
        if refusal.code != "invalid_messages":
            raise
        return None
    await answering.done.wait()
    assert answering.refusal is None, answering.refusal
    if session.over is False:
        answering.branch.deliver()
    return answering


async def talk(session: AgentSession, chance: random.Random) -> None:
    """Several conversations that go on, branch, and rewrite what was."""
    tools = (TOOL,) if chance.random() < 0.5 else ()
    histories: list[list[AgentMessage]] = [[AgentMessage("user", chance.choice(TEXTS))]]
    for _ in range(12):
        history = chance.choice(histories)
        answering = await told(session, history, tools)
        if answering is None:
            histories = [each for each in histories if each is not history] or [[AgentMessage("user", "again")]]
            continue
        assert answering.reply is not None
        told_back = sent_back(answering.reply, chance)
        if chance.random() < 0.1:
            told_back = AgentMessage("assistant", "in short: no")
        following = AgentMessage("user", chance.choice(TEXTS))
        if told_back.calls:
            following = AgentMessage("tool", chance.choice(TEXTS), call_id="other", name="look")
        histories.append([*history, told_back, following])


def recorded(session: AgentSession) -> Trajectory:
    return session.recorded.transcript().record(
        reward=RewardRecord(reward=0.0, verifier="agent"), stop_reason="finished", turn_rewards=False
    )


@pytest.mark.parametrize("name", TEMPLATES)
async def test_every_sequence_is_what_the_engine_was_shown_and_sampled(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)
    session, engine, _ = session_of(tmp_path, name, chance)
    await talk(session, chance)
    check_recorded(session, engine)


def check_experts(session: AgentSession, trajectory: Trajectory, starts: Sequence[int]) -> None:
    """All tokens of a sequence but the last have the expert of their id, and each turn holds what its parent lacks."""
    told = trajectory.routed_experts
    assert told is not None
    places = np.concatenate([np.arange(*span) for span in told.spans])
    ends = [*starts[1:], len(trajectory.token_ids)]
    assert places.tolist() == [place for place in range(ends[-1]) if place + 1 not in ends]
    assert told.rows()[:, 0, 0].tolist() == trajectory.token_ids[places].tolist()
    for turn in session.recorded.turns:
        assert turn.completion is not None
        ((place, rows), *more) = turn.completion.routing.pieces
        before = turn.parent.completion if turn.parent else None
        assert place == (before.routing.end if before else 0)
        assert place + len(rows) + sum(len(one) for _, one in more) == len(turn.context) - 1


def check_recorded(session: AgentSession, engine: RandomEngine) -> None:
    """Each sequence has what the engine was shown and sampled, position by position."""
    trajectory = recorded(session)
    assert len(trajectory.turns) == len(session.recorded.turns) == len(engine.turns)
    assert session.recorded.continued > 0
    starts = [0, *trajectory.sequence_starts]
    shown = [
        (each.prompt, tuple(each.sampled), np.array(each.logprobs, dtype=np.float32).tolist(), each.versions)
        for each in engine.turns.values()
    ]
    versions = trajectory.token_versions()
    trained = np.zeros(len(trajectory.token_ids), dtype=int)
    for turn in trajectory.turns:
        start = max(each for each in starts if each <= turn.start)
        prompt = tuple(trajectory.token_ids[start : turn.completion_start].tolist())
        spot = slice(turn.completion_start, turn.end)
        sampled = tuple(trajectory.token_ids[spot].tolist())
        shown.remove((prompt, sampled, trajectory.behavior_logprobs[spot].tolist(), versions[spot].tolist()))
        trained[spot] += 1
    assert not shown
    check_experts(session, trajectory, starts)
    assert trained.tolist() == trajectory.loss_mask.tolist()
