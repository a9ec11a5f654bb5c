"""Sessions by id, each opened by its key; and those that wait for an agent from outside."""

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from env_service.agents.commands import ComputerUser
from env_service.agents.sessions import AgentSession, CallRefused, OtherSampling
from env_service.environments.interface import Task
from env_service.rollouts.conversation import Speaker


@dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """Bounds of a session and its requests: bytes, messages, calls in flight, seconds without any call, and those that
    an agent has to end in once its reward is posted; and what becomes of a request that wants other sampling than the
    run's.
    """

    body_bytes: int = 4 << 20
    messages: int = 2048
    calls_at_once: int = 16
    idle_s: float = 600.0
    after_reward_s: float = 30.0
    other_sampling: OtherSampling = "refuse"


class AgentSessions:
    """The sessions of a process. `url` is the address that agents reach it at."""

    def __init__(self, *, url: str, limits: AgentLimits | None = None, model: str = "policy") -> None:
        self.url = url.rstrip("/")
        self._model = model
        self.limits = limits or AgentLimits()
        self._sessions: dict[str, AgentSession] = {}
        self._waiting: deque[AgentSession] = deque()
        self._news = asyncio.Event()
        self._claimed = asyncio.Event()
        self._told: set[tuple[str, str]] = set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self,
        *,
        task: Task,
        speaker: Speaker,
        index: int,
        computer: ComputerUser | None = None,
        other_sampling: OtherSampling | None = None,
    ) -> AgentSession:
        """A new session, with a key that nobody can guess. `other_sampling` of None is as the limits say."""
        name = secrets.token_hex(8)

        async def offer() -> None:
            await self._offer(session)

        session = AgentSession(
            id=name,
            key=f"hw-{secrets.token_urlsafe(24)}",
            url=f"{self.url}/v1/sessions/{name}",
            model=self._model,
            task=task,
            speaker=speaker,
            index=index,
            calls_at_once=self.limits.calls_at_once,
            offer=offer,
            other_sampling=other_sampling or self.limits.other_sampling,
            told=self._told,
            computer=computer,
        )
        self._sessions[name] = session
        return session

    async def close(self, session: AgentSession) -> None:
        """Forget a session."""
        self._sessions.pop(session.id, None)
        if session in self._waiting:
            self._waiting.remove(session)
        await session.close(stopping=self.stopping)

    def stop(self) -> None:
        """The process ends: nothing is handed out any more, and who waits for a task is told now."""
        self.stopping = True
        self._news.set()

    def find(self, name: str, key: str) -> AgentSession:
        """The session of this id, for who shows its key. Raises CallRefused."""
        session = self._sessions.get(name)
        if session is None:
            raise CallRefused(404, "session_over", f"there is no session {name!r} here: it has ended, or never was")
        if not hmac.compare_digest(key.encode(), session.key.encode()):
            raise CallRefused(401, "invalid_api_key", "this session wants its own key: 'Authorization: Bearer <key>'")
        return session

    async def _offer(self, session: AgentSession) -> None:
        """Let an agent from outside have the session; return when one has."""
        session.unclaimed = True
        self._waiting.append(session)
        self._news.set()
        while session.unclaimed:
            await self._claimed.wait()

    async def claim(
        self, *, environment: str | None, within_s: float, gone: Callable[[], Awaitable[bool]] | None = None
    ) -> AgentSession | None:
        """The session that waits longest, of an environment if that is named; None if none comes in time, or can, or
        when whoever asks is `gone`: a server does not end the work for a client that leaves.
        """
        ends = asyncio.get_running_loop().time() + within_s
        while not self.stopping:
            if (session := self._next(environment)) is not None:
                return session
            self._news.clear()
            try:
                async with asyncio.timeout_at(ends):
                    await self._news.wait()
            except TimeoutError:
                return None
            if gone is not None and await gone():
                return None
        return None

    def _next(self, environment: str | None) -> AgentSession | None:
        for session in self._waiting:
            if environment is None or session.speaker.offered.name == environment:
                self._waiting.remove(session)
                session.unclaimed = False
                self._claimed.set()
                self._claimed = asyncio.Event()
                return session
        return None
