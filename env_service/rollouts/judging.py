"""The worth of finished conversations: the rewards of their turns, and what a verifier says of the last one.

Reward services score a group's completions: answers become records, failures those of the lease.
"""

import json
import secrets
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Protocol

from pydantic import JsonValue, ValidationError

from env_service.environments.interface import Task, Verification, text_of
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.conversation import Conversation, Fault
from env_service.rollouts.outcomes import (
    DataFailure,
    InfrastructureFailure,
    RolloutFailure,
    RolloutMetrics,
    in_whole_characters,
    why_nothing,
)
from env_service.rollouts.speech import Transcript
from protocol.codec import describe
from protocol.rewards import ScoreItem, ScoreMessage
from protocol.trajectories import (
    CUT_OFF,
    MAX_COMPONENTS,
    MAX_EXPLANATION_CHARS,
    MAX_STOP_REASON_CHARS,
    MAX_VERSION_CHARS,
    ErrorKind,
    RewardRecord,
    Trajectory,
    fault_of_reward,
)
from services.rewards.client import RewardClient
from services.rewards.items import ItemScore
from services.tracing import note, span

_MAX_EXPLAINED_CHARS = 1 << 19
"""Of a whole group, which is one message: little of each trajectory where there are thousands."""
_MAX_GIVEN_CHARS = 1000
_MAX_PROMPT_CHARS = 2000
_MAX_CHARS = 1 << 20
_MAX_TEXT_BYTES = 1 << 21
"""Of the texts of a whole group, whose message is read up to a header of 4 MiB: the longest are cut first."""
_MAX_ERROR_CHARS = 4096


class GroupScoring:
    """The scoring of groups. It waits for as long as no service answers: the rollout's own time bounds it."""

    def __init__(self, client: RewardClient) -> None:
        self._client = client

    async def score(self, items: Sequence[ScoreItem]) -> list[RewardRecord]:
        """A record for each item, in order: a reward, the error that a service answered with, or that services
        which are well do not answer for it.

        Raises DataFailure when the services refuse an item, InfrastructureFailure when the attempts are used up.
        """
        scored = await self._client.score(items)
        for one in scored:
            if one.error is not None and not one.answered and one.error.kind != "data":
                raise (DataFailure if one.error.kind == "user" else InfrastructureFailure)(one.error.message)
        room = min(MAX_EXPLANATION_CHARS, _MAX_EXPLAINED_CHARS // max(1, len(items)))
        return [_scored_record(one, _explained(item, one)[:room]) for item, one in zip(items, scored, strict=True)]


def _explained(item: ScoreItem, scored: ItemScore) -> str:
    """The verifier's explanation of its reward, and the arguments that it was given, the right answer among them."""
    return "\n".join(filter(None, (scored.explanation, given_text(item.arguments))))


def given_text(arguments: Mapping[str, JsonValue]) -> str:
    """A verifier's arguments as a person reads them, cut where they are long, as tests are."""
    if not arguments:
        return ""
    text = json.dumps(arguments, ensure_ascii=False, default=str).encode("utf-8", errors="replace").decode()
    return f"given: {text if len(text) <= _MAX_GIVEN_CHARS else text[:_MAX_GIVEN_CHARS] + '…'}"


def text_of_task(task: Task) -> str:
    """A task as a person reads it: its prompt, cut, and what says the right answer."""
    prompt = text_of(task.prompt)[:_MAX_PROMPT_CHARS].encode("utf-8", errors="replace").decode()
    return f"{prompt}\n{given_text({**task.data, **task.verification.arguments})}".strip()


def shortened(texts: Sequence[str], *, most_bytes: int) -> list[str]:
    """The texts, which in UTF-8 have no more than so many bytes together: of the longest the ends are missing."""
    encoded = [text.encode("utf-8", errors="replace") for text in texts]
    left, most = most_bytes, 0
    for number, size in enumerate(sorted(map(len, encoded))):
        # Those that are left share what the shorter ones do not need.
        most = left // (len(encoded) - number)
        if size > most:
            break
        left -= size
        most = size
    return [text[:most].decode(errors="ignore") for text in encoded]


def _scored_record(scored: ItemScore, explanation: str) -> RewardRecord:
    return RewardRecord(
        reward=scored.reward,
        # A verifier of many parts may say more than a record holds: its reward is worth more than the last of them.
        components=dict(islice(scored.components.items(), MAX_COMPONENTS)),
        verifier=scored.verifier,
        verifier_version=scored.verifier_version[:MAX_VERSION_CHARS],
        service_id=scored.service_id,
        endpoint=scored.endpoint,
        latency_s=scored.latency_s,
        attempts=scored.attempts,
        error_kind=scored.error.kind if scored.error else None,
        error=scored.error.message if scored.error else None,
        explanation=explanation,
    )


class JudgedConversation(Protocol):
    """A conversation that is over: the `index`-th of its lease, in the environment `name`.

    `given` is a reward of the whole, besides those of its turns; None if turns alone have rewards.
    """

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def fault(self) -> Fault | None: ...
    @property
    def verification(self) -> Verification | None: ...
    @property
    def stop_reason(self) -> str: ...
    @property
    def given(self) -> float | None: ...
    @property
    def invalid_actions(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def transcript(self) -> Transcript: ...
    @property
    def text(self) -> str: ...
    @property
    def last_text(self) -> str: ...
    @property
    def single_turn(self) -> bool: ...


class Judging:
    """Rewards of a group's conversations, those that a verifier judges in one request."""

    def __init__(self, *, scoring: GroupScoring, metrics: RolloutMetrics) -> None:
        self._scoring = scoring
        self._metrics = metrics

    async def trajectories(
        self,
        conversations: Sequence[JudgedConversation],
        *,
        prompt: str,
        progress: RolloutProgress,
        apart: JudgedConversation | None = None,
    ) -> tuple[Trajectory, ...]:
        """Of every conversation in which a turn was sampled; one that its environment spoilt holds an error and no
        reward. `prompt` is what a verifier is told of how they began; of a player of a game, it is that player's own.
        `apart` is the one among them that no verifier compares with the others.

        Raises DataFailure if it spoilt all of them, InfrastructureFailure if that may pass or no turn was sampled in
        any, and what scoring raises.
        """
        faults = [each.fault for each in conversations if each.fault is not None]
        if faults and len(faults) == len(conversations):
            raise failure_of_all(faults)
        begun = [each for each in conversations if each.transcript.turns]
        self._count_turnless(each for each in conversations if not each.transcript.turns)
        if not begun:
            raise InfrastructureFailure("the policy had no turn within the time of a conversation")
        judged = await self._judged(begun, prompt=prompt, progress=progress, apart=apart)
        texts = shortened([each.text[:_MAX_CHARS] for each in begun], most_bytes=_MAX_TEXT_BYTES)
        return tuple(
            self._trajectory(each, judged.get(each.index), text=text, began=progress.began)
            for each, text in zip(begun, texts, strict=True)
        )

    async def _judged(
        self,
        conversations: Sequence[JudgedConversation],
        *,
        prompt: str,
        progress: RolloutProgress,
        apart: JudgedConversation | None,
    ) -> Mapping[int, RewardRecord]:
        """The verdicts of verifiers, by the conversation's index. One that no verifier can be asked of has an error."""
        asked: list[tuple[JudgedConversation, ScoreItem]] = []
        verdicts: dict[int, RewardRecord] = {}
        for each in conversations:
            if each.verification is None:
                continue
            try:
                asked.append((each, _item(each, each.verification, prompt=prompt)))
            except ValidationError as error:
                verdicts[each.index] = _error(each.name, f"no verifier can be asked of it: {describe(error)}")
        if not asked:
            return verdicts
        compared = [(_player(each), each is apart) for each, _ in asked]
        items = _grouped([item for _, item in asked], compared=compared)
        with progress.waiting_for("rewards"), self._metrics.scoring_s.time(), span("scoring"):
            asked_at = time.monotonic()
            records = await self._scoring.score(items)
            progress.scored(asked_at)
            note(**_told(records))
        return verdicts | {each.index: record for (each, _), record in zip(asked, records, strict=True)}

    def _trajectory(
        self, conversation: JudgedConversation, judged: RewardRecord | None, *, text: str, began: float
    ) -> Trajectory:
        record = _record(conversation, judged)
        self._count(conversation, record)
        transcript = conversation.transcript
        return transcript.record(
            reward=record,
            began=began,
            completion_text=text,
            stop_reason=conversation.stop_reason[:MAX_STOP_REASON_CHARS],
            # A verifier alone gives none to turns, and what it says of them may stand in its components.
            turn_rewards=(judged is None and conversation.given is None) or transcript.has_rewards,
            player=_player(conversation),
            forks=conversation.forks if isinstance(conversation, Conversation) else (),
        )

    def _count_turnless(self, conversations: Iterable[JudgedConversation]) -> None:
        """Not of a player whose game was over before its turn came: others of the game tell of it."""
        for each in conversations:
            if not _player(each):
                reason = why_nothing(spoilt=each.fault is not None, stop_reason=each.stop_reason)
                self._metrics.turnless.labels(environment=each.name, reason=reason).inc()

    def _count(self, conversation: JudgedConversation, record: RewardRecord) -> None:
        environment = conversation.name
        invalid = conversation.invalid_actions
        if isinstance(conversation, Conversation):
            invalid -= conversation.inherited_invalid
        if invalid:
            self._metrics.invalid_actions.labels(environment=environment).inc(invalid)
        if conversation.stop_reason:
            reason = conversation.stop_reason if conversation.stop_reason in CUT_OFF else "ended"
            self._metrics.stops.labels(environment=environment, reason=reason).inc()
        self._metrics.judged(record, environment=environment)


def _told(records: Sequence[RewardRecord]) -> dict[str, float]:
    """Facts of what was scored, for its span."""
    rewards = [record.reward for record in records if record.reward is not None]
    return {"rewards": len(rewards), **({"reward_mean": fmean(rewards)} if rewards else {})}


def failure_of_all(faults: Sequence[Fault]) -> RolloutFailure:
    """Of a group whose conversations are all spoilt. What may pass is worth another attempt."""
    passing = [fault for fault in faults if fault.passing]
    return InfrastructureFailure(passing[0].text) if passing else DataFailure(faults[0].text)


def _item(conversation: JudgedConversation, verification: Verification, *, prompt: str) -> ScoreItem:
    return ScoreItem(
        id=str(conversation.index),
        verifier=verification.verifier,
        completion=conversation.last_text,
        prompt=_own_prompt(conversation) or prompt,
        messages=_messages(conversation),
        arguments=verification.arguments,
    )


def _messages(conversation: JudgedConversation) -> tuple[ScoreMessage, ...]:
    """The conversation that its last text ends; none where the prompt alone says it, as a message of the user. What an
    agent asked stays in its own process: of its conversation the prompt is told.
    """
    said = conversation.messages_before_last if isinstance(conversation, Conversation) else ()
    if [message.role for message in said] == ["user"]:
        return ()
    return tuple(ScoreMessage(role=message.role, content=message.content) for message in said)


def _grouped(items: Sequence[ScoreItem], *, compared: Sequence[Hashable]) -> list[ScoreItem]:
    """The items, those of one verifier that are `compared` alike named as one group: some verifiers compare them."""
    keys = [(item.verifier, alike) for item, alike in zip(items, compared, strict=True)]
    sizes = Counter(keys)
    names = {key: secrets.token_hex(8) for key, size in sizes.items() if size > 1}
    return [
        item.model_copy(update={"group": names[key], "group_size": sizes[key]}) if key in names else item
        for item, key in zip(items, keys, strict=True)
    ]


def _player(conversation: JudgedConversation) -> str:
    """The policy's part in a game of several players; empty where there is one."""
    return conversation.player if isinstance(conversation, Conversation) else ""


def _own_prompt(conversation: JudgedConversation) -> str:
    """Opening of a player's conversation: others of its game began otherwise."""
    return conversation.opening_text if isinstance(conversation, Conversation) and conversation.player else ""


def _record(conversation: JudgedConversation, judged: RewardRecord | None) -> RewardRecord:
    """The sum of the turns' rewards and of the verifier's, with the environment's metrics among the components."""
    name = "/".join(filter(None, (conversation.name, _player(conversation))))
    if conversation.fault is not None:
        return _error(name, f"environment {name}: {conversation.fault.text}", passing=conversation.fault.passing)
    if judged is not None and judged.reward is None:
        return judged
    said = RewardRecord(reward=0.0, verifier=name) if judged is None else judged
    reward = conversation.transcript.earned + (conversation.given or 0.0) + (said.reward or 0.0)
    metrics = _metrics(conversation)
    if judged is not None and reward == said.reward and not metrics:
        return judged
    components = dict([*said.components.items(), *metrics.items()][:MAX_COMPONENTS])
    fault = fault_of_reward(verifier=said.verifier, reward=reward, components=components)
    if fault is not None:
        return _error(name, fault)
    return said.model_copy(update={"reward": reward, "components": components})


def _metrics(conversation: JudgedConversation) -> Mapping[str, float]:
    """The environment's own, and of a conversation that could have had several turns how it went."""
    if conversation.single_turn:
        return conversation.metrics
    turns = conversation.transcript.turns
    return {**conversation.metrics, "turns": float(turns), "invalid_actions": float(conversation.invalid_actions)}


def _error(verifier: str, text: str, *, passing: bool = False) -> RewardRecord:
    kind: ErrorKind = "infrastructure" if passing else "data"
    return RewardRecord(verifier=verifier, error_kind=kind, error=in_whole_characters(text)[:_MAX_ERROR_CHARS])
