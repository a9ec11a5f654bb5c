"""The two sides of one conversation: what the policy sampled becomes text for the environment, and what the environment
says becomes tokens behind it.

    sampled tokens ──decoded──▶ action          observation ──bridge──▶ tokens behind the sampled ones
         └──────────── stay as they are in the transcript ────────────┘

No token that was sampled is ever made again from text. Where a turn's prompt cannot be an extension of the turn before
(`history = "split"`, a turn that ended in a way that its template cannot write, or a conversation that goes on from a
summary), the prompt is rendered anew from the messages and begins a sequence of its own.

The text means to the environment what its rules say: actions have several forms.
"""

import copy
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np
from pydantic import JsonValue

from env_service.environments.bridges import Bridges
from env_service.environments.interface import Action, ChatMessage, Opening, Prompt, Tool, text_of
from env_service.environments.rules import ActionForm, Rules, ToolFormat
from env_service.environments.tokenization import TemplateArguments, Tokenization
from env_service.environments.tool_formats import ALL_FORMATS, ParsedTurn, is_sound, read
from env_service.rollouts import summaries
from env_service.rollouts.completions import Completion, EndOf, seconds_since
from env_service.rollouts.routing import TokenRouting
from protocol.trajectories import (
    MAX_STATE_CHARS,
    SUMMARY_STATE,
    TOGETHER,
    FinishReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from services.thinking import said_alone, without_thought

_DECODER = json.JSONDecoder()


def value_in(text: str, form: ActionForm) -> JsonValue:
    """The value that the form finds in the text, None if nothing: see `Action.value`. A thought holds no action."""
    if form == "json":
        return last_object(without_thought(text))
    if form.startswith("tag:"):
        return last_tag(without_thought(text), form.removeprefix("tag:"))
    return text if form == "text" else None


def last_tag(text: str, name: str) -> str | None:
    """The text in the last <name>…</name>, without space around it. The end may be missing: a stop text cuts it."""
    _, opened, rest = text.rpartition(f"<{name}>")
    return rest.partition(f"</{name}>")[0].strip() if opened else None


def last_object(text: str) -> dict[str, JsonValue] | None:
    """The last JSON object in the text that is in no other one; None if it cannot be told to others, as with NaN or
    with half a surrogate pair, which JSON can escape.
    """
    found: dict[str, JsonValue] | None = None
    end = 0
    for match in re.finditer(r"\{", text):
        if match.start() >= end:
            try:
                found, end = _DECODER.raw_decode(text, match.start())
            except (ValueError, RecursionError):
                continue
    return found if found is None or is_sound(found) else None


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first of the stop texts."""
    places = [text.index(each) for each in stop if each in text]
    return text[: min(places)] if places else text


@dataclass
class _Exchange:
    """A turn that was sampled. `reward` and `state` as in `Turn`, times as in `Completion`."""

    start: int
    completion_start: int
    end: int
    finish_reason: FinishReason
    generator_ids: tuple[str, ...]
    state: str
    asked_at: float | None = None
    ended_at: float | None = None
    reward: float = 0.0

    def record(self, *, with_reward: bool, began: float | None) -> Turn:
        """As it goes to the learner."""
        return Turn(
            start=self.start,
            completion_start=self.completion_start,
            end=self.end,
            finish_reason=self.finish_reason,
            generator_ids=self.generator_ids,
            reward=self.reward if with_reward else None,
            state=self.state,
            asked_s=seconds_since(began, self.asked_at),
            ended_s=seconds_since(began, self.ended_at),
        )


@dataclass
class Transcript:
    """T tokens so far, which of them were sampled, their logprobs and versions; contexts and turns in it. `credited`:
    somebody gave its turns rewards of their own, if only zeros.
    """

    token_ids: list[int] = field(default_factory=list)
    credited: bool = False
    _logprobs: list[float] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _turns: list[_Exchange] = field(default_factory=list)
    _routing: TokenRouting = field(default_factory=TokenRouting)

    @property
    def context(self) -> tuple[int, ...]:
        """The next context of the policy: the tokens from the last start on."""
        return tuple(self.token_ids[self._begun :])

    @property
    def routed(self) -> int:
        """Place in `context` behind the last token whose routed experts are known."""
        return max(0, self._routing.end - self._begun)

    @property
    def _begun(self) -> int:
        return self._starts[-1] if self._starts else 0

    @property
    def turns(self) -> int:
        """Number of turns that were sampled."""
        return len(self._turns)

    @property
    def sampled_end(self) -> int:
        """Place behind the last sampled token; 0 before the first turn."""
        return self._turns[-1].end if self._turns else 0

    def copy(self) -> "Transcript":
        """The same so far; what is appended to one of them is not in the other."""
        return replace(
            self,
            token_ids=list(self.token_ids),
            _logprobs=list(self._logprobs),
            _spans=list(self._spans),
            _starts=list(self._starts),
            _turns=[replace(turn) for turn in self._turns],
            _routing=replace(self._routing, pieces=list(self._routing.pieces)),
        )

    @property
    def sampled_by(self) -> str:
        """The generator that sampled last, and holds the conversation so far; empty before the first turn."""
        return self._turns[-1].generator_ids[-1] if self._turns and self._turns[-1].generator_ids else ""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that were sampled."""
        return sum(turn.end - turn.completion_start for turn in self._turns)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Open a context with its prompt: the first one, or another one, which sees nothing of those before it."""
        if self.token_ids:
            self._starts.append(len(self.token_ids))
        self.show(prompt_ids)

    def show(self, token_ids: Sequence[int]) -> None:
        """Append what the policy is given."""
        self.token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)

    def know(self, routing: TokenRouting) -> None:
        """Take routed experts of the context's tokens. Raises ValueError for those of another model."""
        self._routing.add(routing.pieces, shift=self._begun)

    def sampled(self, completion: Completion, *, state: str) -> None:
        """Append a turn. `state` is a key of what the policy was given in it."""
        assert completion.finish_reason is not None, "an unfinished completion"
        start, begun = len(self.token_ids), self._begun
        if completion.prompt_tokens == start - begun:  # an empty opening is asked for with a token in its place
            self.know(completion.routing)
        self.token_ids += completion.token_ids
        self._logprobs += completion.behavior_logprobs
        self._spans += [span.moved(start) for span in completion.version_spans]
        given = max(self.sampled_end, begun)
        self._turns.append(
            _Exchange(
                given,
                start,
                len(self.token_ids),
                completion.finish_reason,
                completion.generator_ids,
                _key(state),
                completion.asked_at,
                completion.ended_at,
            )
        )

    def earn(self, reward: float) -> None:
        """Add to the last turn's reward."""
        self._turns[-1].reward += reward

    @property
    def has_rewards(self) -> bool:
        """True if a turn earned something, or lost it, or was given its own reward."""
        return self.credited or any(turn.reward for turn in self._turns)

    @property
    def earned(self) -> float:
        """The sum of the turns' rewards."""
        return sum(turn.reward for turn in self._turns)

    def record(self, *, turn_rewards: bool, began: float | None = None, **judged: object) -> Trajectory:
        """The whole up to the last turn's end, as it goes to the learner; `turn_rewards` says whether its turns have
        rewards of their own, `judged` are the fields of a Trajectory that no token tells. At least one turn was
        sampled. Turns have times if it is said when the rollout `began`, by the monotonic clock. Whether all fits is
        looked at when its group is made.
        """
        length = self._turns[-1].end
        loss_mask = np.zeros(length, dtype=np.uint8)
        for turn in self._turns:
            loss_mask[turn.completion_start : turn.end] = 1
        fields = {
            "token_ids": np.array(self.token_ids[:length], dtype=np.int32),
            "loss_mask": loss_mask,
            "behavior_logprobs": np.array(self._logprobs[:length], dtype=np.float32),
            "version_spans": tuple(self._spans),
            "turns": tuple(turn.record(with_reward=turn_rewards, began=began) for turn in self._turns),
            "sequence_starts": tuple(start for start in self._starts if start < length),
            "routed_experts": self._routing.record(length),
        }
        return Trajectory.model_validate({**fields, **judged}, context=TOGETHER)


def _key(state: str) -> str:
    """A long key is told by its hash, which is as good."""
    return state if len(state) <= MAX_STATE_CHARS else hashlib.sha256(state.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Language:
    """Shared by a lease's conversations: the model's tokens, the rules, and how they open.

    `stop_ids` end a turn besides the model's own; `now` is the date that a chat template shows, the same for all.
    """

    tokenization: Tokenization
    bridges: Bridges
    rules: Rules
    opening: Opening
    opening_ids: Sequence[int]
    stop_ids: frozenset[int]
    now: datetime

    @property
    def is_plain(self) -> bool:
        """True if the policy continues text, without a chat template."""
        return isinstance(self.opening.prompt, str)

    def with_arguments(self, arguments: TemplateArguments) -> "Language":
        """The same one, whose chat template is told these, too; they go before those that it is told here."""
        bridges = self.bridges.with_arguments(arguments)
        return self if bridges is self.bridges else replace(self, tokenization=bridges.tokenization, bridges=bridges)

    def end_of(self) -> EndOf | None:
        """Test for the end of a completion by one of the rules' stop texts, if there are any."""
        return self._end if self.rules.stop else None

    def _end(self, token_ids: Sequence[int]) -> int | None:
        def stops(count: int) -> bool:
            text = self.tokenization.said(token_ids[:count])
            return any(stop in text for stop in self.rules.stop)

        count = len(token_ids)
        return bisect_left(range(count), True, key=stops) if stops(count) else None

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decoded, with special tokens or without them."""
        (text,) = self.tokenization.decode([token_ids], special=special)
        return text

    @property
    def tool_formats(self) -> Sequence[ToolFormat]:
        """In what formats calls of tools are read."""
        if self.rules.tool_format != "auto":
            return (self.rules.tool_format,)
        own = self.tokenization.call_format
        return ALL_FORMATS if own is None else (own,)

    @property
    def reads_own_calls(self) -> bool:
        """False where the chat template writes calls in a form that is none of `tool_formats`."""
        return self.rules.tool_format != "auto" or not self.tokenization.writes_unknown_calls

    def reading(self, text: str, *, tools: Sequence[Tool]) -> ParsedTurn:
        """The calls in a text that has its special tokens."""
        return read(text, tools=tools, formats=self.tool_formats)

    def ended_itself(self, completion: Completion) -> bool:
        """True if a turn's last token is one that ends turns: not, if it was cut off or ended by its text."""
        last = completion.token_ids[-1]
        known = last in self.stop_ids or last in self.tokenization.special_tokens.values()
        return completion.finish_reason == "stop" and known

    def action(self, completion: Completion, *, last: bool) -> Action:
        """The action that the environment is told of a turn."""
        assert completion.finish_reason is not None, "an unfinished completion"
        form = self.rules.action
        text = cut_at_stop(self.tokenization.said(completion.token_ids), self.rules.stop)
        # Tags and calls are special tokens in some vocabularies.
        whole = text if form == "text" else cut_at_stop(self.text(completion.token_ids, special=True), self.rules.stop)
        reading = self.reading(whole, tools=self.opening.tools) if form == "tools" else ParsedTurn(text)
        return Action(
            text=text,
            value=value_in(self.tokenization.in_tags(whole), form),
            calls=reading.calls,
            fault=reading.fault,
            last=last,
            finish_reason=completion.finish_reason,
        )


@dataclass
class Speech:
    """A conversation as tokens and as messages."""

    language: Language
    transcript: Transcript = field(default_factory=Transcript)
    _messages: list[ChatMessage] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _state: str = ""
    _heard: str = ""
    _last: Completion | None = None
    _summaries: int = 0
    _begun: int = 0
    _held_back: tuple[tuple[ChatMessage, ...], str] | None = None

    def __post_init__(self) -> None:
        opening = self.language.opening
        self.transcript.begin(self.language.opening_ids)
        self._messages += [] if isinstance(opening.prompt, str) else opening.prompt
        self._state = opening.state

    def copy(self) -> "Speech":
        """The same so far, with a transcript of its own; both may go on."""
        copied = copy.copy(self)
        copied.transcript = self.transcript.copy()
        copied._messages, copied._texts = list(self._messages), list(self._texts)
        return copied

    @property
    def room(self) -> int | None:
        """Tokens that the budget leaves for a turn; None without one."""
        budget = self.language.rules.trajectory_tokens
        return None if budget is None else budget - len(self.transcript.token_ids)

    @property
    def actions(self) -> int:
        """Number of the policy's turns that were actions, and not summaries."""
        return self.transcript.turns - self._summaries

    @property
    def sums_up(self) -> bool:
        """True if the next turn is a summary."""
        return self._held_back is not None

    @property
    def text(self) -> str:
        """The conversation behind its opening, as a person reads it."""
        return "\n\n".join(self._texts)

    @property
    def last_text(self) -> str:
        """The last text of the policy."""
        return self._heard

    def hear(self, completion: Completion) -> Action:
        """Take a finished turn down. What it means to the environment."""
        begun = self._begun_for_it()
        self.transcript.sampled(completion, state=self._state)
        room, actions = self.room, self.actions
        last = actions >= self.language.rules.max_turns or (room is not None and room < 1)
        action = self.language.action(completion, last=last)
        self._last, self._heard = completion, action.text
        # A template that has other marks would write these tags as text, which the policy has never seen.
        own_marks = self.language.tokenization.has_own_marks
        shown = said_alone(action.text) if own_marks else action.text
        self._messages.append(ChatMessage("assistant", begun + shown))
        self._texts.append(action.text)
        return action

    def _begun_for_it(self) -> str:
        """Beginning of the policy's turn by the template, where it takes that for the policy's own words; it may depend
        on what stands before.
        """
        tokenization = self.language.tokenization
        prefilled = tokenization.prefilled
        if not prefilled:
            return ""
        end = self.transcript.token_ids[-len(tokenization.encode_after("", prefilled)) - 1 :]
        return prefilled if self.language.text(end, special=True).endswith(prefilled) else ""

    def say(self, observation: Prompt, *, state: str) -> None:
        """Put what the environment says behind the last turn, as the prompt of the next one. `state` is its key. Where
        that would be too long it is held back, and a summary asked for.

        Raises ChatTemplateError.
        """
        if isinstance(observation, str):
            self._state = state
            self._texts.append(observation)
            self.transcript.show(self.language.tokenization.encode_after("", observation))
        elif self.language.rules.history == "summarize" and self.tokens_beyond(observation) is not None:
            self.ask_for_summary(observation, state=state)
        else:
            self._show(observation, state=state)

    def _show(self, said: tuple[ChatMessage, ...], *, state: str) -> None:
        self._texts.append(text_of(said))
        self._state = state
        self._messages += said
        following = None if self.language.rules.history == "split" else self._following(said)
        if following is None:
            self.transcript.begin(self._rendered_anew())
        else:
            self.transcript.show(following)

    def ask_for_summary(self, observation: Prompt, *, state: str, request: str = "") -> None:
        """Hold back what the environment says, and ask the policy for a summary, by the words of `request` if it has
        any. Raises ChatTemplateError.
        """
        assert not isinstance(observation, str), "plain text is never summed up"
        self._held_back = (observation, state)
        asked = ChatMessage("user", request) if request else summaries.REQUEST
        self._show((asked,), state=SUMMARY_STATE)

    def tokens_beyond(self, observation: Prompt) -> int | None:
        """Tokens of the next prompt if that were said, if they are more than a context may have; None before the policy
        had a turn in this one. A text that alone is too long is not counted to its end.
        """
        most = self.language.rules.context_tokens
        if most is None or self.transcript.turns == self._begun:
            return None
        if self.language.tokenization.beginning_beyond(observation, most) is not None:
            return len(self.transcript.context) + most + 1
        following = None if isinstance(observation, str) else self._following(observation)
        if following is None:
            following = self.language.tokenization.encode_after("", text_of(observation))
        tokens = len(self.transcript.context) + len(following)
        return tokens if tokens > most else None

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """Messages of the present context; none in plain text."""
        return () if self.language.is_plain else tuple(self._messages)

    @property
    def messages_before_last(self) -> tuple[ChatMessage, ...]:
        """Messages of the present context before the last text of the policy; none in plain text."""
        said = self.messages
        last = max((at for at, message in enumerate(said) if message.role == "assistant"), default=0)
        return said[:last]

    def go_on_from(self, prompt: Prompt, *, state: str) -> bool:
        """Begin a new context with this prompt; False, and nothing else, if that is longer than one may be. Raises
        ChatTemplateError.
        """
        language, most = self.language, self.language.rules.context_tokens
        if most is not None and language.tokenization.beginning_beyond(prompt, most) is not None:
            return False
        _, ids = language.tokenization.encode(prompt, tools=language.opening.tools, now=language.now)
        if most is not None and len(ids) > most:
            return False
        self._texts.append(text_of(prompt))
        self._messages, self._state, self._begun = (
            [] if isinstance(prompt, str) else [*prompt],
            state,
            self.transcript.turns,
        )
        self.transcript.begin(ids)
        return True

    def take_summary(self, completion: Completion) -> None:
        """Take a finished summary down, and go on from it with what was held back. Raises ChatTemplateError."""
        assert self._held_back is not None, "no summary was asked for"
        opening = self.language.opening.prompt
        assert not isinstance(opening, str), "plain text is never summed up"
        observation, self._state = self._held_back
        self.transcript.sampled(completion, state=SUMMARY_STATE)
        written = cut_at_stop(self.language.tokenization.said(completion.token_ids), self.language.rules.stop)
        summary = said_alone(written) or written
        self._texts += [summary, text_of(observation)]
        self._held_back, self._summaries, self._begun = None, self._summaries + 1, self.transcript.turns
        self._messages = list(summaries.resumed(opening, summary, observation))
        self.transcript.begin(self._rendered_anew())

    def overflows(self, observation: Prompt) -> bool:
        """True for what has more tokens than any next turn's prompt may have: it is neither tokenized nor shown."""
        most = self.language.tokenization.context_tokens
        begun = self.language.tokenization.beginning_beyond(
            observation, most if self.room is None else max(0, min(most, self.room))
        )
        if begun is not None:
            self._texts.append(text_of(begun))
        return begun is not None

    def _following(self, observation: tuple[ChatMessage, ...]) -> Sequence[int] | None:
        """The tokens behind the last turn; None if the template has none that could stand there."""
        assert self._last is not None, "something is said before the first turn"
        ended = self.language.ended_itself(self._last)
        bridge = self.language.bridges.bridge(observation, tools=self.language.opening.tools)
        fits = bridge.fits(self._last.token_ids, ended=ended)
        return bridge.after(self._last.token_ids, ended=ended) if fits else None

    def _rendered_anew(self) -> Sequence[int]:
        language = self.language
        _, ids = language.tokenization.encode(tuple(self._messages), tools=language.opening.tools, now=language.now)
        return ids
