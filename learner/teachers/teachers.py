"""The teachers of a run: asked as soon as a group is accepted, so that no step waits for their logprobs; those in
folders are checked before the ranks load them.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from learner.teachers.config import TeacherConfig, teacher_of
from learner.teachers.remote import RemoteTeacher, TeacherFailed, TeacherMeasures
from protocol.fingerprints import fingerprint_directory
from protocol.status import PeerStatus
from protocol.trajectories import Trajectory, TrajectoryGroup
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.status import peers_at
from services.http.tls import TlsContext
from services.http.waiting import Waiting

log = logging.getLogger(__name__)

GroupLogprobs = tuple[NDArray[np.float32], ...]
"""For each trajectory of T tokens the teacher's logprobs, float32 [T], in nats at temperature 1; 0 at tokens that are
not trained.
"""
_Key = tuple[int, int, int]


class Teachers:
    """Routes groups to teachers by environment, and keeps what they say until it is taken; an async context manager.

    Belongs to one event loop. What is kept is bounded by whoever calls `prefetch`: one group that is accepted and not
    yet taken or forgotten has at most one entry. `tokenizer` is the fingerprint of the learner's tokenizer.
    """

    def __init__(
        self,
        configs: Sequence[TeacherConfig],
        *,
        tokenizer: str,
        waits: Waiting,
        metrics: Metrics,
        tls: TlsContext | None = None,
    ) -> None:
        self._tls = tls
        self._configs = tuple(configs)
        self._tokenizer = tokenizer
        self._waits = waits
        self._measures = TeacherMeasures(metrics)
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._clients: dict[str, HttpClient] = {}
        self._remote: dict[str, RemoteTeacher] = {}
        self._fetches: dict[_Key, asyncio.Task[GroupLogprobs | TeacherFailed]] = {}

    async def __aenter__(self) -> Self:
        for config in self._configs:
            if config.urls:
                client = await self._stack.enter_async_context(HttpClient(token=config.token, tls=self._tls))
                self._clients[config.name] = client
                self._remote[config.name] = RemoteTeacher(
                    config, client=client, tokenizer=self._tokenizer, measures=self._measures
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
        """Ask for the logprobs of an accepted group, without waiting. Again, or of a teacher in a folder: nothing."""
        teacher = self._teacher(group)
        if isinstance(teacher, RemoteTeacher) and _key(group) not in self._fetches:
            self._fetches[_key(group)] = self._tasks.create_task(_fetched(teacher, group))

    def forget(self, group: TrajectoryGroup) -> None:
        """The group will not be trained: stop asking."""
        fetch = self._fetches.pop(_key(group), None)
        if fetch is not None:
            fetch.cancel()

    async def logprobs(self, group: TrajectoryGroup) -> GroupLogprobs | None:
        """The logprobs of a group that is to be trained now, asked for if nobody did; None if its teacher is in a
        folder.

        Raises TeacherFailed if they cannot be had, or if the teacher gives no answer at all for its `wait_s`.
        """
        teacher = self._teacher(group)
        if isinstance(teacher, TeacherFailed):
            raise teacher
        if teacher is None:
            return None
        self.prefetch(group)
        try:
            result = await self._awaited(self._fetches[_key(group)], teacher)
        finally:
            self.forget(group)
        if isinstance(result, TeacherFailed):
            raise result
        return result

    async def of_batch(self, groups: Sequence[TrajectoryGroup]) -> list[GroupLogprobs | None]:
        """`logprobs` of each group, in order; all are asked for at once."""
        for group in groups:
            self.prefetch(group)
        return [await self.logprobs(group) for group in groups]

    def peers(self) -> tuple[PeerStatus, ...]:
        """The generators of teachers, for `/v1/status`."""
        found = (
            peers_at(teacher.config.urls, self._clients[name].contacts(), kind="generator")
            for name, teacher in self._remote.items()
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

    async def _awaited(
        self, fetch: "asyncio.Task[GroupLogprobs | TeacherFailed]", teacher: RemoteTeacher
    ) -> GroupLogprobs | TeacherFailed:
        loop = asyncio.get_running_loop()
        began, most_s = loop.time(), teacher.config.wait_s
        with self._waits.wait(str(teacher), quiet_s=5.0, blocks_readiness=False):
            while not fetch.done():
                left_s = max(began, teacher.answered_at) + most_s - loop.time()
                if left_s <= 0:
                    return TeacherFailed(
                        f"{teacher} has given no answer for {most_s:g} s, last: {teacher.last_problem}. Start it, or "
                        "raise wait_s of the teacher"
                    )
                await asyncio.wait({fetch}, timeout=left_s)
        self._measures.waited(teacher.config.name, loop.time() - began)
        return fetch.result()


async def _fetched(teacher: RemoteTeacher, group: TrajectoryGroup) -> GroupLogprobs | TeacherFailed:
    """A failure is a result: the step that needs it raises it, and other groups' fetches go on."""
    try:
        found = await teacher.logprobs([_up_to_the_last_trained(trajectory) for trajectory in group.trajectories])
    except TeacherFailed as error:
        return error
    return tuple(map(_placed, group.trajectories, found))


def _up_to_the_last_trained(trajectory: Trajectory) -> NDArray[np.int32]:
    trained = np.flatnonzero(trajectory.loss_mask)
    assert len(trained), "admission lets no trajectory in without a trained token"
    assert trained[0] > 0, "admission lets no trajectory in whose first token is trained"
    return trajectory.token_ids[: trained[-1] + 1]


def _placed(trajectory: Trajectory, found: NDArray[np.float32]) -> NDArray[np.float32]:
    logprobs = np.zeros(len(trajectory.token_ids), dtype=np.float32)
    logprobs[1 : len(found) + 1] = found
    logprobs[trajectory.loss_mask == 0] = 0.0
    return logprobs


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
