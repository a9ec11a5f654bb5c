"""The two sides of one conversation: what the policy sampled becomes text for the environment, and what the environment
says becomes tokens behind it.

    sampled tokens ──decoded──▶ action          observation ──bridge──▶ tokens behind the sampled ones
         └──────────── stay as they are in the transcript ────────────┘

No token that was sampled is ever made again from text. Where a turn's prompt cannot be an extension of the turn before
(`history = "split"`, or a turn that ended in a way that its template cannot write), the prompt is rendered anew from
the messages and begins a sequence of its own.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from env_service.environments.actions import calls_in, cut_at_stop, value_in
from env_service.environments.bridges import Bridges
from env_service.environments.interface import Action, ChatMessage, Opening, Prompt, text_of
from env_service.environments.rules import Rules
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import Completion, EndOf
from env_service.rollouts.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class Language:
    """What a lease's conversations have in common: the model's tokens, the rules, and how they open.

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
        """Whether the policy continues text, without a chat template."""
        return isinstance(self.opening.prompt, str)

    def end_of(self) -> EndOf | None:
        """Where a completion ends by one of the rules' stop texts, if there are any."""
        return self._end if self.rules.stop else None

    def _end(self, token_ids: Sequence[int]) -> int | None:
        def stops(count: int) -> bool:
            text = self.text(token_ids[:count])
            return any(stop in text for stop in self.rules.stop)

        count = len(token_ids)
        return bisect_left(range(count), True, key=stops) if stops(count) else None

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decoded, with special tokens or without them."""
        (text,) = self.tokenization.decode([token_ids], special=special)
        return text

    def ended_itself(self, completion: Completion) -> bool:
        """Whether a turn's last token is one that ends turns: not, if it was cut off or ended by its text."""
        last = completion.token_ids[-1]
        known = last in self.stop_ids or last in self.tokenization.special_tokens.values()
        return completion.finish_reason == "stop" and known

    def action(self, completion: Completion, *, last: bool) -> Action:
        """What the environment is told of a turn."""
        assert completion.finish_reason is not None, "an unfinished completion"
        form = self.rules.action
        text = cut_at_stop(self.text(completion.token_ids), self.rules.stop)
        # Tags and calls are special tokens in some vocabularies.
        whole = text if form == "text" else cut_at_stop(self.text(completion.token_ids, special=True), self.rules.stop)
        return Action(
            text=text,
            value=value_in(whole, form),
            calls=calls_in(whole) if form == "tools" else (),
            last=last,
            finish_reason=completion.finish_reason,
        )


@dataclass
class Speech:
    """One conversation as tokens and as messages."""

    language: Language
    transcript: Transcript = field(default_factory=Transcript)
    _messages: list[ChatMessage] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _state: str = ""
    _heard: str = ""
    _last: Completion | None = None

    def __post_init__(self) -> None:
        opening = self.language.opening
        self.transcript.begin(self.language.opening_ids)
        self._messages += [] if isinstance(opening.prompt, str) else opening.prompt
        self._state = opening.state

    @property
    def room(self) -> int | None:
        """How many tokens the budget leaves for a turn; None without one."""
        budget = self.language.rules.trajectory_tokens
        return None if budget is None else budget - len(self.transcript.token_ids)

    @property
    def text(self) -> str:
        """The conversation behind its opening, as a person reads it."""
        return "\n\n".join(self._texts)

    @property
    def last_text(self) -> str:
        """What the policy said last."""
        return self._heard

    def hear(self, completion: Completion) -> Action:
        """Take a finished turn down. What it means to the environment."""
        self.transcript.sampled(completion, state=self._state)
        room, turns = self.room, self.transcript.turns
        last = turns >= self.language.rules.max_turns or (room is not None and room < 1)
        action = self.language.action(completion, last=last)
        self._last, self._heard = completion, action.text
        self._messages.append(ChatMessage("assistant", action.text))
        self._texts.append(action.text)
        return action

    def say(self, observation: Prompt, *, state: str) -> None:
        """Put what the environment says behind the last turn, as the prompt of the next one. `state` is its key.

        Raises ChatTemplateError.
        """
        self._texts.append(text_of(observation))
        self._state = state
        if isinstance(observation, str):
            self.transcript.show(self.language.tokenization.encode_after("", observation))
            return
        self._messages += observation
        following = None if self.language.rules.history == "split" else self._following(observation)
        if following is None:
            self.transcript.begin(self._rendered_anew())
        else:
            self.transcript.show(following)

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
