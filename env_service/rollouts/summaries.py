"""Conversations that go on from the policy's own summary of them, where they would become too long.

    opening ─ turn ─ … ─ turn ─ request ─ summary          a context; the summary is a turn, and trained as such
    opening + summary + what the environment said ─ turn ─ …       the next one, which sees nothing else of it

The environment does not know of it: it is told of the policy's actions alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from env_service.environments.interface import ChatMessage, Prompt, text_of

REQUEST = ChatMessage(
    "user",
    "Before we go on: write down all that you need to know of what happened so far, for only this will be kept: what "
    "you have found out and done, what did not work, and what you plan to do next. Write nothing else.",
)
_BEHIND = "Summary of what happened so far, written by yourself:\n{summary}\n\nWhat came then:\n{said}"


def resumed(opening: Sequence[ChatMessage], summary: str, observation: Prompt) -> tuple[ChatMessage, ...]:
    """The messages with which a conversation goes on: summary and `observation` are put behind the opening's last
    message, since many templates want the roles to take turns.
    """
    behind = _BEHIND.format(summary=summary.strip(), said=text_of(observation))
    *before, last = opening
    if last.role != "user":
        return (*opening, ChatMessage("user", behind))
    return (*before, replace(last, content=f"{last.content}\n\n{behind}"))
