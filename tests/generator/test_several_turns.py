"""The engine's logprobs over a conversation of several turns are those of the policy on the trained sequence."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from env_service.environments.bridges import Bridges
from env_service.environments.interface import Action, OfferedEnvironment, Opening, Step, Task
from env_service.environments.rules import Rules
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import Completion, CompletionPiece, RolloutProgress
from env_service.rollouts.conversation import Conversation, Speaker
from env_service.rollouts.environment_calls import EnvironmentCalls
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.speech import Language
from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.model import PolicyVersion
from protocol.trajectories import RewardRecord, Trajectory, Turn
from services.http.metrics import Metrics
from tests.generator.conftest import VOCABULARY, Rig

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TURNS = 5
TOLERANCE = 1e-3
OPENING = Opening("12+34=")
LONG = Opening("12+34=" * 50)
"""Of more tokens than two blocks of the prefix cache have."""


class FiveTurns:
    """Five turns; in the third step new weights come."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._turns = 0
        self.newer = ""

    def reset(self, task: Task, seed: int) -> Opening:
        return OPENING

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


def conversation_with(
    rig: Rig, talk: FiveTurns, folder: Path, *, opening: Opening = OPENING, most: int = 20
) -> Conversation:
    words = tokenization(folder)
    rules = Rules(max_turns=TURNS)
    _, ids = words.encode(opening.prompt)

    async def sample(request: GenerateRequest, completions: Sequence[Completion]) -> None:
        piece = CompletionPiece(tuple(completions))
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
        request=GenerateRequest(request_id="r", prompt_token_ids=tuple(ids), sampling=Sampling(max_tokens=most)),
        sample=sample,
        calls=EnvironmentCalls(timeout_s=60),
        progress=RolloutProgress(),
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
    talk = FiveTurns(rig)
    conversation = conversation_with(rig, talk, tmp_path)
    async with asyncio.timeout(120):
        await conversation.hold()

    trajectory = recorded(conversation)
    versions = [int(trajectory.token_versions()[turn.completion_start]) for turn in trajectory.turns]
    old, new = (PolicyVersion.parse(version).number for version in (older, talk.newer))
    assert versions == [old, old, old, new, new]
    assert max(gap(rig, trajectory, turn) for turn in trajectory.turns[3:]) < TOLERANCE
    assert min(gap(rig, trajectory, turn) for turn in trajectory.turns[:3]) > 10 * TOLERANCE
    rig.policy.restore(before)
    assert max(gap(rig, trajectory, turn) for turn in trajectory.turns[:3]) < TOLERANCE
    await rig.publish()


class Busy(FiveTurns):
    """Five turns; with some of the steps new weights begin to come, and none is waited for."""

    def __init__(self, rig: Rig, published: "Published") -> None:
        super().__init__(rig)
        self._published = published

    async def step(self, action: Action) -> Step:
        self._turns += 1
        self._published.stepped()
        return Step(stop="over") if self._turns == TURNS else Step(f" {self._turns}? no ")


class Published:
    """New weights while turns are sampled: after each sixth step of anybody. `weights` are those of each version."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._steps = 0
        self._works: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()
        self.weights: dict[str, dict[str, torch.Tensor]] = {}

    def stepped(self) -> None:
        self._steps += 1
        if self._steps % 6 == 0:
            self._works.append(asyncio.create_task(self.publish()))

    async def publish(self) -> None:
        async with self._lock:
            self._rig.policy.change(seed=100 + len(self.weights))
            weights = self._rig.policy.snapshot()
            self.weights[await self._rig.publish()] = weights

    async def all_there(self) -> None:
        await asyncio.gather(*self._works)


def gaps_by_span(rig: Rig, trajectory: Trajectory, published: Published) -> list[tuple[float, bool]]:
    """Of each row of tokens that one version sampled: its gap to that version, and whether older keys and values may
    have been at work.
    """
    found = []
    for span in trajectory.version_spans:
        rig.policy.restore(published.weights[span.version])
        scored = np.array(rig.policy.logprobs(trajectory.token_ids.tolist()))[span.start - 1 : span.end - 1]
        gaps = np.abs(scored - trajectory.behavior_logprobs[span.start : span.end])
        found.append((float(gaps.max()), span.cache is not None))
    return found


def recorded(conversation: Conversation) -> Trajectory:
    return conversation.speech.transcript.record(
        reward=RewardRecord(reward=0.0, verifier="v"), stop_reason="over", turn_rewards=True
    )


async def test_turns_in_flight_while_weights_are_published_are_exact_but_where_their_cache_is_marked_old(
    rig: Rig, tmp_path: Path
) -> None:
    before = rig.policy.snapshot()
    published = Published(rig)
    await published.publish()
    conversations = [conversation_with(rig, Busy(rig, published), tmp_path, opening=LONG, most=60) for _ in range(10)]
    async with asyncio.timeout(300):
        await asyncio.gather(*(conversation.hold() for conversation in conversations))
        await published.all_there()

    rows = [row for each in conversations for row in gaps_by_span(rig, recorded(each), published)]
    assert len(published.weights) > 4
    assert [gap for gap, old in rows if not old and gap >= TOLERANCE] == []
    assert sum(not old for _, old in rows) > 20
    rig.policy.restore(before)
    await rig.publish()


async def test_a_turn_whose_prompt_was_cached_under_older_weights_says_so(rig: Rig, tmp_path: Path) -> None:
    before = rig.policy.snapshot()
    _, ids = tokenization(tmp_path).encode(LONG.prompt)

    async def sampled() -> list[GeneratePart]:
        request, sampling = rig.next_request(), Sampling(max_tokens=4)
        answer = rig.engine.generate(request_id=request, prompt_token_ids=ids, n=1, sampling=sampling)
        return [part async for parts in answer for part in parts]

    older = await rig.publish()
    await sampled()
    await rig.engine.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    waits = asyncio.create_task(sampled())
    while not rig.engine.counters().waiting:  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.01)
    rig.policy.change(seed=9)
    newer = await rig.publish()
    parts = await waits

    spans = parts[-1].version_spans
    assert [(span.version, span.cache) for span in spans] == [(newer, older)], "it looks unmixed by its versions alone"
    tokens = [token for part in parts for token in part.token_ids]
    logprobs = [logprob for part in parts for logprob in part.behavior_logprobs]
    scored = rig.policy.logprobs((*ids, *tokens))[len(ids) - 1 :]
    assert max(abs(own - theirs) for own, theirs in zip(logprobs, scored, strict=True)) > 10 * TOLERANCE
    assert [span.cache for span in (await sampled())[-1].version_spans] == [None]
    rig.policy.restore(before)
    await rig.publish()
