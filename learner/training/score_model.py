"""A decoder of transformers with a linear head to one number: the critic of PPO, and the reward model.

As a critic it gives the value of the state before each trained token. As a reward model it gives the score at a
sequence's last token: the reader appends one token of any kind, and marks that one alone as trained, so that the score
is that of the state which would predict it.

The critic learns what the policy's states are worth: a model of its own, or a linear head on the policy.

states of the policy ─ detached ─▶ head ─▶ values ─▶ value loss ─▶ the head's optimizer
        ▲                                               │
        └──── gradient, times critic.trunk_gradient ◀───┘   none by default: the policy then learns as without the head

The head is no part of the policy: what is published and exported is a plain causal language model.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from learner.algorithms.policy_loss import explained_variance, value_loss
from learner.training.config import TrainingConfig
from learner.training.deferred import DeferredFiles
from learner.training.engine import TrainingEngine, learning_rate, sharder
from learner.training.logprobs import accumulation_dtype
from learner.training.packing import Microbatch
from learner.training.policy import (
    TextFiles,
    WeightSnapshot,
    load_decoder,
    predicting_states,
    torch_dtype,
    write_model_directory,
)
from learner.training.ranks import summed_over_ranks
from learner.training.recomputing import recompute_layers
from learner.training.routing import ExpertWatch, RoutingSums
from learner.training.row_parts import check_shareable, part_of
from learner.training.sequence_groups import ALONE, SequenceGroup
from learner.training.sharded_load import Shard
from learner.training.unfit_model import UnfitModel

Outputs = TypeVar("Outputs")
HEAD = "score"
FOLDER = "critic"
TOKENIZER_CONFIG = "tokenizer_config.json"


class ScoreHead(nn.Linear):
    """A linear layer to one number that computes in float32 (float64 for float64) whatever its weight's type."""

    @classmethod
    def sharing(cls, linear: nn.Linear) -> ScoreHead:
        """A head with the very parameters of `linear`."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight = linear.weight
        head.bias = linear.bias
        return head

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] to [..., 1]."""
        dtype = accumulation_dtype(input.dtype)
        return nn.functional.linear(
            input.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        )


class ScoreModel(nn.Module):
    """Wraps a sequence classifier with one label; its parameters are named `classifier.` and then as there."""

    PREFIX = "classifier."

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier
        self.probed = False
        """Gives in place of scores how far states point into a fixed direction. For a self-check: a new head of a
        critic gives 0 for any state.
        """
        linear = getattr(classifier, HEAD)
        assert isinstance(linear, nn.Linear), f"a head of an unknown kind: {type(linear).__name__}"
        assert linear.out_features == 1, f"a head to {linear.out_features} numbers"
        setattr(classifier, HEAD, ScoreHead.sharing(linear))
        self.watch: ExpertWatch | None = None
        """Set where somebody wants to know how a mixture of experts routes."""
        self.group = ALONE
        """Set where ranks share rows."""

    @property
    def head(self) -> ScoreHead:
        """The layer that makes the score."""
        head = getattr(self.classifier, HEAD)
        assert isinstance(head, ScoreHead), "set when the model was made"
        return head

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, None, None, None, RoutingSums | None]:
        """The score [N], float32, of the state from which each of the microbatch's targets is predicted, and what
        `watch` saw of the routers.
        """
        part = part_of(self.classifier, microbatch, self.group)
        states, routing = predicting_states(self.classifier, part, watch=self.watch)
        scores: Tensor = _directions(states) if self.probed else self.head(states)
        return part.whole(scores[:, 0]), None, None, None, routing


def _directions(states: Tensor) -> Tensor:
    """[N, H] to [N, 1], each about 1 in size."""
    states = states.float()
    drawn = torch.randn(states.shape[1], 1, generator=torch.Generator().manual_seed(0)).to(states.device)
    lengths: Tensor = states.norm(dim=1, keepdim=True)
    return (states @ drawn).div(lengths.clamp(min=1e-12))


def load_score_model(
    path: Path, *, dtype: torch.dtype, head_seed: int | None = None, shard: Shard | None = None
) -> ScoreModel:
    """The decoder in the directory `path` with a head to one number, in training mode; nothing is downloaded.

    A directory of a sequence classifier with one label brings its head. That of a causal language model gets a new one:
    zeros, as a critic wants it, which then starts from the value 0; or with `head_seed`, as a reward model wants it,
    normal with variance 1/(H + 1) (arXiv 2009.01325). With `shard` no rank holds it whole, and all must call it. Raises
    UnfitModel for a model that cannot be either.
    """
    _check_labels(path)
    # transformers draws a head of its own, and says so; no one else should notice.
    with torch.random.fork_rng(devices=[]), _without_load_report():
        classifier, missing = load_decoder(
            path, AutoModelForSequenceClassification, dtype=dtype, shard=shard, num_labels=1
        )
    _check_complete(path, classifier, missing)
    # Set only now: an embedding that is made with a padding token gives that token no gradient.
    _config_of(classifier).pad_token_id = _padding_token(path, classifier)
    model = ScoreModel(classifier)
    if missing:
        _initialise(model.head, seed=head_seed)
    return model


def save_score_model(snapshot: WeightSnapshot, *, model: ScoreModel, source: TextFiles, destination: Path) -> None:
    """Writes a directory that `AutoModelForSequenceClassification` loads, with the tokenizer of `source`.

    `snapshot` has the weights, named as in `model`, which gives the shape and may itself be sharded. Batches are to be
    padded on the right with the config's `pad_token_id`, which ends no sequence: then transformers' score of each
    sequence is that of its last token, as here. The tokenizer, if there is one, is set to pad like that.
    """
    named = (replace(tensor, name=tensor.name.removeprefix(model.PREFIX)) for tensor in snapshot.tensors)
    write_model_directory(
        WeightSnapshot(tensors=tuple(named)), causal_lm=model.classifier, source=source, destination=destination
    )
    if (destination / TOKENIZER_CONFIG).is_file():
        tokenizer = AutoTokenizer.from_pretrained(destination, local_files_only=True)
        tokenizer.padding_side = "right"
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(_config_of(model.classifier).pad_token_id)
        tokenizer.save_pretrained(destination)


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silences the report of missing weights: they are checked here, with an error where it matters."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_load_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_load_report)


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _check_labels(path: Path) -> None:
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise UnfitModel(
            f"{path}: transformers has no sequence classifier of model_type {config.model_type}, which a reward model "
            "and a critic are made of: expected a decoder such as Llama's or Qwen's. Name another model, or give a "
            'policy\'s critic a head on the policy with critic.kind = "head".'
        )
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if classifies and config.num_labels != 1:
        raise UnfitModel(
            f"{path} is a classifier with {config.num_labels} labels: expected one with 1, whose output is the score, "
            "or a causal language model, which is given a new head. Name another directory."
        )


def _check_complete(path: Path, classifier: nn.Module, missing: Iterable[str]) -> None:
    if not isinstance(getattr(classifier, HEAD, None), nn.Linear):
        raise UnfitModel(
            f"{path}: {type(classifier).__name__} has no linear head named {HEAD!r}: expected a decoder such as "
            "Llama's or Qwen's. Name another model."
        )
    absent = sorted(name for name in missing if not name.startswith(f"{HEAD}."))
    if absent:
        raise UnfitModel(
            f"{path} lacks {len(absent)} weights of {type(classifier).__name__}, the first is {absent[0]}: expected a "
            "whole model. Name another directory."
        )


def _initialise(head: ScoreHead, *, seed: int | None) -> None:
    with torch.no_grad():
        head.weight.zero_()
        if head.bias is not None:
            head.bias.zero_()
        if seed is not None:
            drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
            head.weight.copy_(drawn / math.sqrt(head.in_features + 1))


def _padding_token(path: Path, classifier: nn.Module) -> int:
    """The model's own padding token, unless sequences end in it: transformers looks for the last token that is none.

    Then the one that begins sequences, and where that ends them, too, the last that the tokenizer has a name for.
    """
    config = _config_of(classifier)
    ends = _ends(config.eos_token_id)
    generation = path / "generation_config.json"
    if generation.is_file():
        ends |= _ends(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    known = [token for token in (config.pad_token_id, config.bos_token_id) if isinstance(token, int)]
    return next(token for token in chain(known, _named_tokens(path, config.vocab_size)) if token not in ends)


def _named_tokens(path: Path, vocabulary: int) -> Iterator[int]:
    """The tokens that the tokenizer has names for, the last one first; all, of a model without a tokenizer. Models
    often have more than their tokenizer knows: those pad nothing, since a tokenizer pads by a name.
    """
    if not (path / TOKENIZER_CONFIG).is_file():
        yield from reversed(range(vocabulary))
        return
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    for token in reversed(range(min(len(tokenizer), vocabulary))):
        if token != tokenizer.eos_token_id and tokenizer.convert_ids_to_tokens(token) is not None:
            yield token


def _ends(eos_token_id: int | Sequence[int] | None) -> set[int]:
    if eos_token_id is None:
        return set()
    return {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)


class _Config(Protocol):
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | Sequence[int] | None
    vocab_size: int


def _config_of(classifier: nn.Module) -> _Config:
    config: _Config = classifier.config  # type: ignore[assignment]
    return config


@dataclass(frozen=True)
class CriticTargets:
    """Of the step's N tokens, on the CPU: `old_values` and `returns` [N], and the `weights` [N] of an update's mean."""

    old_values: Tensor
    returns: Tensor
    weights: Tensor


class _ValueModel(Generic[Outputs]):
    """The parts that a critic of its own and a head on the policy share: checkpoints and the loss."""

    engine: TrainingEngine[Outputs]

    def __init__(self, *, config: TrainingConfig, value_clip: float | None, group: SequenceGroup) -> None:
        self._config = config.critic
        self._group = group
        self._clip = value_clip

    def save(self, directory: Path, *, later: DeferredFiles | None = None) -> None:
        """Writes model and optimizer, each rank its part, at once or `later`."""
        self.engine.save(directory / FOLDER, later=later)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Raises FileNotFoundError."""
        self.engine.load(directory / FOLDER)

    def close(self) -> None:
        """Releases the model."""
        self.engine.close()

    def _loss_of(self, values: Tensor, microbatch: Microbatch, targets: CriticTargets) -> Tensor:
        def at_tokens(numbers: Tensor) -> Tensor:
            return numbers[microbatch.places].to(values)

        made = value_loss(
            values=values,
            old_values=at_tokens(targets.old_values),
            returns=at_tokens(targets.returns),
            clip=self._clip,
        )
        return (at_tokens(targets.weights) * made.losses).sum()


class Critic(_ValueModel[tuple[Tensor, None, None, None, RoutingSums | None]]):
    """All ranks must call each method at the same time."""

    def __init__(
        self,
        path: Path,
        *,
        config: TrainingConfig,
        device: torch.device,
        value_clip: float | None,
        group: SequenceGroup = ALONE,
    ) -> None:
        super().__init__(config=config, value_clip=value_clip, group=group)
        model = load_score_model(config.critic.model or path, dtype=torch_dtype(config.dtype), shard=sharder(config))
        check_shareable(model.classifier, config.critic.model or path, group)
        recompute_layers(model.classifier, config)
        model.group = group
        self.engine = TrainingEngine(model, config=config, device=device, optimizer=config.critic.optimizer)

    def values(self, microbatch: Microbatch) -> Tensor:
        """The value of the state before each of the microbatch's targets, [N]."""
        return self.engine.forward(microbatch)[0]

    def update(self, microbatches: Sequence[Microbatch], targets: CriticTargets, *, number: int) -> float:
        """Moves the values towards the returns; `number` counts updates, for the schedule. Returns the loss."""
        total = torch.zeros((), dtype=torch.float64)
        for index, microbatch in enumerate(microbatches, start=1):
            loss = self._loss_of(self.values(microbatch), microbatch, targets)
            self.engine.backward(loss, last=index == len(microbatches))
            total += loss.detach().double().cpu()
        self.engine.update(learning_rate=learning_rate(self._config.optimizer, update=number))
        return float(summed_over_ranks(self._group.once(total)))


def value_metrics(*, values: Tensor, returns: Tensor) -> dict[str, float]:
    """A step's metrics of its critic, given both at all trained tokens [M]."""
    explained = explained_variance(values=values, returns=returns)
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    return metrics if explained is None else {**metrics, "value_explained_variance": explained}


def freezes_policy(config: TrainingConfig, *, first_update: int) -> bool:
    """True if the step that begins with this update is the critic's alone."""
    return first_update < config.critic.warmup_steps * config.updates_per_step * config.epochs_per_step


class CriticHead(_ValueModel[Tensor]):
    """Starts from values of 0. All ranks must call each method at the same time.

    `states` runs the policy: from a microbatch to the states [N, `width`] that its N targets are predicted from.
    """

    def __init__(
        self,
        *,
        width: int,
        states: Callable[[Microbatch], Tensor],
        config: TrainingConfig,
        device: torch.device,
        value_clip: float | None,
        group: SequenceGroup = ALONE,
    ) -> None:
        super().__init__(config=config, value_clip=value_clip, group=group)
        head = ScoreHead(width, 1, bias=False, dtype=torch_dtype(config.dtype))
        torch.nn.init.zeros_(head.weight)
        self._states = states
        self.engine = TrainingEngine(head, config=config, device=device, optimizer=config.critic.optimizer)
        self._loss = torch.zeros((), dtype=torch.float64)

    def values(self, microbatch: Microbatch) -> Tensor:
        """The value of the state before each of the microbatch's targets, [N]."""
        return self.engine.forward(self._states(microbatch))[:, 0]

    def learn(self, states: Tensor, microbatch: Microbatch, targets: CriticTargets, *, last: bool) -> Tensor:
        """Adds the microbatch to the head's gradient. `states` [N, width] come from the pass that trains the policy.

        Returns a scalar for the policy's loss, whose gradient is that of the value loss times `trunk_gradient`; its
        value means nothing. `last`: no other microbatch follows before `update`.
        """
        below = states.detach().requires_grad_(self._config.trunk_gradient > 0)
        values = self.engine.forward(below)[:, 0]
        loss = self._loss_of(values, microbatch, targets)
        # All ranks that share the row have its states, and each the whole gradient of the head.
        self.engine.backward(loss / self._group.size, last=last)
        self._loss += loss.detach().double().cpu()
        if below.grad is None:
            return states.new_zeros(())
        # `backward` multiplies by the number of ranks, which the engine's own averaging undoes for parameters alone.
        downwards = below.grad * (self._group.size / torch.distributed.get_world_size())
        return self._config.trunk_gradient * (states * downwards).sum()

    def update(self, *, number: int) -> float:
        """Moves the head; `number` counts updates, for the schedule. Returns the loss over all ranks."""
        self.engine.update(learning_rate=learning_rate(self._config.optimizer, update=number))
        loss, self._loss = self._loss, torch.zeros((), dtype=torch.float64)
        return float(summed_over_ranks(self._group.once(loss)))

    def discard_gradients(self) -> None:
        """Forgets gradients of an update that is abandoned."""
        self.engine.discard_gradients()
        self._loss = torch.zeros((), dtype=torch.float64)
