"""An agent's trajectory: its session is opened, it runs, and what it did becomes the record.

session ─▶ the agent runs, and calls ─┬─▶ returns or posts its reward ─▶ turns, sequences, reward
                                      ├─▶ raises, or is silent for too long ─▶ a fault, which costs this trajectory
                                      └─▶ a limit cut it off ─▶ its turns, truncated
"""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import partial

from env_service.agents.commands import ComputerUser
from env_service.agents.registry import AgentSessions
from env_service.agents.results import checked_result
from env_service.agents.sessions import AgentSession, OwnSampling
from env_service.environments.interface import (
    Agent,
    AgentClient,
    AgentResult,
    EnvironmentFailed,
    EnvironmentFull,
    EnvironmentUnavailable,
    Task,
    Verification,
)
from env_service.rollouts.conversation import Fault, Speaker, fault_of_step
from env_service.rollouts.environment_calls import as_fault, resolved_by_others
from env_service.rollouts.outcomes import RolloutFailure, in_whole_characters
from env_service.rollouts.rollout import Attempt, Attempts
from env_service.rollouts.speech import Transcript
from protocol.messages import WaitsFor
from protocol.trajectories import CUT_OFF, CutOff
from services.user_code import LetOut, checked_number, is_being_cancelled, number_of
from services.user_loop import HeldUp, user_loop


class WentSilent(Exception):
    """A session was left without a call and without its reward."""


def attempts_in(sessions: AgentSessions) -> Attempts:
    """Makes the attempts of a rollout's agents."""

    def attempt(index: int, agent: Agent, task: Task, seed: int, speaker: Speaker) -> Attempt:
        return AgentAttempt(index, agent, task, seed, speaker, sessions)

    return attempt


class AgentAttempt:
    """The `index`-th of its lease. When it is over, `stop_reason`, `verification`, `given` and `fault` say how."""

    def __init__(
        self, index: int, agent: Agent, task: Task, seed: int, speaker: Speaker, sessions: AgentSessions
    ) -> None:
        self.index = index
        self.name = speaker.offered.name
        self.fault: Fault | None = None
        self.verification: Verification | None = None
        self.stop_reason = ""
        self.given: float | None = 0.0
        self.invalid_actions = 0
        self.metrics: Mapping[str, float] = {}
        self.transcript = Transcript()
        self.text = ""
        self.last_text = ""
        self.opening_text = ""
        self.single_turn = False
        self._over = self._found_nobody = self._starved = False
        self._answer: str | None = None
        self._whom: WaitsFor = "environment"
        self._agent = agent
        self._task = task
        self._seed = seed
        self._speaker = speaker
        self._sessions = sessions

    async def hold(self) -> None:
        """Let the agent run until it is over. Raises RolloutFailure when a turn cannot be sampled, and
        EnvironmentUnavailable if nobody was there to begin: it can be held again.
        """
        # Whom an agent looked for in vain is what it waits for when it looks again.
        self._whom = "host" if self._found_nobody else "environment"
        self._found_nobody = False
        agent = self._agent
        session = self._sessions.open(
            task=self._task,
            speaker=self._speaker,
            index=self.index,
            computer=agent if isinstance(agent, ComputerUser) else None,
            other_sampling=agent.other_sampling if isinstance(agent, OwnSampling) else None,
        )
        limit = asyncio.timeout(self._speaker.language.rules.conversation_timeout_s)
        try:
            async with limit:
                await self._run(session, self._result(session, limit))
        except TimeoutError:
            if not limit.expired():
                raise
            if session.posted.done():  # in the moment at which the time was over
                await self._run(session, session.posted)
            else:
                self._cut_off("time_limit")
        finally:
            self._starved = session.starved
            await self._sessions.close(session)
            self._take_down(session)

    async def _run(self, session: AgentSession, result_of: Awaitable[object]) -> None:
        try:
            with self._speaker.progress.waiting_for(self._whom):
                returned = await result_of
            result = checked_result(returned)
            session.recorded.credit(result.rewards)
            self._take(result)
        except RolloutFailure:
            raise
        except WentSilent as error:
            self._blame(session, Fault("hung", str(error)))
        except EnvironmentUnavailable as error:
            if not isinstance(error, EnvironmentFull) and not session.recorded.transcript().turns:
                self._found_nobody = True
                raise
            self._blame(session, fault_of_step(error, self.name))
        except LetOut as error:
            self._blame(session, fault_of_step(as_fault(error.error), self.name))
        except HeldUp as error:
            self._blame(
                session, fault_of_step(EnvironmentUnavailable(f"the agent could not go on: {error}"), self.name)
            )
        except Exception as error:  # noqa: BLE001 - the rollout boundary: whatever an agent raises becomes a record
            self._blame(session, fault_of_step(error, self.name))

    async def _result(self, session: AgentSession, limit: asyncio.Timeout) -> object:
        """The agent's result, returned or posted: from then on it has a little time to end, whatever the `limit` of its
        conversation. Raises what it raises, WentSilent, and what made sampling impossible.
        """
        running = asyncio.ensure_future(self._ran(session.client(seed=self._seed)))
        silence = asyncio.ensure_future(session.silence(self._sessions.limits.idle_s))
        waits: set[asyncio.Future[object]] = {running, silence, session.failed, session.posted}  # type: ignore[arg-type]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if session.posted.done() and not running.done():
                limit.reschedule(None)
                ends: set[asyncio.Future[object]] = {running, session.failed}  # type: ignore[arg-type]
                within_s = self._sessions.limits.after_reward_s
                await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                raise session.failed.result()
            if not running.done() and not session.posted.done():
                raise WentSilent(
                    f"the agent made no call for {self._sessions.limits.idle_s:g} s, and gave no reward for its session"
                )
            return self._returned(running, session)
        finally:
            running.cancel()
            silence.cancel()
            await asyncio.gather(running, silence, return_exceptions=True)

    async def _ran(self, client: AgentClient) -> AgentResult | float | None:
        run = partial(self._agent.run, self._task, client)
        if not self._speaker.offered.own_loop:
            return await resolved_by_others(run())
        return await user_loop().run(run)

    def _returned(self, running: "asyncio.Future[AgentResult | float | None]", session: AgentSession) -> object:
        """A reward that was posted stands, whatever the agent does afterwards."""
        if not session.posted.done():
            if running.cancelled():
                raise EnvironmentFailed("raised", "the agent cancelled the task that it runs in; expected a reward")
            return running.result()
        posted = session.posted.result()
        spoilt = not running.done() or running.cancelled() or running.exception() is not None
        returned: object = None if spoilt else running.result()
        judged = returned.verification if isinstance(returned, AgentResult) else None
        return replace(posted, verification=posted.verification or judged)

    def _take(self, result: AgentResult) -> None:
        self._over = True
        plain = {name: checked_number(value) for name, value in result.metrics.items()}
        self.given, self.metrics, self.verification = number_of(result.reward), plain, result.verification
        self._answer = None if result.answer is None else in_whole_characters(result.answer)
        # The words for a limit are told by who keeps the limits alone.
        self.stop_reason = result.stop if result.stop not in CUT_OFF else "finished"

    def _blame(self, session: AgentSession, fault: Fault) -> None:
        if session.cut_off is not None:
            self._cut_off(session.cut_off)
            return
        if (self._starved or session.starved) and not fault.passing:
            # Its client has given up, after a timeout of its own, what no generator was there for.
            fault = replace(fault, text=f"no generator sampled a turn of it: {fault.text}", passing=True)
        self._speaker.metrics.faults.labels(environment=self.name, kind=fault.kind).inc()
        self.fault, self._over = fault, True

    def _cut_off(self, reason: CutOff) -> None:
        self._over = True
        self.stop_reason = reason

    def _take_down(self, session: AgentSession) -> None:
        if self._found_nobody:
            return
        if self.fault is None and session.cut_off is not None:
            self.stop_reason = session.cut_off
        recorded = session.recorded
        matches = recorded.matches | {"again": session.attached}
        for match, count in matches.items():
            self._speaker.metrics.agent_requests.labels(environment=self.name, match=match).inc(count)
        self.invalid_actions = recorded.invalid
        self.transcript, self.opening_text = recorded.transcript(), recorded.opening_text
        replies = recorded.replies
        self.text, self.last_text = "\n\n".join(replies), replies[-1] if replies else ""
        if self._answer is not None:
            self.last_text = self._answer
        if not self._over and not is_being_cancelled():
            self._blame(session, Fault("raised", "the agent stopped without a reward; expected one, or an Exception"))
        if self.fault is None and not self.transcript.turns:
            self._blame(session, Fault("nonsense", "the agent ended without an answer of the policy"))
