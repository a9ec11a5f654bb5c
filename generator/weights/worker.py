"""The calls of a weight sync, mixed into vLLM's worker class.

vLLM imports this module in the worker process by the name of the class, which is when the backend registers itself.
Arguments and answers are JSON or plain values, since vLLM's own encoding keeps no types.
"""

from typing import Any

from generator.weights.adapted_prompts import score_prompts_with_their_adapters
from generator.weights.plan import LoadReport, WeightSyncError
from generator.weights.policy_adapter import PolicyAdapter
from generator.weights.routing_capture import NotCaptured, RoutingCapture
from generator.weights.transfer import HeadwayTransferEngine, register, timed
from protocol.fleet import Prepare

# What the network, vLLM's weight loaders and torch raise for bytes that do not fit the model.
LOAD_ERRORS = (
    WeightSyncError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class WorkerExtension:
    """Methods of every worker, called with `collective_rpc`. Each returns at once but `headway_load`."""

    weight_transfer_engine: HeadwayTransferEngine
    model_runner: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def headway_score_prompts_with_their_adapters(self) -> None:
        """To be called once, where adapters are served."""
        score_prompts_with_their_adapters(self.model_runner)

    def headway_hold_adapters_in_layers(self) -> None:
        """To be called once, where the learner's adapters are to be computed beside the weights."""
        self.weight_transfer_engine.take_layers(PolicyAdapter(self.model_runner))

    def headway_capture_routing(self) -> str:
        """To be called once, where the experts of tokens are to be told. Why they cannot be, or nothing."""
        try:
            RoutingCapture(self.model_runner)
        except NotCaptured as error:
            return str(error)
        return ""

    def headway_stage(self, plan: str, staging: bool) -> str:
        """Begin to receive `plan` beside the weights, or without staging only take note of it."""
        engine = self.weight_transfer_engine
        try:
            if staging:
                engine.stage(Prepare.model_validate_json(plan))
            else:
                engine.expect(Prepare.model_validate_json(plan))
        except WeightSyncError as error:
            return error.reason
        return ""

    def headway_stage_files(self, plan: str, paths: list[str]) -> str:
        """Begin to read the buckets of `plan` from local files."""
        try:
            self.weight_transfer_engine.stage_files(Prepare.model_validate_json(plan), paths)
        except WeightSyncError as error:
            return error.reason
        return ""

    def headway_progress(self) -> tuple[bool, str]:
        """(ended, why it failed) of joining or receiving."""
        try:
            return self.weight_transfer_engine.progress(), ""
        except (WeightSyncError, RuntimeError, OSError) as error:
            return True, str(error)

    def headway_abandon(self) -> None:
        self.weight_transfer_engine.abandon()

    def headway_load(self, ttl_s: float) -> str:
        """Load what is staged, in one call, within `ttl_s`. Generation must be paused."""
        try:
            load_s = timed(lambda: self._load_within(ttl_s))
        except LOAD_ERRORS as error:
            self.weight_transfer_engine.abandon()
            self._weight_update_active = False
            reason = f"{type(error).__name__}: {error}"
            return LoadReport(error=reason, unloaded=self.weight_transfer_engine.touched).to_json()
        engine = self.weight_transfer_engine
        return LoadReport(load_s=load_s, wait_s=engine.wait_s, slices=engine.slices).to_json()

    def headway_begin_fingerprint(self) -> None:
        """Begin to hash the weights that serve."""
        self.weight_transfer_engine.begin_fingerprint()

    def headway_fingerprint(self) -> str:
        """The outcome of the load."""
        return self.weight_transfer_engine.fingerprint()

    def _load_within(self, ttl_s: float) -> None:
        engine = self.weight_transfer_engine
        engine.first_bucket(ttl_s=ttl_s)
        if engine.reloads:
            with engine.without_layers(), engine.watched():
                self.start_weight_update()
                self.update_weights({})
                self.finish_weight_update()
        engine.finish_load()


register()
