"""Fields of agents' requests: those that are followed, those that are harmless, and what becomes of the rest.

    read         the route follows it
    harmless     it may say anything: no answer would be another one
    neutral      it says what holds here anyway
    sampling     it would make other tokens likely than the run samples with: refused, or ignored and counted
    all others   a 400 that names the field

None says nothing, of whatever field.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from env_service.agents.messages import NotUnderstood
from env_service.agents.sessions import CallRefused, OtherSampling
from env_service.environments.tokenization import TemplateArguments
from protocol.generation import Sampling

HARMLESS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "safety_identifier",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
    }
)
"""Of both of OpenAI's routes."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "store": (False,),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
"""Of both of OpenAI's routes."""
_FIXED: Mapping[str, float] = {
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
}
_TOLD_BY = (
    "thinking is a part of the answer's text, of any length: tell the policy's chat template by chat_template_kwargs "
    "what it reads, such as enable_thinking"
)
_ADVICE: Mapping[str, str] = {
    "background": "answers come in the reply to their request",
    "compaction": "the session's turns stay as they are; shorten the messages yourself",
    "container": "nothing is run here",
    "context_management": "the session's turns stay as they are; shorten the messages yourself",
    "conversation": "responses are not stored; send the conversation in input",
    "continue_final_message": "an answer is always a new message; end the messages before it",
    "function_call": "use tools",
    "functions": "send them as tools",
    "logprobs": "ask for them without stream",
    "mcp_servers": "call them yourself, and offer their tools",
    "n": "a request has one answer; send it several times",
    "output_config": "answers are not constrained to a form; ask for it in words, or by a tool",
    "parallel_tool_calls": "the policy may make several calls in one answer",
    "prefill": "an answer is always a new message",
    "prompt": "send the text in input or instructions",
    "response_format": "answers are not constrained to a form; ask for it in words, or by a tool",
    "store": "responses are not stored",
    "reasoning": _TOLD_BY,
    "reasoning_effort": _TOLD_BY,
    "thinking": _TOLD_BY,
    "thread": "answers are not stored; send the conversation in messages",
    "top_logprobs": "of each token only its own logprob is known; set logprobs alone",
}
_SET_BY_RUN = 'leave it out, or set other_sampling = "ignore" in [env-service.agents]'


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms of a session's requests: the lease's `sampling`, and whether `other` is refused or ignored."""

    sampling: Sampling
    other: OtherSampling = "refuse"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Of one route: what it reads, what is harmless, what may be said of the rest. `forces` tells whether a
    `tool_choice` leaves the policy no choice.
    """

    read: frozenset[str]
    neutral: Mapping[str, tuple[object, ...]]
    forces: Callable[[object], bool]
    harmless: frozenset[str] = field(default=HARMLESS)

    def ignored(self, body: Mapping[str, Any], terms: Terms) -> tuple[str, ...]:
        """The names of the fields that are ignored on these terms. Raises CallRefused, naming the field, for one that
        would be ignored although the agent may count on what it says.
        """
        found = []
        for name, given in body.items():
            if given is None or name in self.read or name in self.harmless or self._holds(name, given):
                continue
            wish = self._wish(name, given, terms.sampling)
            if wish is None:
                raise unserved(name, given)
            if wish and terms.other == "refuse":
                raise CallRefused(400, "unsupported_value", f"{name}: {wish}; {_SET_BY_RUN}", param=name)
            found += [name] if wish else []
        return tuple(found)

    def _holds(self, name: str, given: object) -> bool:
        # A flag is no number here: 0 is not False.
        values = self.neutral.get(name, ())
        return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values)

    def _wish(self, name: str, given: object, sampling: Sampling) -> str | None:
        """Wishes of a field that the run does not follow; empty if nothing, None if it is none of those."""
        fixed = {**_FIXED, "temperature": sampling.temperature, "top_k": float(sampling.top_k)}
        if name in fixed and isinstance(given, int | float) and not isinstance(given, bool):
            same = given == fixed[name] or (name == "top_k" and given == -1)
            shown = f"{given!r} would make other tokens likely than the run samples with ({fixed[name]:g})"
            return "" if same else shown
        if name == "logit_bias" and isinstance(given, dict):
            return "it would make other tokens likely than the run samples with" if given else ""
        if name == "seed" and isinstance(given, int):
            return "seeds are the lease's, so that the trajectories of a group differ"
        if name == "tool_choice" and self.forces(given):
            return f"{str(given)[:80]!r}: the policy itself chooses whether it calls a tool, and which"
        return None


def unserved(name: str, given: object) -> CallRefused:
    """The refusal of a field that this endpoint does not follow."""
    advice = f": {_ADVICE[name]}" if name in _ADVICE else ""
    text = f"{name[:64]}: {repr(given)[:80]} is not supported{advice}; leave the field out"
    return CallRefused(400, "unsupported_value", text, param=name[:64])


def template_arguments(body: Mapping[str, Any]) -> TemplateArguments:
    """The arguments of a request for the chat template: its `chat_template_kwargs`. Raises NotUnderstood."""
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        expected = 'an object such as {"enable_thinking": false}'
        raise NotUnderstood(f"chat_template_kwargs: expected {expected}", param="chat_template_kwargs")
    return given or {}


def check_switch(body: Mapping[str, Any], name: str) -> None:
    """Raises NotUnderstood for a flag that is neither true nor false."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise NotUnderstood(f"{name}: expected true or false, got {value!r}", param=name)


def positive(body: Mapping[str, Any], name: str) -> int | None:
    """A whole number above 0 in a request; None if it is not given. Raises NotUnderstood."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NotUnderstood(f"{name}: expected a whole number above 0, got {value!r}", param=name)
    return value
