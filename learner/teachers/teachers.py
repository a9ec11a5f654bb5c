"""The teachers of a run: asked as soon as a group is accepted, so that no step waits for their logprobs; those in
folders are checked before the ranks load them.

A teacher behind the addresses of generators: token ids go out, logprobs at temperature 1 come back.

sequences ─▶ requests ─▶ endpoint ─▶ checked answer ─▶ logprobs
                ▲            └─ is gone, hangs, starts, is busy: the same request elsewhere, without end
                │            └─ fails, or answers nonsense: again, a few times
                └────────────┘  refuses: TeacherFailed, since it would refuse it again; of one text TextRefused
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from learner.teachers.config import TeacherConfig, teacher_of
from protocol.generation import MAX_SCORED_TOKENS, LogprobsAnswer, LogprobsRequest, SequenceLogprobs
from protocol.status import PeerStatus
from protocol.trajectories import Trajectory, TrajectoryGroup
from services.http.backoff import Backoff
from services.http.breakers import Breakers
from services.http.client import HttpClient, ServiceError, ServiceFailed, ServiceRefused, ServiceUnreachable
from services.http.endpoints import Endpoints
from services.http.faults import fault_of, see_alive
from services.http.metrics import Metrics
from services.http.status import peers_at
from services.http.tls import TlsContext
from services.http.waiting import QUIET_S, Waiting
from services.model_folder import fingerprint_directory

logger = logging.getLogger(__name__)
_ATTEMPTS = 8
"""Most failures of a request after it was taken up."""
_MAX_SEQUENCES = 256
_MAX_PAUSE_S = 5.0
_OF_ONE_TEXT = frozenset({"too_long", "engine_refused"})
"""Kinds of refusals that say nothing about other texts."""
_LOOKS_AGAIN_S = 1.0
"""Time after which a request that waits for a generator of the policy looks anew which there are."""
_PROOF_LOOKS_S = 0.1
"""Time after which it is looked anew whether a generator has proven the weights by which it answered, or after which
another one is asked.
"""
Number = TypeVar("Number", np.int32, np.float32)


class TeacherMetrics:
    """Tokens that teachers have scored, requests that came to nothing, and how long steps waited for either."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.counter("teacher_tokens", "Tokens scored by a teacher.", labels=("teacher",))
        self._failures = metrics.counter(
            "teacher_failures", "Requests to a teacher that came to nothing.", labels=("teacher", "endpoint")
        )
        self._waited = metrics.counter(
            "teacher_wait_seconds", "Time that steps waited for a teacher's logprobs.", labels=("teacher",)
        )

    def know(self, teacher: str, endpoints: Iterable[str]) -> None:
        """Shows a teacher's series before its first answer."""
        for counter in (self._tokens, self._waited):
            counter.labels(teacher=teacher)
        for endpoint in endpoints:
            self._failures.labels(teacher=teacher, endpoint=endpoint)

    def scored(self, teacher: str, tokens: int) -> None:
        """Notes an answer."""
        self._tokens.labels(teacher=teacher).inc(tokens)

    def failed(self, teacher: str, endpoint: str) -> None:
        """Notes a request without a usable answer."""
        self._failures.labels(teacher=teacher, endpoint=endpoint).inc()

    def waited(self, teacher: str, seconds: float) -> None:
        """Notes a wait of a step."""
        self._waited.labels(teacher=teacher).inc(seconds)


class TeacherFailed(RuntimeError):
    """A teacher's logprobs cannot be had. The text names the teacher, its counterpart, and what to do."""


class TextRefused(TeacherFailed):
    """A teacher refuses a text, and would so again, but for no fault of others: that one group is not taught."""


@dataclass(frozen=True)
class TeacherTopTokens:
    """The likeliest tokens at each of T places, the likeliest first: `token_ids` int32 and `logprobs` float32 [T, top],
    in nats, at temperature 1.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class TeacherScores:
    """Logprobs of the T tokens of a sequence, float32 [T], in nats at temperature 1, and the likeliest tokens in the
    place of each, if they were asked for. `version` is that of the weights that said so, `instance` the generator's
    process.
    """

    logprobs: NDArray[np.float32]
    version: str
    top: TeacherTopTokens | None = None
    instance: str = ""
    taught: bool = True
    """False for a sequence of which a teacher has nothing to say; what stands here then counts for nothing."""

    @classmethod
    def nothing(cls, tokens: int, *, top: int) -> Self:
        """Of a sequence of so many tokens, with `top` tokens in each place: any ones, with possible logprobs."""
        likeliest = None
        if top:
            ids, logprob = np.arange(top, dtype=np.int32), np.float32(np.log(0.5 / top))
            likeliest = TeacherTopTokens(np.tile(ids, (tokens, 1)), np.full((tokens, top), logprob, np.float32))
        return cls(np.zeros(tokens, np.float32), "", likeliest, taught=False)


class RemoteTeacher:
    """Asks the generators of one teacher. `tokenizer` is the fingerprint of the learner's; `client` shows its token.

    At most `requests_at_once` requests for each address are under way. `breakers` are those of its addresses.
    Once all of them have failed there is a pause of `pause_s` seconds, twice as long each time. Of the policy the
    addresses are those that `serving` gives at the moment.
    """

    def __init__(
        self,
        config: TeacherConfig,
        *,
        client: HttpClient,
        tokenizer: str,
        metrics: TeacherMetrics,
        breakers: Breakers | None = None,
        serving: Callable[[], Sequence[str]] | None = None,
        pause_s: float = 0.2,
    ) -> None:
        self.config = config
        self._serving = serving
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics
        urls = [url.rstrip("/") for url in config.urls]
        self._endpoints = Endpoints(urls, breakers=breakers or Breakers(f"teacher {config.name} at"))
        self._room = asyncio.Semaphore(config.requests_at_once * max(1, len(config.urls)))
        self._backoff = Backoff(first_s=pause_s, max_s=_MAX_PAUSE_S)
        self._first_version: str | None = None
        self._changes = False
        self.refused_tokens: int | None = None
        """Length of the shortest text that it has refused as too long."""
        self.answered_at = float("-inf")
        """Time at which it last gave logprobs, by the event loop's clock."""
        self.last_problem = "no request has ended yet"

    def __str__(self) -> str:
        where = "of the run's generators" if self.config.policy else f"at {' or '.join(self.config.urls)}"
        return f"teacher {self.config.name} {where}"

    async def scores(self, sequences: Sequence[NDArray[np.int32]], *, top: int = 0) -> list[TeacherScores]:
        """For each sequence of T tokens what the teacher says of tokens 1 to T - 1, with the `top` tokens that it holds
        likeliest in the place of each.

        Waits without end for a teacher that is away. Raises TeacherFailed for what will not pass, and TextRefused if
        that is one of the sequences.
        """
        return [_scores_of(one, answer, top=top) for one, answer in await self._scored(sequences, top=top)]

    async def _scored(
        self, sequences: Sequence[NDArray[np.int32]], *, top: int
    ) -> list[tuple[SequenceLogprobs, LogprobsAnswer]]:
        found: list[tuple[SequenceLogprobs, LogprobsAnswer]] = []
        most_tokens = MAX_SCORED_TOKENS // max(1, top)
        longest = max(map(len, sequences), default=0)
        if longest > most_tokens:
            raise TeacherFailed(
                f"{self}: a sequence of {longest} tokens is too long for an answer with top {top}: at most "
                f"{most_tokens} are taken"
            )
        for part in _parts(sequences, most_tokens=min(most_tokens, self.config.request_tokens)):
            token_ids = tuple(tuple(one.tolist()) for one in part)
            request = LogprobsRequest(request_id=uuid.uuid4().hex, sequences=token_ids, top=top)
            async with self._room:
                answer = await self._answer(request)
            found += [(one, answer) for one in answer.sequences]
            self._metrics.scored(self.config.name, sum(map(len, part)))
        return found

    async def _answer(self, request: LogprobsRequest) -> LogprobsAnswer:
        tried: list[str] = []
        failures = rounds = 0
        while True:
            url = await self._choose(tried)
            try:
                return await self._attempt(url, request)
            except ServiceError as error:
                if isinstance(error, ServiceRefused) and not _is_away(error):
                    raise self._refused(error, request) from error
                self._note(url, error)
                failures += not _is_away(error)
                if failures >= _ATTEMPTS:
                    raise TeacherFailed(
                        f"{self}: {failures} attempts at one request failed, last: {error}. Its log says why"
                    ) from error
            tried.append(url)
            if len(tried) >= len(self._endpoints):  # a pause only once all of them have been tried
                tried, rounds = [], rounds + 1
                await self._backoff.pause(rounds)

    async def _choose(self, tried: Sequence[str]) -> str:
        """An address that is asked next; of the policy, whose generators come and go, of those that are there."""
        if self._serving is None:
            return await self._endpoints.choose(avoid=tried)
        while True:
            self._endpoints.replace(self._serving())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOKS_AGAIN_S):
                    return await self._endpoints.choose(avoid=tried)

    async def _attempt(self, url: str, request: LogprobsRequest) -> LogprobsAnswer:
        with self._endpoints.call(url) as call:
            if call.is_probe:
                await see_alive(self._client, url)
            answer = await self._client.post(
                f"{url}/v1/logprobs", request, LogprobsAnswer, deadline_s=self.config.request_timeout_s
            )
            self._check(url, request, answer)
        self.answered_at = asyncio.get_running_loop().time()
        return answer

    def _refused(self, error: ServiceRefused, request: LogprobsRequest) -> TeacherFailed:
        if error.kind == "too_long":
            longest = max(map(len, request.sequences))
            self.refused_tokens = min(longest, self.refused_tokens or longest)
        if error.kind in _OF_ONE_TEXT:
            return TextRefused(f"teacher {self.config.name} refuses its text: {error}")
        remedy = {
            401: "set the teacher's token to the generator's http.token",
            404: "is it a generator of this release?",
            422: "a teacher needs the learner's vocabulary",
        }.get(error.status, "its log says more")
        if error.kind == "top_too_large":
            remedy = "set algo.teacher_tokens to at most its vocabulary"
        return TeacherFailed(f"teacher {self.config.name} refuses: {error}. Remedy: {remedy}")

    def _check(self, url: str, request: LogprobsRequest, answer: LogprobsAnswer) -> None:
        wanted = [(len(sequence) - 1, request.top) for sequence in request.sequences]
        got = [(len(one.logprobs), len(next(iter(one.top_token_ids), ()))) for one in answer.sequences]
        if wanted != got:
            text = f"expected {len(wanted)} sequences of (logprobs, top) {_some(wanted)}, got {len(got)}: {_some(got)}"
            raise ServiceFailed(url, status=200, kind="bad_answer", message=text)
        if self.config.same_tokenizer and answer.tokenizer != self._tokenizer:
            raise TeacherFailed(
                f"teacher {self.config.name} at {url} has a tokenizer of fingerprint {answer.tokenizer}, the learner's "
                f"has {self._tokenizer}: its logprobs would be of other text. Use a teacher of the same tokenizer, or "
                "set same_tokenizer = false for it if token ids mean the same in both"
            )
        self._look_at_the_version(answer.policy_version)

    def _look_at_the_version(self, version: str) -> None:
        """Said once: one that changes may do so at every step, as the policy does."""
        if self.config.policy:
            return
        self._first_version = self._first_version or version
        if version != self._first_version and not self._changes:
            self._changes = True
            logger.warning(
                "teacher %s changes: it answered with version %s at first, now with %s; a resumed run that asks it "
                "again gets other logprobs", self.config.name, self._first_version, version,
            )  # fmt: skip

    def _note(self, url: str, error: ServiceError) -> None:
        self.last_problem = str(error)
        self._metrics.failed(self.config.name, url)
        logger.debug("a request to teacher %s failed: %s", self.config.name, error)


def _scores_of(found: SequenceLogprobs, answer: LogprobsAnswer, *, top: int) -> TeacherScores:
    logprobs = np.array(found.logprobs, dtype=np.float32)
    likeliest = np.array(found.top_token_ids, np.int32), np.array(found.top_logprobs, np.float32)
    return TeacherScores(
        logprobs, answer.policy_version, TeacherTopTokens(*likeliest) if top else None, answer.instance
    )


def _is_away(error: ServiceError) -> bool:
    """True if the request may be sent again at no risk: it was not taken up, or the connection broke on the way."""
    return fault_of(error) == "unavailable" or isinstance(error, ServiceUnreachable)


def _parts(sequences: Sequence[NDArray[np.int32]], *, most_tokens: int) -> Iterator[list[NDArray[np.int32]]]:
    """The sequences in order, in as few parts as have at most `most_tokens`, or a single sequence."""
    part: list[NDArray[np.int32]] = []
    for sequence in sequences:
        if part and (sum(map(len, part)) + len(sequence) > most_tokens or len(part) == _MAX_SEQUENCES):
            yield part
            part = []
        part.append(sequence)
    if part:
        yield part


def _some(values: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")


@dataclass(frozen=True)
class PolicyFleet:
    """The run's generators: `serving` gives the addresses of those that serve, `client` shows their token. `believed`
    says of a process and a version whether what it answered counts, None while its proof is awaited.
    """

    serving: Callable[[], Sequence[str]]
    client: HttpClient
    believed: Callable[[str, str], bool | None]


GroupScores = tuple[TeacherScores, ...]
"""For each trajectory of T tokens what the teacher says of all of them; 0 at tokens that are not trained."""
Told = GroupScores | TextRefused | None
"""The answer for a group of a batch: None if its teacher is in a folder."""
_Key = tuple[int, int, int]


class Teachers:
    """Routes groups to teachers by environment, and keeps what they say until it is taken; an async context manager.

    Belongs to one event loop. What is kept is bounded by whoever calls `prefetch`: one group that is accepted and not
    yet taken or forgotten has at most one entry. `tokenizer` is the fingerprint of the learner's tokenizer. `top` is
    how many of a teacher's likeliest tokens are wanted at each place, 0 for none. `fleet` are the run's generators, for
    a teacher that is the policy.
    """

    def __init__(
        self,
        configs: Sequence[TeacherConfig],
        *,
        tokenizer: str,
        waits: Waiting,
        registry: Metrics,
        top: int = 0,
        fleet: PolicyFleet | None = None,
        tls: TlsContext | None = None,
    ) -> None:
        self._top = top
        self._fleet = fleet
        self._tls = tls
        self._configs = tuple(configs)
        self._tokenizer = tokenizer
        self._waits = waits
        self._metrics = TeacherMetrics(registry)
        for config in self._configs:
            self._metrics.know(config.name, config.urls)
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._clients: dict[str, HttpClient] = {}
        self._remote: dict[str, RemoteTeacher] = {}
        self._fetches: dict[_Key, asyncio.Task[GroupScores | TeacherFailed]] = {}

    async def __aenter__(self) -> Self:
        for config in self._configs:
            if config.urls:
                client = await self._stack.enter_async_context(HttpClient(token=config.token, tls=self._tls))
                self._clients[config.name] = client
                self._remote[config.name] = RemoteTeacher(
                    config, client=client, tokenizer=self._tokenizer, metrics=self._metrics
                )
            elif config.policy and config.is_remote:
                assert self._fleet is not None, "a policy that teaches has generators"
                self._remote[config.name] = RemoteTeacher(
                    config,
                    client=self._fleet.client,
                    tokenizer=self._tokenizer,
                    metrics=self._metrics,
                    serving=self._fleet.serving,
                )
        await self._stack.enter_async_context(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for fetch in self._fetches.values():
            fetch.cancel()
        await self._stack.__aexit__(kind, error, traceback)

    def prefetch(self, group: TrajectoryGroup) -> None:
        """Ask for the scores of an accepted group, without waiting. Again, or of a teacher in a folder: nothing."""
        teacher = self._teacher(group)
        if isinstance(teacher, RemoteTeacher) and _key(group) not in self._fetches:
            self._fetches[_key(group)] = self._tasks.create_task(_fetched(teacher, group, top=self._top))

    def forget(self, group: TrajectoryGroup) -> None:
        """The group will not be trained: stop asking."""
        fetch = self._fetches.pop(_key(group), None)
        if fetch is not None:
            fetch.cancel()

    async def scores(self, group: TrajectoryGroup) -> GroupScores | None:
        """Scores of a group that is to be trained now, asked for if nobody did; None if its teacher is in a folder.

        Raises TeacherFailed if they cannot be had, or if the teacher gives no answer at all for its `wait_s`, and
        TextRefused if it cannot be asked of this group alone.
        """
        teacher = self._teacher(group)
        if isinstance(teacher, TeacherFailed):
            raise teacher
        if teacher is None:
            return None
        self.prefetch(group)
        try:
            return await self._believed(group, teacher)
        finally:
            self.forget(group)

    async def _believed(self, group: TrajectoryGroup, teacher: RemoteTeacher) -> GroupScores:
        """The scores of a group that is asked for. Those of a generator that is not believed, or not any more, are
        asked for again: it may have answered by other weights than it says.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + teacher.config.wait_s
        while True:
            fetch = self._fetches[_key(group)]
            await self._wait_for(fetch, teacher)
            found = _scores_in(fetch)
            believed = self._are_believed(found, teacher)
            if believed:
                return found
            if loop.time() > ends:
                version = next(one.version for one in reversed(found) if one.taught)
                raise TeacherFailed(
                    f"{teacher}: for {teacher.config.wait_s:g} s all answers came from generators that have not proven "
                    f"their weights, last one of version {version}. Their logs say why"
                )
            await asyncio.sleep(_PROOF_LOOKS_S)
            if believed is not None:
                logger.warning(
                    "lease %d is taught again: the generator that did is not believed any more", group.lease_id
                )
                self.forget(group)
                self.prefetch(group)

    def _are_believed(self, scores: GroupScores, teacher: RemoteTeacher) -> bool | None:
        if not teacher.config.policy or self._fleet is None:
            return True
        told = {self._fleet.believed(one.instance, one.version) for one in scores if one.taught}
        return None if None in told and False not in told else False not in told

    async def of_batch(self, groups: Sequence[TrajectoryGroup]) -> list[Told]:
        """`scores` of each group, in order, or why it has none; all are asked for at once."""
        for group in groups:
            self.prefetch(group)
        return [await self._told(group) for group in groups]

    async def _told(self, group: TrajectoryGroup) -> Told:
        try:
            return await self.scores(group)
        except TextRefused as refused:
            return refused

    async def glance(
        self, groups: Sequence[TrajectoryGroup], *, batch: Sequence[TrajectoryGroup]
    ) -> dict[int, GroupScores | None]:
        """As `scores`, by place in `groups`, before their own step, for which what is kept stays.

        They are of `batch`, which is trained next and asked for if nobody did, or accepted and wait for their turn: one
        of these that is forgotten, before this or meanwhile, has no entry, and neither has one that is not taught.
        """
        for group in batch:
            self.prefetch(group)
        found: dict[int, GroupScores | None] = {}
        for place, group in enumerate(groups):
            teacher = self._teacher(group)
            if isinstance(teacher, TeacherFailed):
                raise teacher
            if teacher is None:
                found[place] = None
            elif fetch := self._fetches.get(_key(group)):
                await self._wait_for(fetch, teacher)
                if not fetch.cancelled():
                    with contextlib.suppress(TextRefused):
                        scores = _scores_in(fetch)
                        if self._are_believed(scores, teacher):
                            found[place] = scores
        return found

    def refused_tokens(self, name: str) -> int | None:
        """Length of the shortest text that a teacher of this run has refused as too long; None if it has taken all."""
        teacher = self._remote.get(name)
        return None if teacher is None else teacher.refused_tokens

    def peers(self) -> tuple[PeerStatus, ...]:
        """The generators of teachers, for `/v1/status`."""
        found = (
            peers_at(self._remote[name].config.urls, client.contacts(), kind="generator")
            for name, client in self._clients.items()
        )
        return tuple(peer for peers in found for peer in peers)

    def _teacher(self, group: TrajectoryGroup) -> RemoteTeacher | TeacherFailed | None:
        config = teacher_of(self._configs, group.environment)
        if config is None:
            have = "; ".join(f"{one.name} teaches {', '.join(one.environments)}" for one in self._configs)
            return TeacherFailed(
                f"environment {group.environment} has no teacher: {have or 'none is set'}. Add it to the environments "
                "of one of learner.teachers, or leave one teacher's environments empty"
            )
        return self._remote.get(config.name)

    async def _wait_for(self, fetch: "asyncio.Task[GroupScores | TeacherFailed]", teacher: RemoteTeacher) -> None:
        """Until the fetch has ended, or was cancelled."""
        loop = asyncio.get_running_loop()
        began, most_s = loop.time(), teacher.config.wait_s
        remedy = f"see that it runs and answers at its url; after wait_s of the teacher, {most_s:g} s, training ends"
        with self._waits.wait(str(teacher), quiet_s=QUIET_S, remedy=remedy, blocks_readiness=False):
            while not fetch.done():
                left_s = max(began, teacher.answered_at) + most_s - loop.time()
                if left_s <= 0:
                    raise TeacherFailed(
                        f"{teacher} has given no answer for {most_s:g} s, last: {teacher.last_problem}. Start it, or "
                        "raise wait_s of the teacher"
                    )
                await asyncio.wait({fetch}, timeout=left_s)
        self._metrics.waited(teacher.config.name, loop.time() - began)


def _scores_in(fetch: "asyncio.Task[GroupScores | TeacherFailed]") -> GroupScores:
    result = fetch.result()
    if isinstance(result, TeacherFailed):
        raise result
    return result


async def _fetched(teacher: RemoteTeacher, group: TrajectoryGroup, *, top: int) -> GroupScores | TeacherFailed:
    """A failure is a result: the step that needs it raises it, and other groups' fetches go on."""
    try:
        members = members_taught(group, sees_more=teacher.config.sees_more)
        given = _shown(teacher, group) if members else None
        asked = [np.concatenate([given(one), behind_the_opening(one)]) for one in members.values() if given is not None]
        found = await teacher.scores(asked, top=top) if asked else ()
        told = {
            number: placed(one, each, given=len(text) - len(behind_the_opening(one)))
            for (number, one), each, text in zip(members.items(), found, asked, strict=True)
        }
        return with_silence(group, told, top=top)
    except TeacherFailed as error:
        return error
    except Exception as error:
        logger.exception("lease %d cannot be shown to %s", group.lease_id, teacher)
        failed = TeacherFailed(f"lease {group.lease_id} of {group.environment} cannot be shown to {teacher}: {error}")
        failed.__cause__ = error
        return failed


def members_taught(group: TrajectoryGroup, *, sees_more: bool) -> dict[int, Trajectory]:
    """The trajectories of which a teacher has something to say, by their places in the group."""
    return {n: one for n, one in enumerate(group.trajectories) if not sees_more or group.teaches(one)}


def with_silence(group: TrajectoryGroup, told: Mapping[int, TeacherScores], *, top: int) -> GroupScores:
    """The scores of all of a group's trajectories, of which some are `told`, by their places."""
    return tuple(
        told.get(number) or TeacherScores.nothing(len(one.token_ids), top=top)
        for number, one in enumerate(group.trajectories)
    )


def _shown(teacher: RemoteTeacher, group: TrajectoryGroup) -> Callable[[Trajectory], NDArray[np.int32]]:
    """The opening of a trajectory as the teacher is shown it. Raises TeacherFailed where no privileged one came."""
    if not teacher.config.sees_more:
        return lambda trajectory: trajectory.token_ids[: _opening_end(trajectory)]
    if group.teacher_prompt is None:
        raise TeacherFailed(
            f"{teacher} is shown privileged text, and lease {group.lease_id} of environment {group.environment} came "
            "without any: set teacher_hint of that environment in its env_service"
        )
    prompt = np.array(group.teacher_prompt, dtype=np.int32)
    return lambda trajectory: prompt


def _opening_end(trajectory: Trajectory) -> int:
    return trajectory.turns[0].completion_start


def behind_the_opening(trajectory: Trajectory) -> NDArray[np.int32]:
    """Up to the last trained token, behind which nothing is of use."""
    trained = np.flatnonzero(trajectory.loss_mask)
    if not len(trained):  # its tokens have all become too old: it is only compared with
        return trajectory.token_ids[_opening_end(trajectory) :][:1]
    assert trained[0] > 0, "admission lets no trajectory in whose first token is trained"
    return trajectory.token_ids[_opening_end(trajectory) : trained[-1] + 1]


def placed(trajectory: Trajectory, found: TeacherScores, *, given: int) -> TeacherScores:
    """The scores of what is behind the opening, `given` tokens of the teacher's, in the places of a trajectory's."""
    trained, start, top = trajectory.loss_mask == 1, _opening_end(trajectory), found.top

    def over(rows: NDArray[Number]) -> NDArray[Number]:
        """[T, …], 0 at what is not trained; the first row is of the teacher's second token."""
        behind = rows[given - 1 :]
        placed = np.zeros((len(trained), *rows.shape[1:]), dtype=rows.dtype)
        placed[start : start + len(behind)] = behind
        placed[~trained] = 0
        return placed

    likeliest = None if top is None else TeacherTopTokens(over(top.token_ids), over(top.logprobs))
    return TeacherScores(over(found.logprobs), found.version, likeliest, found.instance)


def _key(group: TrajectoryGroup) -> _Key:
    return group.incarnation, group.lease_id, group.attempt


def check_tokenizers(teachers: Sequence[TeacherConfig], *, model: Path) -> None:
    """Reads the folders of teachers and of the learner's `model`.

    Raises TeacherFailed for a teacher with another tokenizer than the learner's, unless its `same_tokenizer` is false;
    FileNotFoundError for a folder without one.
    """
    folders = [(teacher, teacher.path) for teacher in teachers if teacher.path is not None and teacher.same_tokenizer]
    own = fingerprint_directory(model).tokenizer if folders else ""
    for teacher, path in folders:
        found = fingerprint_directory(path).tokenizer
        if found != own:
            raise TeacherFailed(
                f"teacher {teacher.name} in {path} has a tokenizer of fingerprint {found}, the learner's in {model} "
                f"has {own}: its logprobs would be of other text. Use a teacher of the same tokenizer, or set "
                "same_tokenizer = false for it if token ids mean the same in both"
            )
