"""Exactness of training data: each position is what the engine sampled or was shown, whatever the template."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from env_service.environments.bridges import Bridges
from env_service.environments.interface import (
    Action,
    ChatMessage,
    OfferedEnvironment,
    Opening,
    Prompt,
    Step,
    Task,
    Tool,
)
from env_service.environments.rules import History, Rules
from env_service.environments.tokenization import ChatTemplateError, Tokenization, numbered
from env_service.rollouts import summaries
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.conversation import Conversation, Speaker
from env_service.rollouts.environment_calls import EnvironmentCalls
from env_service.rollouts.outcomes import RolloutMetrics
from env_service.rollouts.speech import Language
from protocol.generation import GenerateRequest, Sampling
from protocol.trajectories import SUMMARY_STATE, RewardRecord, Trajectory
from services.http.metrics import Metrics
from tests.env_service.chat_models import PREFILLED, TEMPLATES, ends_of, make_model, model_with
from tests.env_service.random_engine import RandomEngine, Shown

TEXTS = (
    "no",
    "",
    "seven is\ntoo low",
    " spaces ",
    '{"a": 2, "b": [1]}',
    "<think>hm</think> 7",
    "ünïcödé 漢字",
    "\n",
    "</s>",
)
KEPT_AS_IT_IS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
NOW = datetime(2026, 1, 2)
TOOL: Tool = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}


@dataclass
class Chatty:
    """Says random things in random roles, and ends at some time."""

    chance: random.Random
    roles: Sequence[str]
    opening: Opening
    history: list[ChatMessage] = field(default_factory=list)

    def reset(self, task: Task, seed: int) -> Opening:
        return self.opening

    def step(self, action: Action) -> Step:
        self.history.append(ChatMessage("assistant", action.text))
        if self.chance.random() < 0.15:
            return Step(stop="enough", reward=self.chance.random())
        return Step(
            self._observation(), reward=self.chance.choice([0.0, 0.5]), state=self.chance.choice(["", "s1", "s2"])
        )

    def _observation(self) -> Prompt:
        if isinstance(self.opening.prompt, str):
            return self.chance.choice([text for text in TEXTS if text])
        role = self.chance.choice(self.roles)
        count = self.chance.choice([1, 1, 2]) if role == "tool" else 1
        said = tuple(self._message(role) for _ in range(count))
        self.history += said
        return said

    def _message(self, role: str) -> ChatMessage:
        return ChatMessage(role, self.chance.choice(TEXTS), name="look" if role == "tool" else "")  # type: ignore[arg-type]


class RandomConversations:
    """Conversations over one template with an engine of random tokens."""

    def __init__(self, model: Path, *, ends: Sequence[str], seed: int, history: History = "append") -> None:
        self.chance = random.Random(seed)
        self.tokenization = Tokenization(model)
        self.bridges = Bridges(self.tokenization)
        self.stops = [self.tokenization.special_tokens[end] for end in ends]
        self.engine = RandomEngine(self.chance, tokens=400, stops=self.stops)
        self.history = history
        self.context_tokens: int | None = None
        self.roles = ["user", *self._if_carried("tool")]
        self.systems = [(), *[(ChatMessage("system", "Be brief."),) for _ in self._if_carried("system")]]

    def _if_carried(self, role: str) -> list[str]:
        try:
            self.bridges.check_roles((role,), history=self.history)  # type: ignore[arg-type]
        except ChatTemplateError:
            return []
        return [role]

    async def hold(self, *, plain: bool = False) -> Conversation:
        chance = self.chance
        rules = Rules(
            max_turns=chance.randrange(1, 7),
            trajectory_tokens=chance.choice([None, 300]),
            stop=chance.choice([(), ("th",)]),
            history=self.history,
            context_tokens=self.context_tokens,
        )
        tools = chance.choice([(), (TOOL,)]) if "tool" in self.roles else ()
        messages = (*chance.choice(self.systems), ChatMessage("user", chance.choice(TEXTS)))
        opening = Opening("Go on: " if plain else messages, tools=tools, state="s0")
        _, ids = self.tokenization.encode(opening.prompt, tools=tools, now=NOW)
        language = Language(
            tokenization=self.tokenization,
            bridges=self.bridges,
            rules=rules,
            opening=opening,
            opening_ids=ids,
            stop_ids=frozenset(self.stops),
            now=NOW,
        )
        environment = Chatty(chance, self.roles, opening)
        request = GenerateRequest(
            request_id="r", prompt_token_ids=tuple(ids), sampling=Sampling(max_tokens=chance.randrange(1, 20))
        )
        self.engine.turns.clear()
        speaker = Speaker(
            offered=OfferedEnvironment(name="chatty", tasks=None, start=lambda: environment, rules=rules),  # type: ignore[arg-type]
            language=language,
            request=request,
            sample=self.engine.sample,
            calls=EnvironmentCalls(timeout_s=30),
            progress=RolloutProgress(),
            metrics=RolloutMetrics(Metrics("env-service")),
        )
        conversation = Conversation(0, environment, speaker)
        await conversation.hold()
        return conversation


def check(trajectory: Trajectory, turns: Sequence[Shown]) -> None:
    """The trajectory against what the engine knows of each turn, in order."""
    assert len(trajectory.turns) == len(turns)
    starts = (0, *trajectory.sequence_starts)
    sampled = np.zeros(len(trajectory.token_ids), dtype=bool)
    for turn, shown in zip(trajectory.turns, turns, strict=True):
        context = max(start for start in starts if start <= turn.start)
        assert trajectory.token_ids[context : turn.completion_start].tolist() == list(shown.prompt)
        assert trajectory.token_ids[turn.completion_start : turn.end].tolist() == shown.sampled
        expected = np.array(shown.logprobs, dtype=np.float32)
        assert np.array_equal(trajectory.behavior_logprobs[turn.completion_start : turn.end], expected)
        assert trajectory.token_versions()[turn.completion_start : turn.end].tolist() == shown.versions
        sampled[turn.completion_start : turn.end] = True
    assert np.array_equal(trajectory.loss_mask.astype(bool), sampled)
    assert not trajectory.behavior_logprobs[~sampled].any()
    assert trajectory.turns[-1].end == len(trajectory.token_ids)


def recorded(conversation: Conversation) -> Trajectory:
    return conversation.speech.transcript.record(
        reward=RewardRecord(reward=0.0, verifier="v"), stop_reason=conversation.stop_reason, turn_rewards=True
    )


@pytest.mark.parametrize("history", ["append", "split"])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_the_trained_tokens_are_those_that_the_engine_sampled_and_was_shown(
    name: str, history: History, tmp_path: Path
) -> None:
    world = RandomConversations(model_with(name, tmp_path), ends=ends_of(name), seed=len(name), history=history)
    turns = contexts = 0

    for _ in range(25):
        conversation = await world.hold()
        assert conversation.fault is None, conversation.fault
        trajectory = recorded(conversation)
        check(trajectory, list(world.engine.turns.values()))
        turns += len(trajectory.turns)
        contexts += 1 + len(trajectory.sequence_starts)

    assert turns > 30
    if history == "split":
        assert contexts == turns
    elif name != "headers_end_turns":  # where a turn may end with a header that does not fit what comes
        assert contexts == 25


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_conversation_goes_on_from_what_the_policy_wrote_of_it(name: str, tmp_path: Path) -> None:
    """The tokens are those of the engine; no prompt of an action that has turns in it is longer than was allowed; and
    the environment hears of actions alone.
    """
    world = RandomConversations(model_with(name, tmp_path), ends=ends_of(name), seed=len(name), history="summarize")
    world.context_tokens = most = len(world.tokenization.encode((ChatMessage("user", ""),))[1]) + 50
    summed_up = went_on = 0

    for _ in range(40):
        conversation = await world.hold()
        assert conversation.fault is None, conversation.fault
        trajectory = recorded(conversation)
        check(trajectory, list(world.engine.turns.values()))
        environment = conversation.environment
        assert isinstance(environment, Chatty)
        told = [message for message in environment.history if message.role == "assistant"]
        keys = [turn.state for turn in trajectory.turns]
        assert len(told) == len(keys) - keys.count(SUMMARY_STATE)
        summed_up += keys.count(SUMMARY_STATE)
        starts = (0, *trajectory.sequence_starts)
        for before, turn in pairwise(trajectory.turns):
            context = max(start for start in starts if start <= turn.start)
            if before.start >= context and turn.state != SUMMARY_STATE:
                assert turn.completion_start - context <= most
                went_on += 1

    assert summed_up > 3
    assert went_on > 3


async def test_what_is_behind_a_summary_is_the_opening_the_summary_and_what_came_then(tmp_path: Path) -> None:
    world = RandomConversations(model_with("chatml", tmp_path), ends=["<|im_end|>"], seed=4, history="summarize")
    world.context_tokens, compared = 60, 0

    for _ in range(20):
        conversation = await world.hold()
        opening = conversation.speaker.language.opening.prompt
        assert isinstance(opening, tuple)
        shown = list(world.engine.turns.values())
        keys = [turn.state for turn in recorded(conversation).turns]
        for place, key in enumerate(keys[:-1]):
            if key != SUMMARY_STATE:
                continue
            before, after = (
                world.tokenization.decode([shown[at].prompt], special=True)[0] for at in (place, place + 1)
            )
            summary = world.tokenization.decode([shown[place].sampled])[0].strip()
            assert before.endswith(f"{summaries.REQUEST.content}<|im_end|>\n<|im_start|>assistant\n")
            assert opening[-1].content in after
            assert f"written by yourself:\n{summary}\n\nWhat came then:\n" in after
            assert after.count("<|im_start|>assistant") == 1
            compared += 1
    assert compared > 3


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_prompt_that_is_rendered_anew_is_what_transformers_makes_of_the_history(
    name: str, tmp_path: Path
) -> None:
    world = RandomConversations(model_with(name, tmp_path), ends=ends_of(name), seed=len(name) + 1, history="split")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    compared, begun = 0, PREFILLED.get(name, "")

    for _ in range(10):
        conversation = await world.hold()
        environment, opening = conversation.environment, conversation.speaker.language.opening
        assert isinstance(environment, Chatty)
        assert isinstance(opening.prompt, tuple)
        history = [*opening.prompt, *environment.history]
        turns = [place for place, message in enumerate(history) if message.role == "assistant"]
        for place, shown in zip(turns, world.engine.turns.values(), strict=True):
            if theirs.decode(shown.prompt).endswith(begun):
                history[place] = replace(history[place], content=begun + history[place].content)
            ids = theirs.apply_chat_template(
                [as_dict(message) for message in numbered(history[:place])],
                tools=[dict(tool) for tool in opening.tools] or None,
                add_generation_prompt=True,
                strftime_now=NOW.strftime,
                return_dict=True,
            )["input_ids"]
            assert list(shown.prompt) == ids
            compared += 1
    assert compared > 10


async def test_what_a_template_puts_before_an_answer_stays_there_when_the_history_is_rendered_anew(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path, KEPT_AS_IT_IS, ends=["<|im_end|>"])
    world, compared = RandomConversations(model, ends=["<|im_end|>"], seed=5, history="split"), 0

    for _ in range(10):
        conversation = await world.hold()
        assert isinstance(conversation.environment, Chatty)
        answers = [each.content for each in conversation.environment.history if each.role == "assistant"]
        prompts = Tokenization(model).decode([each.prompt for each in world.engine.turns.values()], special=True)
        for (before, after), answer in zip(pairwise(prompts), answers, strict=False):
            assert before.endswith("<think>\n")
            assert after.startswith(f"{before}{answer}<|im_end|>")
            compared += 1
    assert compared > 10


def as_dict(message: ChatMessage) -> dict[str, str]:
    called = {"name": message.name, "tool_call_id": message.tool_call_id} if message.role == "tool" else {}
    return {"role": message.role, "content": message.content, **called}


async def test_plain_text_is_continued_token_by_token(tmp_path: Path) -> None:
    world = RandomConversations(model_with("chatml", tmp_path), ends=["<|im_end|>"], seed=3)

    for _ in range(25):
        conversation = await world.hold(plain=True)
        trajectory = recorded(conversation)
        check(trajectory, list(world.engine.turns.values()))
        assert not trajectory.sequence_starts


async def test_a_stop_text_ends_a_turn_at_the_token_that_completes_it(tmp_path: Path) -> None:
    world = RandomConversations(model_with("chatml", tmp_path), ends=["<|im_end|>"], seed=5)
    world.engine.end_chance = 0.01
    stopped = 0

    for _ in range(60):
        conversation = await world.hold()
        stops = conversation.speaker.language.rules.stop
        for shown in world.engine.turns.values():
            text = world.tokenization.decode([shown.sampled])[0]
            before = world.tokenization.decode([shown.sampled[:-1]])[0]
            assert not any(stop in before for stop in stops)
            stopped += any(stop in text for stop in stops)

    assert stopped
