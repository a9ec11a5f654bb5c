"""The reference policy: what a KL penalty or a preference loss compares the policy with. It is never differentiated.

    training.reference.mode   weights                                    after each step
    initial                   the initial model's                        stay
    ema                       a moving average, begun at the initial     reference = d * reference + (1 - d) * policy
    refresh                   a copy of the policy, begun at the initial = policy after every n-th step

With LoRA and `initial` it is the policy's own model with the adapters off, and costs no memory. Otherwise it is a
second model: whole on each rank, or with ZeRO-3 sharded among them as the policy is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from learner.training.adapters import adapters_off
from learner.training.config import ReferenceConfig, TrainingConfig
from learner.training.deferred import DeferredFiles
from learner.training.engine import EvaluationEngine, Result, TrainingEngine
from learner.training.logprobs import TopTokens
from learner.training.packing import Microbatch
from learner.training.policy import PolicyModel, whole_weights
from learner.training.ranks import rank, rank_count
from learner.training.shards import is_sharded, own_part, part_of, place_of, whole_shape

REFERENCE_FILE = "reference.safetensors"
STEPS = "steps"
_STEM = Path(REFERENCE_FILE).stem


class Reference(Protocol):
    """A policy that is only evaluated. All ranks must call each method at the same time."""

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] of the microbatch's targets, in nats, without gradient, at the policy's temperature.

        Call it before the policy's own forward pass, not between that and the backward pass.
        """
        ...

    def after_step(self) -> None:
        """Follows the policy, if the mode says so; to be called once after each step."""
        ...

    def save(self, directory: Path, *, leads: bool, later: DeferredFiles | None = None) -> None:
        """Writes what a checkpoint needs, at once or `later`: nothing if the weights never move; otherwise each rank
        its part, or the rank that leads the whole.
        """
        ...

    def load(self, directory: Path) -> None:
        """Takes up what `save` wrote with the same mode. Raises FileNotFoundError."""
        ...

    def close(self) -> None:
        """Releases it."""
        ...


class FrozenPolicy:
    """A policy that is only evaluated, on `device`: whole on every rank, or with ZeRO-3 sharded among them."""

    def __init__(self, model: PolicyModel, *, config: TrainingConfig, device: torch.device) -> None:
        self.model = model.requires_grad_(False).eval().to(device)
        self._engine = EvaluationEngine(model, config=config, device=device) if config.zero_stage == 3 else None

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] of the microbatch's targets, in nats, without gradient."""
        with _no_entropy(self.model):
            return first_of(self._run(self.model, microbatch))

    def top_candidates(self, microbatch: Microbatch, *, count: int) -> TopTokens:
        """See `PolicyModel.top_candidates`."""
        return self._run(self.model.top_candidates, microbatch, count=count)

    def moved(self) -> None:
        """To be called after its weights, or the ranks' parts of them, have changed."""
        if self._engine is not None:
            self._engine.moved()

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers, if there are any."""
        if self._engine is not None:
            self._engine.close()

    def _run(self, method: Callable[..., Result], *arguments: object, **named: object) -> Result:
        if self._engine is not None:
            return self._engine.run(method, *arguments, **named)
        with torch.no_grad():
            return method(*arguments, **named)


def open_reference(
    policy: PolicyModel, *, engine: TrainingEngine[object], config: TrainingConfig, load: Callable[[], FrozenPolicy]
) -> Reference:
    """The reference that `config` asks for. `load` reads the initial model afresh, without adapters."""
    if config.lora.enabled and config.reference.mode == "initial":
        return AdaptersOff(policy, engine=engine)
    return ReferenceCopy(load(), engine=engine, config=config.reference)


class AdaptersOff:
    """The initial model inside of an adapted one."""

    def __init__(self, policy: PolicyModel, *, engine: TrainingEngine[object]) -> None:
        self._policy = policy
        self._engine = engine

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] by the frozen weights alone."""
        with torch.no_grad(), adapters_off(self._policy), _no_entropy(self._policy), self._policy.own_routing():
            return first_of(self._engine.forward(microbatch))

    def after_step(self) -> None:
        """The frozen weights never move."""

    def save(self, directory: Path, *, leads: bool, later: DeferredFiles | None = None) -> None:
        """The initial model is read from where it was."""

    def load(self, directory: Path) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """The policy's owner does."""


class ReferenceCopy:
    """A second model."""

    def __init__(self, policy: FrozenPolicy, *, engine: TrainingEngine[object], config: ReferenceConfig) -> None:
        self._policy = policy
        self._engine = engine
        self._config = config
        self._steps = 0
        self._weights = dict(policy.model.named_parameters())
        # In bfloat16 an average would lose every step that is small against it: 1 - decay of a weight's change.
        self._averages = {name: own_part(weight).float() for name, weight in self._weights.items()}
        if config.mode != "ema":
            self._averages = {}

    def logprobs(self, microbatch: Microbatch) -> Tensor:
        """Logprobs [N] by the copy."""
        return self._policy.logprobs(microbatch)

    def after_step(self) -> None:
        """Averages the policy in, or copies it when its time has come."""
        self._steps += 1
        if self._config.mode == "ema":
            self._average()
        elif self._config.mode == "refresh" and self._steps % self._config.every_steps == 0:
            self._refresh()

    def save(self, directory: Path, *, leads: bool, later: DeferredFiles | None = None) -> None:
        """Writes the averages or the copy, each rank its part if they are sharded, and how many steps there were."""
        path = directory / (_file_of(rank()) if self._shared else REFERENCE_FILE)
        if self._config.mode != "initial" and (leads or self._shared):
            tensors = self._averages or {name: own_part(weight) for name, weight in self._weights.items()}
            if not self._shared:
                tensors = {name: value.view(whole_shape(self._weights[name])) for name, value in tensors.items()}
            steps = {STEPS: str(self._steps)}
            if later is None:
                save_file(tensors, path, metadata=steps)
            else:
                later.put(save_file, tensors, path, metadata=steps)

    def load(self, directory: Path) -> None:
        """Raises FileNotFoundError for a checkpoint of another mode."""
        if self._config.mode == "initial":
            return
        files = _files_in(directory)
        if not files:
            raise FileNotFoundError(
                f"no reference policy in {directory}: expected {directory / REFERENCE_FILE}, since "
                f"training.reference.mode is {self._config.mode}; continue with the mode that the checkpoint was "
                "written with"
            )
        with ExitStack() as stack:
            parts = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
            self._steps = int(parts[0].metadata()[STEPS])
            for name, weight in self._weights.items():
                self._take(name, _part_in(parts, name, weight))
        self._policy.moved()

    def _take(self, name: str, value: Tensor) -> None:
        part = own_part(self._weights[name])
        if self._averages:
            self._averages[name].copy_(value.view_as(part))
        part.copy_(value.view_as(part))

    def close(self) -> None:
        """Releases the second model."""
        self._policy.close()

    @property
    def _shared(self) -> bool:
        """True if each of several ranks has a part of it."""
        return rank_count() > 1 and any(map(is_sharded, self._weights.values()))

    def _average(self) -> None:
        for weight in whole_weights(self._engine, dtype=torch.float32):
            parameter, average = self._weights[weight.name], self._averages[weight.name]
            average.lerp_(part_of(weight.value(), parameter).to(average), 1.0 - self._config.decay)
            own_part(parameter).copy_(average)
        self._policy.moved()

    def _refresh(self) -> None:
        dtype = next(iter(self._weights.values())).dtype
        for weight in whole_weights(self._engine, dtype=dtype):
            parameter = self._weights[weight.name]
            own_part(parameter).copy_(part_of(weight.value(), parameter))
        self._policy.moved()


def _file_of(rank: int) -> str:
    return f"{_STEM}_{rank}.safetensors"


def _files_in(directory: Path) -> list[Path]:
    """The parts of the ranks that wrote them, in order; or the whole, of ranks that held it so."""
    parts = [directory / _file_of(number) for number in range(len(list(directory.glob(f"{_STEM}_*.safetensors"))))]
    whole = directory / REFERENCE_FILE
    return parts or ([whole] if whole.is_file() else [])


def _part_in(parts: Sequence[safe_open], name: str, parameter: nn.Parameter) -> Tensor:
    """This rank's part of a weight, flat, of which the files hold one part after the other. It is read with those of
    other ranks that it lies in, and nothing more.
    """
    start, length = place_of(parameter)
    found, at = [], 0
    for file in parts:
        size = math.prod(file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
        if at < start + length and start < at + size:
            whole: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
            found.append(whole.view(-1)[max(start - at, 0) : start + length - at])
        at += size
    return torch.cat(found) if found else torch.empty(0)


@contextmanager
def _no_entropy(policy: PolicyModel) -> Iterator[None]:
    usual, policy.settings = policy.settings, replace(policy.settings, with_entropy=False)
    try:
        yield
    finally:
        policy.settings = usual


def first_of(output: object) -> Tensor:
    """The logprobs of what a policy returned."""
    assert isinstance(output, tuple), "a policy returns logprobs and more"
    logprobs = output[0]
    assert isinstance(logprobs, Tensor), "the first are the logprobs"
    return logprobs
