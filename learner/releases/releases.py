"""Releases of a run: candidates are judged, promoted, taken back; the channels hold what is released.

    evaluation of a candidate ─▶ gate ─▶ weights to the disk ─▶ (trial with users) ─▶ row "released" ─▶ channels
                                                         rollback: files checked ─▶ row "rolled_back" ─▶ channels

The row decides: what a kill interrupts before it was not released, and what comes after it is done again at the next
start, from the row. Owned by the event loop; one change at a time; the disk is waited for in threads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from learner.evaluation.results import Evaluation
from learner.releases.channel import ReleaseChannel
from learner.releases.config import ReleaseConfig
from learner.releases.gate import judge_canary, judge_evaluation
from learner.releases.history import ReleaseHistory
from learner.releases.kept_weights import KeptWeights, ReleaseDamaged, TaskScores
from learner.weights.published import PackedWeights, PublishedWeights
from protocol.model import PolicyVersion
from protocol.releases import ReleaseHolder, ReleaseStatus
from services.http.client import ServiceError
from services.http.refusals import RequestRefused

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_LAST_PUT_S = 30.0
EVALUATED_WITH = (
    "rollouts.max_tokens", "evaluation.temperature", "evaluation.top_p", "evaluation.top_k", "evaluation.min_p",
    "evaluation.success_reward",
)  # fmt: skip
"""Settings with another value of which the scores of a version are others, by their names in what made it."""
_ENVIRONMENT = "environment"
Noted = Callable[[str, str, str], None]
"""Told an event, its version, and its reason in words."""


def ignored(event: str, version: str, text: str) -> None:
    """Takes note of nothing."""


class Releases:
    """`made` tells what a version came of, by its number. `success` is the least reward of a solved sample.
    `first_proofs` are checksums by version and kind of generator, which both channels read.
    """

    def __init__(
        self,
        *,
        config: ReleaseConfig,
        success: float,
        history: ReleaseHistory,
        weights: KeptWeights,
        first_proofs: dict[tuple[str, str], str],
        released: ReleaseChannel,
        canary: ReleaseChannel,
        made: Callable[[int], Mapping[str, Any]] = lambda _: {},
        noted: Noted = ignored,
    ) -> None:
        self._config = config
        self._success = success
        self._history = history
        self._weights = weights
        self._released = released
        self._canary = canary
        self._made = made
        self._noted = noted
        self._changing = asyncio.Lock()
        self._began = time.time()
        self._first_proofs = first_proofs
        self._noting: set[asyncio.Task[None]] = set()
        self.problem = ""
        """Fault of the released files, in words, if there is one."""
        self.rewards: Callable[[str, float], list[float]] = lambda version, since: []
        """Gives users' rewards for a version's completions that were sampled since then, in the order they came."""
        self.keep_rewards: Callable[[set[str]], None] = lambda versions: None
        """Told of the versions that are kept: rewards of no other are asked for any more."""

    async def open(self) -> None:
        """Puts what is released, and what is on trial, into the channels. A release whose files are damaged gives way
        to the newest former one that is whole and was not taken back.
        """
        async with self._changing:
            state = self._history.state
            for version in (state.released, *state.ways_back):
                if version is None:
                    continue
                try:
                    packed = await asyncio.to_thread(self._weights.load, version)
                    if version != state.released:
                        text = f"release {state.released} cannot be served: its files are damaged"
                        await self._add("rolled_back", version, text=text)
                except ReleaseDamaged as error:
                    logger.error("release %s cannot be served: %s", version, error)
                    self.problem = f"release {version} cannot be served: {error}"
                    continue
                except OSError as error:  # the row decides, so nothing else is served without one
                    self.problem = f"release {version} cannot be served: {error}"
                    logger.error("%s", self.problem)
                    return
                await self._put(packed)
                return

    @property
    def shelves(self) -> tuple[PublishedWeights, ...]:
        """Weights that generators of both channels download."""
        return self._released.shelf, self._canary.shelf

    async def run(self) -> None:
        """Both channels, and the clock of trials, until cancelled; what is released already is put into them first."""
        await self.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._released.run(), name="released channel")
                tasks.create_task(self._canary.run(), name="canary channel")
                tasks.create_task(self._watch_trials(), name="trials")
        finally:
            await self.noted_proofs()

    @property
    def wants_first(self) -> bool:
        """True as long as nothing is released."""
        return self._history.state.released is None

    def is_candidate(self, version: int) -> bool:
        """True if the version of that number is to be judged."""
        return version % self._config.every_steps == 0

    async def judge(self, evaluation: Evaluation, packed: PackedWeights) -> None:
        """A held-out evaluation of these weights has ended: releases them, or has users try them, or neither."""
        async with self._changing:
            version, scores = str(packed.version), scores_of(evaluation, success=self._success)
            why_not, text = await self._judged(evaluation, packed, scores)
            if why_not:
                await self._refuse(version, why_not)
                return
            try:
                whole = await packed.brought_here()
                made = {**self._made(packed.version.number), _ENVIRONMENT: evaluation.environment}
                await asyncio.to_thread(self._weights.write, whole, scores=scores, made=made)
                if self._config.canary_rewards and not self.wants_first:
                    kept = await asyncio.to_thread(self._weights.load, version)
                    await self._add("trial", version, text=text)
                    self._canary.put(kept)
                else:
                    await self._release(version, text=text)
            except (OSError, ServiceError, ReleaseDamaged) as error:
                await self._refuse(version, f"it cannot be kept: {error}")
                await self._tidy()

    async def _judged(self, evaluation: Evaluation, packed: PackedWeights, scores: TaskScores) -> tuple[str, str]:
        """The reason why it is not released, or nothing; and the one why it is."""
        state, result = self._history.state, evaluation.result
        number = packed.version.number
        if (result.oldest_version, result.newest_version) != (number, number):
            other = f"its evaluation was sampled by versions {result.oldest_version} to {result.newest_version}"
            return f"{other}, expected {number} alone", ""
        if state.released is None:
            return ("", "the first one") if scores.by(self._config.metric) else ("no held-out task was evaluated", "")
        if state.held:
            return f"promotions are held: {state.held}", ""
        if state.trial is not None:
            return f"version {state.trial} is on trial with users", ""
        try:
            record = await asyncio.to_thread(self._weights.record, state.released)
        except ReleaseDamaged as error:
            return f"there is nothing to compare with: {error}", ""
        if record.digest == packed.digest:
            return f"it has the weights of the released version {state.released}", ""
        metric = self._config.metric
        made = {**self._made(number), _ENVIRONMENT: evaluation.environment}
        if other := _evaluated_otherwise(record.made, made, metric=metric):
            way_on = f"or, to go on by the new ones, end the learner and move {self._weights.folder} away"
            return (
                f"version {state.released} was evaluated with other settings ({other}), so that scores cannot be "
                f"compared: set them back; {way_on}: the next version that is evaluated is the first release then"
            ), ""
        finding = judge_evaluation(
            scores.by(metric), record.scores.by(metric), standard_errors=self._config.standard_errors
        )
        text = f"{metric} is {finding.text}, against version {state.released}"
        if changed := scores.other_prompts(record.scores):
            text += f"; {changed} tasks have another prompt than when that one was evaluated"
            logger.warning(
                "version %s is compared with %s by held-out tasks of which %d have another prompt now: if the tasks "
                "were changed since, take the former ones back, or move %s away while no learner runs",
                packed.version, state.released, changed, self._weights.folder,
            )  # fmt: skip
        return ("", text) if finding.passes else (text, "")

    async def _refuse(self, version: str, text: str) -> None:
        logger.info("version %s is not released: %s", version, text)
        with contextlib.suppress(OSError):  # a refusal that is forgotten harms nobody
            await self._add("refused", version, text=text)

    async def _release(self, version: str, *, text: str) -> None:
        packed = await asyncio.to_thread(self._weights.load, version)
        await self._add("released", version, text=text, digest=packed.digest)
        logger.info("version %s is released, digest %s: %s", version, packed.digest, text)
        await self._put(packed)

    async def _add(self, event: Any, version: str, **more: object) -> None:
        await asyncio.to_thread(self._history.add, event, version, **more)
        self._noted(event, version, str(more.get("text", "")))

    async def _put(self, packed: PackedWeights) -> None:
        """Generators of both channels hold it from now on, but for a canary while there is a trial."""
        if str(packed.version) == self._history.state.released:
            self.problem = ""
        self._released.put(packed)
        trial = self._history.state.trial
        try:
            self._canary.put(packed if trial is None else await asyncio.to_thread(self._weights.load, trial))
        except (OSError, ReleaseDamaged) as error:
            self._canary.put(packed)
            await self._refuse(str(trial), f"its files are damaged: {error}")
        await self._tidy()

    async def _tidy(self) -> None:
        self.keep_rewards(self.kept())
        try:
            await asyncio.to_thread(self._weights.keep_only, self.kept())
        except OSError as error:
            logger.warning("releases that are not kept any more stay for now: %s", error)

    def kept(self) -> set[str]:
        """Versions that are released or on trial, or may be released again."""
        state = self._history.state
        wanted = (state.released, state.trial, *state.former[-self._config.keep :], *state.ways_back[:1])
        return {version for version in wanted if version is not None}

    def check_run(self, name: str) -> None:
        """Raises RequestRefused for a change that is meant for another run, by the name in that one's folder."""
        path = self._weights.folder.parent / "run_name"
        if name and path.exists() and path.read_text(encoding="utf-8").strip() != name:
            raise RequestRefused(
                409, "another_run", f"the learner that answers runs {path.parent}, and another run is meant: name the "
                "right file, or stop this learner",
            )  # fmt: skip

    async def roll_back(self, name: str, *, reason: str, wait_s: float) -> ReleaseStatus:
        """Releases a former version again, whose files are compared with their hashes first. Raises RequestRefused."""
        async with self._changing:
            state = self._history.state
            version = self._known(name, [each for each in self._weights.versions() if each in state.former])
            try:
                packed = await asyncio.to_thread(self._weights.load, version)
            except ReleaseDamaged as error:
                raise RequestRefused(409, "damaged", f"release {version} cannot be served: {error}") from error
            text = reason or f"rolled back from version {state.released} to {version} by hand"
            try:
                await self._add("rolled_back", version, text=text, former=state.released, digest=packed.digest)
            except OSError as error:
                raise RequestRefused(503, "disk", f"nothing is rolled back: {error}") from error
            logger.warning("rolled back from version %s to %s: %s", state.released, version, text)
            await self._put(packed)
        await self._until_served(version, wait_s=wait_s)
        return self.status()

    async def promote(self, name: str | None, *, wait_s: float) -> ReleaseStatus:
        """Lets promotions go on; with a name, releases the candidate that is on trial. Raises RequestRefused."""
        async with self._changing:
            state = self._history.state
            if name is not None:
                version = self._known(name, [] if state.trial is None else [state.trial])
                await self._release_by_hand(version)
            elif not state.held:
                raise RequestRefused(409, "not_held", "promotions are not held: there is nothing to go on with")
            if self._history.state.held:
                try:
                    await self._add("resumed", state.released or "", text="by hand")
                except OSError as error:
                    raise RequestRefused(503, "disk", f"promotions are still held: {error}") from error
        if name is not None:
            await self._until_served(version, wait_s=wait_s)
        return self.status()

    async def _release_by_hand(self, version: str) -> None:
        try:
            await self._release(version, text="by hand, before its trial had ended")
        except ReleaseDamaged as error:
            raise RequestRefused(409, "damaged", f"version {version} is not released: {error}") from error
        except OSError as error:
            raise RequestRefused(503, "disk", f"version {version} is not released: {error}") from error

    def _known(self, name: str, candidates: list[str]) -> str:
        found = [each for each in candidates if name in (each, str(PolicyVersion.parse(each).number))]
        if len(found) == 1:
            return found[0]
        state = self._history.state
        if name in (state.released, str(PolicyVersion.parse(state.released).number) if state.released else ""):
            raise RequestRefused(409, "released_already", f"version {state.released} is the released one")
        kept = ", ".join(candidates) or "none"
        what = f"{len(found)} releases are called {name}: name one of them whole" if found else f"no release {name}"
        raise RequestRefused(404, "unknown_release", f"{what}; there are: {kept}", got=name)

    async def _until_served(self, version: str, *, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._released.wait_until_served(version)

    async def last_put(self) -> None:
        """The learner ends: generators of the released version get it while its weights are there."""
        version = self._released.version
        if version is not None:
            await self._until_served(version, wait_s=_LAST_PUT_S)

    async def look_at_trial(self) -> None:
        """Ends a trial for which there are enough rewards of users, or too few after its time."""
        async with self._changing:
            state, config = self._history.state, self._config
            if state.trial is None or state.released is None:
                return
            finding = judge_canary(
                self.rewards(state.trial, state.trial_since),
                self.rewards(state.released, state.trial_since),
                wanted=config.canary_rewards,
                margin=config.canary_margin,
                standard_errors=config.standard_errors,
            )
            # While no learner lived nobody could tell it a reward, so that time does not count.
            late = time.time() - max(state.trial_since, self._began) > config.canary_timeout_s
            if finding.state == "passes":
                try:
                    await self._release(state.trial, text=finding.text)
                except ReleaseDamaged as error:
                    await self._end_trial(state.trial, f"its files are damaged: {error}")
            elif finding.state == "falls" or late:
                after = f" after {config.canary_timeout_s:g} s" if finding.state == "waits" else ""
                await self._end_trial(state.trial, f"{finding.text}{after}")

    async def _end_trial(self, trial: str, text: str) -> None:
        """Canaries get what the others have, which is there whatever became of its files since."""
        await self._refuse(trial, text)
        newest = self._released.shelf.newest
        if self._history.state.trial is None and newest is not None:
            await self._put(newest)

    async def _watch_trials(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self.look_at_trial()
            except (OSError, ReleaseDamaged) as error:
                logger.warning("the trial with users goes on: %s", error)

    def proven(self, version: str, generator_id: str, kind: str, fingerprint: str) -> None:
        """A generator has proven to serve a version; the first proof of its kind is kept."""
        if (version, kind) in self._first_proofs:
            return
        self._first_proofs[version, kind] = fingerprint
        noting = asyncio.create_task(
            self._note_proof(version, generator=generator_id, kind=kind, fingerprint=fingerprint),
            name=f"first proof of {version}",
        )
        self._noting.add(noting)
        noting.add_done_callback(self._noting.discard)

    async def _note_proof(self, version: str, **proof: str) -> None:
        try:
            await asyncio.to_thread(self._history.add, "served", version, **proof)
        except OSError as error:
            logger.warning("the first proof of version %s cannot be kept: %s", version, error)

    async def noted_proofs(self) -> None:
        """Returns when all proofs so far are on the disk."""
        if self._noting:
            await asyncio.wait(self._noting)

    def status(self) -> ReleaseStatus:
        """The answer to `GET /v1/releases`."""
        state, newest = self._history.state, self._released.shelf.newest
        trial = ""
        if state.trial is not None and state.released is not None:
            counts = [len(self.rewards(each, state.trial_since)) for each in (state.trial, state.released)]
            wanted = self._config.canary_rewards
            trial = f"{counts[0]} of {wanted} rewards of users, the released version has {counts[1]} of {wanted}"
        return ReleaseStatus(
            released=state.released,
            digest="" if newest is None else newest.digest,
            trial=state.trial,
            trial_text=trial,
            held=state.held,
            former=state.former[-self._config.keep :],
            generators=tuple(
                self._holder(channel, member)
                for channel in (self._released, self._canary)
                for member in channel.fleet.members()
            ),
        )

    def _holder(self, channel: ReleaseChannel, member: Any) -> ReleaseHolder:
        kind = "/".join(
            map(str, (member.announcement.kind, member.announcement.backend, member.announcement.world_size))
        )
        version = None if member.serving is None else str(member.serving)
        return ReleaseHolder(
            generator_id=member.generator_id,
            channel=channel.name,
            serving_version=version,
            fingerprint=member.fingerprint,
            same_as_first=version is not None and self._first_proofs.get((version, kind)) == member.fingerprint,
        )

    def notes(self) -> tuple[str, ...]:
        """Words on the released version, who serves it, and what is tried or held."""
        state = self._history.state
        if state.released is None:
            return ("nothing is released yet: the first evaluated version will be",)
        members, serving = self._released.fleet.members(), self._released.serving()
        served = (
            f"served by {len(serving)} of {len(members)} generators"
            if members
            else ("served by nobody: no generator has join.channel = released")
        )
        told = [f"released is version {state.released}, {served}"]
        if state.trial is not None:
            told.append(f"version {state.trial} is on trial with users: {self.status().trial_text}")
        if state.held:
            told.append(f"promotions are held until `headway promote`: {state.held}")
        return tuple(told)

    def channel_of(self, name: str) -> ReleaseChannel:
        """The channel of a generator that is not of the newest versions."""
        return self._canary if name == "canary" else self._released


def scores_of(evaluation: Evaluation, *, success: float) -> TaskScores:
    """Mean reward and share of solved samples, by held-out task."""
    reward: dict[int, float] = {}
    accuracy: dict[int, float] = {}
    prompts = {
        task.task_index: xxhash.xxh3_64_hexdigest(task.prompt.encode(errors="replace")) for task in evaluation.tasks
    }
    for task in evaluation.tasks:
        rewards = [sample.reward for sample in task.samples]
        reward[task.task_index] = sum(rewards) / len(rewards)
        accuracy[task.task_index] = sum(value >= success for value in rewards) / len(rewards)
    return TaskScores(reward=reward, accuracy=accuracy, prompts=prompts)


def _evaluated_otherwise(before: Mapping[str, Any], now: Mapping[str, Any], *, metric: str) -> str:
    """The settings of evaluations that are others now, in words; what one of both does not tell counts as alike."""
    compared = [name for name in (_ENVIRONMENT, *EVALUATED_WITH) if name in before and name in now]
    if metric == "reward":
        compared = [name for name in compared if name != "evaluation.success_reward"]
    return ", ".join(f"{name} {before[name]}, now {now[name]}" for name in compared if before[name] != now[name])
