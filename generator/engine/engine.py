"""A vLLM engine in this process's charge: sampling with version spans, weight syncs that survive their failures, and
a deadline on every call to the engine's process and workers, since a stopped process keeps its sockets.

States of a weight sync, and what serves meanwhile:

    join_group  →  stage (or fail: old weights serve)  →  commit: pause, load, stamp, resume
                                                            ├ fails before the load: old weights, resumed
                                                            └ fails within the load: unloaded, stays paused

Import this module after `generator.engine.options.prepare_environment` was called: it imports vllm.
"""

import asyncio
import dataclasses
import logging
import multiprocessing
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import xxhash
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from generator.engine.answers import (
    adapter_sampling_params,
    generate_part,
    sampling_params,
    scored_sequence,
    scoring_params,
)
from generator.engine.arguments import capture_of_experts, dtype_name, engine_args, engine_kind
from generator.engine.fork_server import engines_by_forks
from generator.engine.gated_llm import BEFORE_OTHERS, GatedLLM, HandedBack, TurnedAway, entered_under
from generator.engine.last_words import LastWords, root_sentence
from generator.engine.options import EngineOptions
from generator.engine.records import CommitReport, EngineCounters, ScoredSequence
from generator.engine.refusals import engine_refusals
from generator.engine.socket_folder import make_socket_folder, remove_socket_folder
from generator.weights.plan import POLICY_ADAPTER, LoadReport, WeightSyncError, check_plan, check_slices
from protocol.adapters import AdapterSampleRequest
from protocol.costs import CostSums
from protocol.fleet import JoinGroup, Prepare, SliceLayout, WorkerSlices
from protocol.generation import GeneratePart, Sampling
from services.model_folder import SLOWEST_BYTES_PER_S, with_size
from services.process import NeverServed

logger = logging.getLogger(__name__)

POLL_FIRST_S = 0.002
MAX_POLL_S = 0.02

Answer = TypeVar("Answer")
GRACE_S = 5.0
FILE_TIMEOUT_S = 10.0
FINGERPRINT_S = 60.0
SHUTDOWN_S = 1.0
HELD_S = 1.0
MAX_LAYOUT_CHARS = 24 << 20
"""Of the slices of all workers. Their plan comes in a request, with twice as many, and a request has 64 MiB: a mixture
of 256 experts in 60 layers has more in the hands of 8 workers.
"""
_ADAPTER_S = 60.0
"""Longest load of an adapter."""


class EngineGone(Exception):
    """The engine's process has died. The generator has to be started again."""


class DiedUnused(EngineGone, NeverServed):
    """It has died before it had answered any request."""


class AdapterUnfit(ValueError):
    """An adapter that this engine cannot load."""


class EngineNotStarted(NeverServed):
    """vLLM could not start: why, in its own words."""


class EngineCalls:
    """Waits for answers of one engine. Raises WeightSyncError if they do not come in time, and EngineGone."""

    def __init__(self, *, llm: GatedLLM, stall_timeout_s: float) -> None:
        self._llm = llm
        self.stall_timeout_s = stall_timeout_s

    async def answer(self, call: Awaitable[Answer], *, more_s: float = 0.0) -> Answer:
        """The answer to `call`. One that is given up was sent all the same, and takes place when the engine goes on."""
        deadline_s = self.stall_timeout_s + more_s
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError as error:
            raise WeightSyncError(f"the engine of this generator did not answer within {deadline_s:g} s") from error
        except EngineDeadError as error:
            raise EngineGone(str(error)) from error

    async def told(self, call: Awaitable[list[str]]) -> None:
        """For a call that each worker answers with why it failed, or nothing."""
        reasons = [reason for reason in await self.answer(call) if reason]
        if reasons:
            raise WeightSyncError(reasons[0])

    async def settled(self, *, deadline_s: float) -> None:
        """Polls the workers until their background operation has ended; raises WeightSyncError if one failed."""
        deadline = time.monotonic() + deadline_s
        pause_s = POLL_FIRST_S
        while True:
            answers = await self.answer(self._llm.collective_rpc("headway_progress"))
            reasons = [reason for _, reason in answers if reason]
            if reasons:
                raise WeightSyncError(reasons[0])
            if all(ended for ended, _ in answers):
                return
            if time.monotonic() > deadline:
                raise WeightSyncError(f"the workers were not done within {deadline_s} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)


class Engine:
    """An async facade over vLLM. One instance per process; use `start`, and `shutdown` at the end.

    Requests that come during a commit wait, so that none is sampled under a version other than its prefix cache's.
    """

    def __init__(self, *, options: EngineOptions, llm: GatedLLM, last_words: LastWords) -> None:
        self._options = options
        self._llm = llm
        self._last_words = last_words
        self._calls = EngineCalls(llm=llm, stall_timeout_s=options.stall_timeout_s)
        self._sync_lock = asyncio.Lock()
        self._pausing = asyncio.Lock()
        """Of a pause for a commit, which nobody else may end: from before the gate closes until it has opened."""
        self._fingerprint_s = with_size(FINGERPRINT_S, Path(options.model))
        self._unloaded = False
        self._staged: str | None = None
        """The version that the workers hold beside the one that serves; of `_sync_lock`, as all that changes it."""
        self._loading = False
        self._bucket_timeout_s = FILE_TIMEOUT_S
        self._base_bytes = 0
        self._commit_task: asyncio.Future[CommitReport] | None = None
        self._tells_experts = False
        self.step_costs: CostSums | None = None
        """CPU of the engine's steps up to the last `ping`: of each step, of its sequences, and of those that began."""

    @classmethod
    async def start(cls, *, options: EngineOptions) -> "Engine":
        """Load the model and start the worker; takes tens of seconds. Raises EngineNotStarted if vLLM cannot start.

        If cancelled, it ends what has been started.
        """
        last_words = LastWords()
        make_socket_folder()
        try:
            llm = await _started(options, last_words)
        except Exception as error:
            said = last_words.said()
            last_words.close()
            remove_socket_folder()
            failure = EngineNotStarted(said or root_sentence(error))
            if options.policy_rank and "lora" in str(failure).lower():
                logger.warning("the learner's adapters are added to the weights here, without LoRA layers: %s", failure)
                return await cls.start(options=dataclasses.replace(options, policy_rank=0))
            raise failure from error
        engine = cls(options=options, llm=llm, last_words=last_words)
        await llm.update_weight_version(options.initial_version)
        llm.cache_version = options.initial_version
        if options.adapter_slots:
            await llm.collective_rpc("headway_score_prompts_with_their_adapters")
        elif options.policy_rank:
            await llm.collective_rpc("headway_hold_adapters_in_layers")
            llm.policy_adapter = LoRARequest("policy", POLICY_ADAPTER, "/not/a/file")
        await engine._capture_experts()
        return engine

    async def _capture_experts(self) -> None:
        """Has the workers tell the experts of tokens, if the model has any. Raises EngineNotStarted, having ended the
        engine, where the options insist on what it cannot do.
        """
        wanted, capture = self._options.routed_experts, capture_of_experts(self._llm.vllm_config)
        if wanted == "off" or (wanted == "auto" and capture == "none"):
            return
        reason = {
            "none": "it has no experts",
            "untried": "vLLM's own capture on a GPU was not tried with Headway; engine.routed_experts = on uses it",
        }.get(capture, "")
        if not reason and not self._llm.output_processor.packed:
            reason = "tokens travel one by one within this generator, as its log says"
        elif capture == "workers":
            reasons = await self._llm.collective_rpc("headway_capture_routing")
            reason = next((each for each in reasons if each), "")
        self._tells_experts = not reason
        if reason and wanted == "on":
            await self.shutdown()
            raise EngineNotStarted(f"engine.routed_experts is on, and {self._options.model} cannot tell them: {reason}")
        if reason:
            logger.warning(
                "%s: the experts that tokens are sent to are not told, so a learner cannot replay them: %s",
                self._options.model,
                reason,
            )

    @property
    def llm(self) -> GatedLLM:
        """vLLM's engine client, for routes of vLLM that are mounted in an app of ours."""
        return self._llm

    @property
    def version(self) -> str:
        """The version that new tokens are stamped with."""
        return self._llm.cache_version

    @property
    def unloaded(self) -> bool:
        """True if a load failed midway: nothing is sampled until a commit succeeds."""
        return self._unloaded

    @property
    def is_alive(self) -> bool:
        return not self._llm.errored

    @property
    def has_served(self) -> bool:
        """True once it has answered a request: whether a model can be computed shows at the first one."""
        counters = self._llm.counters()
        return counters.tokens_total > 0 or counters.completions_total > 0

    def death(self) -> EngineGone:
        """Error with the cause of its process's death, as far as that said it."""
        said = self._last_words.said()
        text = f"the engine's process has died: {said}" if said else "the engine's process has died"
        return EngineGone(f"{text}; restart this generator") if self.has_served else DiedUnused(text)

    async def generate(
        self,
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        cache_salt: str = "",
        routed_experts: bool = False,
        routed_experts_from: int = 0,
    ) -> AsyncGenerator[tuple[GeneratePart, ...], None]:
        """Sample n completions of one prompt; parts that come together are yielded together. Closing it aborts the
        request.

        The prefix cache is always salted with the version; `cache_salt` is added to it. `routed_experts` asks for those
        of its tokens from the token `routed_experts_from` on, which are told if this engine can. Raises RequestUnfit,
        RequestUntimely and EngineGone. A request that is handed back ends with a part of reason "abort" for each
        completion.
        """
        prompt = {"type": "token", "prompt_token_ids": list(prompt_token_ids), "cache_salt": cache_salt}
        try:
            with engine_refusals():
                params = sampling_params(
                    n=n,
                    sampling=sampling,
                    stream_interval=self._options.stream_interval,
                    routed_experts=routed_experts and self._tells_experts,
                    routed_experts_from=routed_experts_from,
                )
                async for output in self._llm.generate(prompt, params, request_id):
                    cache = self._oldest_cache(prompt)
                    yield tuple(
                        [
                            generate_part(each, instance=self._options.instance, oldest_cache=cache)
                            for each in output.outputs
                        ]
                    )
        except EngineGenerateError as error:
            if not isinstance(error.__cause__, TurnedAway):
                raise
            yield tuple([GeneratePart(index=index, finish_reason="abort") for index in range(n)])
        except EngineDeadError as error:
            raise EngineGone(str(error)) from error

    async def score(
        self, *, request_id: str, token_ids: Sequence[int], top: int = 0, before_others: bool = False
    ) -> ScoredSequence:
        """Logprobs of tokens 1 to the last, each given those before it, at temperature 1, and the `top` likeliest.

        `before_others` that wait for their turn; those that run go on. Never reads the prefix cache. Closing it aborts
        the request. Raises RequestUnfit, RequestUntimely, HandedBack and EngineGone.
        """
        prompt: dict[str, object] = {
            "type": "token", "prompt_token_ids": list(token_ids), "cache_salt": "score", BEFORE_OTHERS: before_others,
        }  # fmt: skip
        scored = None
        try:
            with engine_refusals():
                async for output in self._llm.generate(prompt, scoring_params(top=top), request_id):
                    entered = entered_under(prompt)
                    scored = scored_sequence(output, length=len(token_ids), top=top, entered_under=entered)
        except EngineGenerateError as error:
            if not isinstance(error.__cause__, TurnedAway):
                raise
        except EngineDeadError as error:
            raise EngineGone(str(error)) from error
        if scored is None:
            raise HandedBack(f"request {request_id} was ended before its tokens were scored")
        return scored

    async def load_adapter(self, request: LoRARequest) -> None:
        """Holds an adapter from the next step on, in place of the one that its slot had; see `versioned`.

        Raises AdapterUnfit for one that vLLM cannot load, EngineGone.
        """
        try:
            await self._calls.answer(self._llm.add_lora(request), more_s=_ADAPTER_S)
        except (EngineGone, WeightSyncError):
            raise
        except Exception as error:
            raise AdapterUnfit(f"vLLM does not load adapter {request.lora_name}: {error}") from error

    async def drop_adapter(self, number: int) -> None:
        """Frees a slot. Raises WeightSyncError if the engine does not answer, EngineGone."""
        await self._calls.answer(self._llm.remove_lora(number))

    async def sample(
        self, request: AdapterSampleRequest, *, request_id: str, adapter: LoRARequest | None
    ) -> RequestOutput:
        """All completions of a request, whole. Cancelling it aborts them.

        Raises RequestUnfit, RequestUntimely, HandedBack and EngineGone.
        """
        prompt = {
            "type": "token", "prompt_token_ids": list(request.prompt_token_ids), "cache_salt": request.namespace,
        }  # fmt: skip
        last, most = None, 0
        try:
            with engine_refusals():
                params = adapter_sampling_params(request)
                most = params.n
                async for output in self._llm.generate(prompt, params, request_id, lora_request=adapter):
                    last = output
        except EngineGenerateError as error:
            if not isinstance(error.__cause__, TurnedAway):
                raise
        except EngineDeadError as error:
            raise EngineGone(str(error)) from error
        if last is None or len(last.outputs) < most:
            raise HandedBack(f"request {request_id} was ended before its completions were")
        return last

    def _oldest_cache(self, prompt: Mapping[str, object]) -> str:
        """The version that no keys and values of a request are older than: they are its own, or those of requests that
        came in under the same version. Empty where they are computed again at each update, so that none is old.
        """
        return "" if self._options.recompute_on_update else entered_under(prompt)

    @property
    def kind(self) -> str:
        """Engines of one kind load equal bytes to parameters of equal fingerprint."""
        return engine_kind(self._llm.vllm_config)

    @property
    def dtype(self) -> str:
        """The type of weights and activations."""
        return dtype_name(self._llm.vllm_config)

    @property
    def answer_timeout_s(self) -> float:
        """The longest that an engine which is well takes to answer, in seconds: a load keeps it from answering."""
        return self._calls.stall_timeout_s + (self._options.pause_ttl_s if self._loading else 0.0)

    async def ping(self) -> None:
        """Returns when the engine's process has answered, however long that takes. Raises EngineGone."""
        try:
            self.step_costs = await self._llm.step_costs()
        except EngineDeadError as error:
            raise self.death() from error

    async def hand_back(self, *, stopped: bool = False) -> None:
        """End every request with what it has so far; a completion's last part is an "abort".

        Tokens that the engine's process still holds are waited for a moment, unless it has `stopped`.
        """
        if not stopped and not self._pausing.locked():  # an engine that is paused holds nothing
            with suppress(TimeoutError, EngineDeadError):
                async with self._pausing, asyncio.timeout(HELD_S):
                    await self._llm.send_at_once()
        await self._llm.hand_back()

    async def join_group(self, group: JoinGroup) -> None:
        """Join the learner's process group; the store at its host and port is the learner's.

        Returns when all ranks have joined. Raises WeightSyncError; the engine serves on either way.
        """
        self._bucket_timeout_s = group.bucket_timeout_s
        request = WeightTransferInitRequest({"spec": group.model_dump_json()})
        async with self._sync_lock, self._abandoned_on_failure():
            self._staged = None
            await self._calls.answer(self._llm.init_weight_transfer_engine(request))
            await self._calls.settled(deadline_s=group.meet_timeout_s + GRACE_S)

    async def stage(self, plan: Prepare) -> None:
        """Receive all buckets of `plan` while the engine serves on, and verify them.

        Without staging this only takes note of the plan. Raises WeightSyncError: the old weights serve on, and the next
        sync needs a new group.
        """
        staging = self._options.staging == "staging"
        async with self._sync_lock, self._abandoned_on_failure():
            check_plan(plan.buckets)
            check_slices(plan, workers=self._options.tensor_parallel_size)
            self._staged = None
            await self._calls.told(self._llm.collective_rpc("headway_stage", args=(plan.model_dump_json(), staging)))
            if staging:
                await self._calls.settled(deadline_s=self._stage_s(plan))
            self._staged = plan.version

    async def stage_files(self, plan: Prepare, *, paths: Sequence[str]) -> None:
        """Stage buckets that were downloaded: one local file per bucket, its bytes those of the bucket.

        Needs no group. The files may be removed after the commit. Raises WeightSyncError.
        """
        async with self._sync_lock, self._abandoned_on_failure():
            check_plan(plan.buckets)
            self._staged = None
            await self._calls.told(
                self._llm.collective_rpc("headway_stage_files", args=(plan.model_dump_json(), list(paths)))
            )
            await self._calls.settled(deadline_s=self._stage_s(plan))
            self._staged = plan.version

    def _stage_s(self, plan: Prepare) -> float:
        """Longest time for a plan's buckets, and for adding an adapter to base weights that came now or before."""
        if plan.adapter is not None and plan.brings_base:
            self._base_bytes = sum(bucket.nbytes for bucket in plan.buckets)
        merge_s = 0.0 if plan.adapter is None else self._base_bytes / SLOWEST_BYTES_PER_S
        return len(plan.buckets) * self._bucket_timeout_s + GRACE_S + merge_s

    async def commit(self, *, version: str) -> CommitReport:
        """Pause at a token boundary, load what is staged, stamp `version` on what follows, and resume.

        Requests in flight go on with their keys and values, or compute them again if the options have
        `recompute_on_update`. Raises WeightSyncError; if its `unloaded` is set the engine stays paused, with its
        requests frozen, until a commit succeeds. A commit goes on to its end if the caller is cancelled.
        """
        # A caller that goes away must not leave the engine between two versions.
        self._commit_task = asyncio.ensure_future(self._commit(version=version))
        return await asyncio.shield(self._commit_task)

    async def fingerprint(self, *, version: str = "") -> str:
        """A hash over the loaded parameters of all workers, of weights that serve meanwhile.

        Workers compute it in a thread, in the time in which all weights are read. Raises WeightSyncError if another
        version than that one is served by now.
        """
        async with self._sync_lock:
            if version and self.version != version:
                raise WeightSyncError(f"version {self.version} serves by now, and not {version}")
            await self._calls.answer(self._llm.collective_rpc("headway_begin_fingerprint"))
            await self._calls.settled(deadline_s=self._fingerprint_s)
            return _combined(await self._calls.answer(self._llm.collective_rpc("headway_fingerprint")))

    async def abandon_group(self) -> None:
        """Leave the group, and forget what was staged. The next sync needs a new group."""
        self._staged = None
        await self._calls.answer(self._llm.collective_rpc("headway_abandon"))

    def counters(self) -> EngineCounters:
        return self._llm.counters()

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until no request is in flight. Returns False if some are left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._llm.idle()
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """Abort what is in flight, and end the engine's processes."""
        await self._llm.stop(timeout_s=SHUTDOWN_S)
        self._last_words.close()
        remove_socket_folder()

    async def _commit(self, *, version: str) -> CommitReport:
        async with self._sync_lock:
            if self._staged != version:  # another step of a sync came between: it would be stamped with this version
                message = f"version {version} is not what is staged here, but {self._staged or 'nothing'}"
                raise WeightSyncError(message, unloaded=self._unloaded)
            self._staged = None
            start = time.perf_counter()
            async with self._pausing:
                reports = await self._load_paused(version=version)
            pause_s = time.perf_counter() - start
        load_s, wait_s = max(report.load_s for report in reports), max(report.wait_s for report in reports)
        slices = layout_of([report.slices for report in reports])
        return CommitReport(version=version, load_s=load_s, pause_s=pause_s, wait_s=wait_s, slices=slices)

    async def _load_paused(self, *, version: str) -> list[LoadReport]:
        try:
            await self._calls.answer(self._llm.close_gate())
            await self._pause()
            reports = await self._load()
            await self._stamp(version)
        except WeightSyncError as error:
            raise WeightSyncError(error.reason, unloaded=self._unloaded) from error
        finally:
            await self._resume()
        return reports

    async def _pause(self) -> None:
        # The client's own pause adds a fixed sleep of 20 ms.
        clears = self._options.recompute_on_update
        await self._calls.answer(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clears))

    async def _resume(self) -> None:
        if self._unloaded:
            return
        try:
            await self._calls.answer(self._llm.resume_generation())
        finally:
            # An engine that does not answer resumes when it does: what was sent to it is in order.
            self._llm.open_gate()

    async def _load(self) -> list[LoadReport]:
        """Raises WeightSyncError. From the call until the new version is stamped, the weights count as unloaded."""
        was_unloaded, self._unloaded = self._unloaded, True
        answers = await self._load_answers()
        reports = [LoadReport.from_json(answer) for answer in answers]
        errors = [report.error for report in reports if report.error]
        # With several workers one may have loaded what another has not.
        touched = any(report.unloaded or not report.error for report in reports)
        if errors:
            self._unloaded = was_unloaded or touched
            raise WeightSyncError(f"the load failed: {errors[0]}")
        return reports

    async def _load_answers(self) -> list[str]:
        ttl_s = self._options.pause_ttl_s
        self._loading = True
        try:
            return await self._calls.answer(self._llm.collective_rpc("headway_load", args=(ttl_s,)), more_s=ttl_s)
        finally:
            self._loading = False

    async def _stamp(self, version: str) -> None:
        await self._calls.answer(self._llm.update_weight_version(version))
        self._llm.cache_version = version
        self._unloaded = False

    @asynccontextmanager
    async def _abandoned_on_failure(self) -> AsyncIterator[None]:
        """Makes one worker's failure all workers': none keeps a group that another has lost."""
        try:
            yield
        except WeightSyncError:
            await self.abandon_group()
            raise


async def _started(options: EngineOptions, last_words: LastWords) -> GatedLLM:
    arguments = engine_args(options, last_words=last_words.path)

    def start() -> GatedLLM:
        with engines_by_forks():
            llm: GatedLLM = GatedLLM.from_engine_args(arguments)
        return llm

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # A thread cannot be stopped, but it gives up when the process that it waits for has ended.
        while not starting.done():
            for child in multiprocessing.active_children():
                child.kill()
            await asyncio.wait([starting], timeout=0.1)
        if starting.exception() is None:
            await starting.result().stop(timeout_s=SHUTDOWN_S)
        raise


def layout_of(slices: Sequence[str], *, most_chars: int = MAX_LAYOUT_CHARS) -> SliceLayout | None:
    """The slices of all workers; None unless each has told its own, or if there are too many to be told of."""
    if len(slices) < 2 or not all(slices):
        return None
    chars = sum(map(len, slices))
    if chars > most_chars:
        logger.warning(
            "this generator is sent whole tensors: the parts that its %d workers read are too many to be told of "
            "(%d MiB, and %d are the most)", len(slices), chars >> 20, most_chars >> 20,
        )  # fmt: skip
        return None
    return SliceLayout(workers=tuple(map(WorkerSlices.model_validate_json, slices)))


def _combined(fingerprints: Sequence[str]) -> str:
    """A fingerprint for all workers; a single worker's own."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return str(xxhash.xxh3_64_hexdigest("".join(fingerprints).encode()))
