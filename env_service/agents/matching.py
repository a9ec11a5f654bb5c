"""The tree of an agent's sampled turns, in which each request finds its place by content.

    root prompt ─▶ turn ─┬─ bridge ─▶ turn ─ bridge ─▶ turn          one sequence
                         └─ bridge ─▶ turn                           another one: its beginning is shown, not trained
    another prompt ─▶ turn                                           a root of its own, when no recorded turn fits

No token that was sampled is made again from text. A request that extends a recorded conversation gets that one's tokens
and a bridge behind them; one that rewrites history is rendered anew.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from env_service.agents.messages import AgentMessage, as_chat, chain_of
from env_service.agents.rendering import prompt_of, results_as_user
from env_service.environments.bridges import Bridge
from env_service.environments.interface import Tool
from env_service.environments.tokenization import ChatTemplateError
from env_service.rollouts.completions import Completion
from env_service.rollouts.conversation import Nonsense
from env_service.rollouts.routing import TokenRouting
from env_service.rollouts.speech import Language, Transcript
from services.user_code import checked_number

ID_FORMS = ("chatcmpl-", "resp_", "msg_")
"""Prefixes of the ids of answers, by API; the turn's name follows."""


@dataclass(eq=False)
class Branch:
    """A turn: what was given behind its `parent`, or as a root, and what was sampled.

    `said` is what the agent added behind the parent, `reply` what it was told. `delivered`: the agent has it.
    `followers` are the requests that went on from it. `invalid`: it has calls that cannot be read, or name no tool.
    `number` is that of its request, from 1 on, `name` the part of its id that all APIs share, `reward` what the agent
    gives it.
    """

    parent: "Branch | None"
    given: tuple[int, ...]
    said: tuple[AgentMessage, ...] = ()
    completion: Completion | None = None
    reply: AgentMessage | None = None
    delivered: bool = False
    followers: int = 0
    invalid: bool = False
    number: int = 0
    name: str = ""
    reward: float = 0.0
    children: "list[Branch]" = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens up to the end of what was sampled in it, or of what was given while nothing is."""
        rows: list[Sequence[int]] = []
        each: Branch | None = self
        while each is not None:
            rows += [each.completion.token_ids if each.completion else (), each.given]
            each = each.parent
        return tuple(token for row in reversed(rows) for token in row)

    @property
    def routed(self) -> int:
        """Place in `context` behind the last token whose routed experts its ancestors' completions hold."""
        before = self.parent.completion if self.parent else None
        return before.routing.end if before else 0

    def deliver(self) -> None:
        """The agent has it, and so it has those before."""
        each: Branch | None = self
        while each is not None and not each.delivered:
            each.delivered = True
            each = each.parent


@dataclass
class RecordedTurns:
    """The turns of one session. Requests are counted: those that were `continued` from a turn, those that were
    `rewritten`, as no turn was found before them although one must have been, and replies that read `alike`.
    The `language` that a request comes with is the session's, with what that request tells the chat template.
    """

    language: Language
    now: datetime
    turns: list[Branch] = field(default_factory=list)
    continued: int = 0
    rewritten: int = 0
    new: int = 0
    alike: int = 0
    opening_text: str = ""
    credited: bool = False
    _ends: dict[bytes, list[Branch]] = field(default_factory=dict)

    def place(self, messages: Sequence[AgentMessage], tools: Sequence[Tool], language: Language) -> Branch:
        """A turn to be sampled for a request. Raises ChatTemplateError for messages that the model cannot be shown."""
        parent, said = self._found(messages, tools, language)
        if parent is not None:
            parent.deliver()
            following = _following(parent, said, tools, language)
            if following is not None:
                self.continued += 1
                parent.followers += 1
                return Branch(parent, tuple(following), tuple(said))
        rewritten = bool(self.turns) and any(each.role == "assistant" for each in messages)
        self.rewritten += rewritten
        self.new += not rewritten
        text, ids = self._rendered(messages, tools, language)
        self.opening_text = self.opening_text or text
        return Branch(None, tuple(ids))

    def count(self, messages: Sequence[AgentMessage], tools: Sequence[Tool], language: Language) -> int:
        """Number of tokens that the policy would be given for a request. Raises ChatTemplateError."""
        parent, said = self._found(messages, tools, language)
        following = None if parent is None else _following(parent, said, tools, language)
        if parent is not None and following is not None:
            return len(parent.context) + len(following)
        return len(self._rendered(messages, tools, language)[1])

    def _rendered(
        self, messages: Sequence[AgentMessage], tools: Sequence[Tool], language: Language
    ) -> tuple[str, list[int]]:
        own = _has_own_calls(tools, language)
        return prompt_of(messages, tools, tokenization=language.tokenization, now=self.now, own_calls=own)

    def record(
        self,
        branch: Branch,
        reply: AgentMessage,
        *,
        messages: Sequence[AgentMessage],
        tools: Sequence[Tool],
        language: Language,
    ) -> None:
        """Take down a finished turn, and how the agent was told of it."""
        branch.reply = reply
        end = chain_of([*messages, reply], tools, language.tokenization.arguments)[-1]
        self.alike += end in self._ends
        self._ends.setdefault(end, []).append(branch)
        self.turns.append(branch)
        if branch.parent is not None:
            branch.parent.children.append(branch)

    def _found(
        self, messages: Sequence[AgentMessage], tools: Sequence[Tool], language: Language
    ) -> tuple[Branch | None, Sequence[AgentMessage]]:
        """The turn that the longest recorded beginning ends with, and what is said behind it."""
        links = chain_of(messages, tools, language.tokenization.arguments)
        for end in range(len(messages) - 1, 0, -1):
            if messages[end].role == "assistant":
                break
            if messages[end - 1].role == "assistant" and links[end] in self._ends:
                # Of several turns that read alike, and may differ in tokens, one that nobody went on from; the newest.
                alike = reversed(self._ends[links[end]])
                return min(alike, key=lambda turn: turn.followers), messages[end:]
        return None, messages

    def credit(self, rewards: Sequence[float] | Mapping[str, float]) -> None:
        """Give turns that the agent has what it says that they are worth: in the order of the requests, or by id.

        Raises Nonsense where a number is of no turn, or a turn has none.
        """
        if not rewards:
            return
        turns = sorted((turn for turn in self.turns if turn.delivered), key=lambda turn: turn.number)
        if not isinstance(rewards, Mapping):
            if len(rewards) != len(turns):
                raise Nonsense(f"the agent gives {len(rewards)} rewards to its {len(turns)} completions: one for each")
            rewards = {turn.name: reward for turn, reward in zip(turns, rewards, strict=True)}
        by_id = {f"{form}{turn.name}": turn for turn in turns for form in ("", *ID_FORMS)}
        for name, reward in rewards.items():
            if name not in by_id:
                raise Nonsense(f"the agent rewards completion {name!r:.100}, which is none of its {len(turns)}")
            by_id[name].reward += checked_number(reward)
        self.credited = True

    def transcript(self) -> Transcript:
        """All turns that the agent has: each once, in as many sequences as there are branches."""
        found = Transcript(credited=self.credited)
        for path in self._paths():
            first = path[0]
            found.begin([*(first.parent.context if first.parent else ()), *first.given])
            for routing in _routings(first.parent):
                found.know(routing)
            for number, branch in enumerate(path):
                if number:
                    found.show(branch.given)
                assert branch.completion is not None, "a recorded turn has its completion"
                found.sampled(branch.completion, state="")
                found.earn(branch.reward - branch.invalid * self.language.rules.invalid_penalty)
        return found

    def _paths(self) -> Iterator[list[Branch]]:
        """Turns that follow each other, each in one path: the first that goes on from a turn goes on in its path."""
        taken: set[int] = set()
        for turn in (turn for turn in self.turns if turn.delivered):
            path: list[Branch] = []
            each: Branch | None = turn if id(turn) not in taken else None
            while each is not None:
                taken.add(id(each))
                path.append(each)
                each = next((child for child in each.children if child.delivered and id(child) not in taken), None)
            if path:
                yield path

    @property
    def invalid(self) -> int:
        """Number of the agent's delivered turns that are invalid."""
        return sum(turn.invalid for turn in self.turns if turn.delivered)

    @property
    def matches(self) -> dict[str, int]:
        """The counts by name."""
        return {"continued": self.continued, "rewritten": self.rewritten, "new": self.new, "alike": self.alike}

    @property
    def replies(self) -> list[str]:
        """The messages, in the order of the turns: what the agent added behind the first turn, and the answers."""
        found: list[str] = []
        for turn in self.turns:
            found += [each.text for each in turn.said] + ([_shown(turn.reply)] if turn.reply else [])
        return found


def _routings(branch: Branch | None) -> Sequence[TokenRouting]:
    """Of a turn and its ancestors, the first one's first: each has the rows that those before it lack."""
    found: list[TokenRouting] = []
    while branch is not None:
        found += [branch.completion.routing] if branch.completion else []
        branch = branch.parent
    return found[::-1]


def _has_own_calls(tools: Sequence[Tool], language: Language) -> bool:
    """The chat template is told of tools and results: not, if it writes calls that nobody would read."""
    return not tools or language.reads_own_calls


def _following(
    parent: Branch, said: Sequence[AgentMessage], tools: Sequence[Tool], language: Language
) -> Sequence[int] | None:
    """The tokens behind a turn; None if the template has none that could stand there."""
    assert parent.completion is not None, "a recorded turn has its completion"
    ended = language.ended_itself(parent.completion)
    sampled = parent.completion.token_ids
    bridge = _bridge(said, tools, language)
    return None if bridge is None or not bridge.fits(sampled, ended=ended) else bridge.after(sampled, ended=ended)


def _bridge(said: Sequence[AgentMessage], tools: Sequence[Tool], language: Language) -> Bridge | None:
    own = tuple(map(as_chat, said))
    # Some templates refuse the ids of some clients.
    forms = [own, tuple(replace(each, tool_call_id="") for each in own), results_as_user(said)]
    told = _has_own_calls(tools, language)
    for form in forms if told else forms[-1:]:
        try:
            return language.bridges.bridge(form, tools=tools if told else ())
        except ChatTemplateError:
            continue
    return None


def _shown(reply: AgentMessage) -> str:
    calls = (f"{call.name}({call.arguments})" for call in reply.calls)
    return "\n".join([*([reply.text] if reply.text else []), *calls])
