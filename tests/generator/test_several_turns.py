"""The engine's logprobs over a conversation of several turns are those of the policy on the trained sequence."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from env_service.environments.bridges import Bridges
from env_service.environments.interface import Action, OfferedEnvironment, Opening, Step, Task
from env_service.environments.rules import Rules
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import Completion, Piece, Progress
from env_service.rollouts.conversation import Conversation, Speaker
from env_service.rollouts.environment_calls import EnvironmentCalls
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.speech import Language
from protocol.generation import GenerateRequest, Sampling
from protocol.model import PolicyVersion
from protocol.trajectories import RewardRecord, Trajectory, Turn
from services.http.metrics import Metrics
from tests.generator.conftest import VOCABULARY, Rig

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TURNS = 5
TOLERANCE = 1e-3


class Talk:
    """Five turns; in the third step it has something done that awaits."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._turns = 0
        self.newer = ""

    def reset(self, task: Task, seed: int) -> Opening:
        return Opening("12+34=")

    async def step(self, action: Action) -> Step:
        self._turns += 1
        if self._turns == 3:
            self._rig.policy.change(seed=5)
            self.newer = await self._rig.publish()
        return Step(stop="over") if self._turns == TURNS else Step(f" {self._turns}? no ")


def tokenization(folder: Path) -> Tokenization:
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenization(folder)


def conversation_with(rig: Rig, talk: Talk, folder: Path) -> Conversation:
    words, opening = tokenization(folder), Opening("12+34=")
    rules = Rules(max_turns=TURNS)
    _, ids = words.encode(opening.prompt)

    async def sample(request: GenerateRequest, completions: Sequence[Completion]) -> None:
        piece = Piece(tuple(completions))
        asked = piece.begin(request)
        async for parts in rig.engine.generate(
            request_id=rig.next_request(),
            prompt_token_ids=asked.prompt_token_ids,
            n=asked.n,
            sampling=asked.sampling,
        ):
            for part in parts:
                piece.take(part, generator_id="g0")

    language = Language(
        tokenization=words, bridges=Bridges(words), rules=rules, opening=opening, opening_ids=ids,
        stop_ids=frozenset(), now=datetime(2026, 1, 2),
    )  # fmt: skip
    speaker = Speaker(
        offered=OfferedEnvironment(name="talk", tasks=None, start=lambda: talk, rules=rules),  # type: ignore[arg-type]
        language=language,
        request=GenerateRequest(request_id="r", prompt_token_ids=tuple(ids), sampling=Sampling(max_tokens=20)),
        sample=sample,
        calls=EnvironmentCalls(timeout_s=60),
        progress=Progress(),
        metrics=RolloutMetrics(Metrics("env-service")),
    )
    return Conversation(0, talk, speaker)


def gap(rig: Rig, trajectory: Trajectory, turn: Turn) -> float:
    """Of a turn's logprobs to those of the whole sequence under the policy as it is now."""
    scored = np.array(rig.policy.logprobs(trajectory.token_ids.tolist()))[turn.completion_start - 1 : turn.end - 1]
    return float(np.abs(scored - trajectory.behavior_logprobs[turn.completion_start : turn.end]).max())


async def test_five_turns_with_a_weight_update_in_the_middle(rig: Rig, tmp_path: Path) -> None:
    older = await rig.publish()
    before = rig.policy.snapshot()
    talk = Talk(rig)
    conversation = conversation_with(rig, talk, tmp_path)
    async with asyncio.timeout(120):
        await conversation.hold()

    trajectory = conversation.speech.transcript.record(
        RewardRecord(reward=0.0, verifier="v"), text="", stop_reason="over", turn_rewards=True
    )
    versions = [int(trajectory.token_versions()[turn.completion_start]) for turn in trajectory.turns]
    old, new = (PolicyVersion.parse(version).number for version in (older, talk.newer))
    assert versions == [old, old, old, new, new]
    assert max(gap(rig, trajectory, turn) for turn in trajectory.turns[3:]) < TOLERANCE
    assert min(gap(rig, trajectory, turn) for turn in trajectory.turns[:3]) > 10 * TOLERANCE
    rig.policy.restore(before)
    assert max(gap(rig, trajectory, turn) for turn in trajectory.turns[:3]) < TOLERANCE
    await rig.publish()
