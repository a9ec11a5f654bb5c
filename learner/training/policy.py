"""The policy: a causal language model of transformers that returns logprobs of chosen tokens of a packed row, and whole
copies of its weights on the host, for publishing and for export, low-rank adapters merged into them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.training.adapters import Adapter, MergedWeight, merged_weights
from learner.training.architectures import (
    OWN_ATTENTION,
    check_trainable,
    say_unpacked,
    why_modules_are_not_packed,
    why_not_packed,
)
from learner.training.attention import ATTENTION_NAME, register_packed_attention
from learner.training.config import Dtype
from learner.training.dropout import disable_dropout
from learner.training.finite import all_finite
from learner.training.layouts import last_states
from learner.training.logits import LogitRules, logit_rules
from learner.training.logprobs import Chunking, LogprobHead, TopTokens
from learner.training.packing import Microbatch
from learner.training.peft_names import peft_names
from learner.training.router_replay import RouterReplay
from learner.training.routing import ExpertWatch, RoutingSums
from learner.training.row_parts import RowPart, part_of
from learner.training.sequence_groups import ALONE
from learner.training.sharded_load import ModelClass, Shard, load_shards
from learner.training.shards import whole_size
from learner.training.varlen import gather_summing
from learner.weights.process_group import BucketWriter, LaidOut, Rooms
from learner.weights.senders import CopyShare

WeightPart = Literal["merged", "base", "adapter"]
# Parameters are gathered in groups of about this size, so that ZeRO-3 never has the whole model on one device.
GATHER_BYTES = 256 * 2**20
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def predicting_states(
    model: nn.Module, part: RowPart, *, watch: ExpertWatch | None = None, replay: RouterReplay | None = None
) -> tuple[Tensor, RoutingSums | None]:
    """The last hidden states [n, H] from which the part's n targets are predicted; one if there is no target. And
    what `watch` saw of the routers, which `replay` has take the experts that the engine chose.

    A row that trains nothing predicts from one token all the same, and its caller drops the result: every rank has to
    run the same modules in the same order, forward and backward, or the collectives of sharded parameters come apart.
    """
    hidden, routing = last_states(model, part.row, watch=watch, replay=replay, exchange=part.exchange)
    # A token that sequences share may predict one for each of them.
    states = gather_summing(hidden, part.rows) if len(part.rows) else hidden[:1]
    return states, routing


def one_at_least(token_ids: Tensor) -> Tensor:
    """`token_ids` [N, ...] to go with the predicting states: a row of token 0 if there is none."""
    return token_ids if len(token_ids) else token_ids.new_zeros(1, *token_ids.shape[1:])


@dataclass(frozen=True)
class LogprobSettings:
    """`temperature` divides the logits; `with_entropy` adds the entropy of each prediction.

    `entropy_gradient` gives the entropy its gradient, and adds it in any case; for an entropy bonus. `with_states` adds
    the hidden states that predictions are made from; for a value head.
    """

    temperature: float
    chunking: Chunking
    with_entropy: bool
    entropy_gradient: bool = False
    with_states: bool = False
    with_norms: bool = False
    """Without gradient, and the norms of `logprobs.logprobs_with_norms` in place of the entropies."""
    float32_head: bool = False
    """Products with the output matrix are not rounded to the model's type; said once, when the policy is made."""
    own_logits: bool = False
    """Logprobs come from whole logits that transformers' own code makes, of sequences as `layouts.plain_attention` has
    them; without anything else. For a self-check.
    """


class PolicyModel(nn.Module):
    """Wraps a causal language model; its parameters are named `causal_lm.` and then as Hugging Face names them."""

    PREFIX = "causal_lm."

    def __init__(self, causal_lm: nn.Module, *, settings: LogprobSettings) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.settings = settings
        self.watch: ExpertWatch | None = None
        """Set where somebody wants to know how a mixture of experts routes."""
        self.replay: RouterReplay | None = None
        """Set where its routers take the engine's experts."""
        self.group = ALONE
        """Set where ranks share rows."""
        linear = _call(causal_lm, "get_output_embeddings")
        assert isinstance(linear, nn.Linear), f"an output projection of an unknown kind: {type(linear).__name__}"
        rules = replace(_rules_of(causal_lm), unrounded=settings.float32_head)
        _call(causal_lm, "set_output_embeddings", LogprobHead.sharing(linear, rules=rules))

    @contextmanager
    def telling_norms(self) -> Iterator[None]:
        """Within it the second of what `forward` gives are not entropies but the squared norms [N] of the gradients of
        the logprobs with respect to the logits; and there is no gradient.
        """
        usual, self.settings = self.settings, replace(self.settings, with_norms=True)
        try:
            yield
        finally:
            self.settings = usual

    @contextmanager
    def own_routing(self) -> Iterator[None]:
        """Within it routers choose themselves, whatever the engine chose."""
        usual, self.replay = self.replay, None
        try:
            yield
        finally:
            self.replay = usual

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Within it logprobs are those at another temperature."""
        usual, self.settings = self.settings, replace(self.settings, temperature=temperature)
        try:
            yield
        finally:
            self.settings = usual

    @property
    def width(self) -> int:
        """H, the size of a hidden state."""
        return self._head().in_features

    @property
    def vocabulary(self) -> int:
        """Number of tokens that it predicts."""
        return self._head().out_features

    def forward(
        self, microbatch: Microbatch
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, RoutingSums | None]:
        """Logprobs [N] of the targets, the entropy [N] of their predictions, logprobs [N, C] of the candidates, the
        states [N, H] that they are predicted from, and what `watch` saw of the routers.

        Candidates are those of the microbatch, if it has any. All but the entropy carry a gradient; it does if set so.
        """
        if self.settings.own_logits:
            return self._own_logprobs(microbatch), None, None, None, None
        part = part_of(self.causal_lm, microbatch, self.group)
        states, routing = predicting_states(self.causal_lm, part, watch=self.watch, replay=self.replay)
        if self.settings.with_norms:
            logprobs, norms = self._head()(
                states,
                one_at_least(part.targets),
                temperature=self.settings.temperature,
                chunking=self.settings.chunking,
                with_norms=True,
            )
            return part.whole(logprobs), part.whole(norms), None, None, routing
        logprobs, entropy, of_candidates = self._head()(
            states,
            one_at_least(part.targets),
            candidates=None if part.candidates is None else one_at_least(part.candidates),
            temperature=self.settings.temperature,
            chunking=self.settings.chunking,
            with_entropy=self.settings.with_entropy,
            entropy_gradient=self.settings.entropy_gradient,
        )
        return (
            part.whole(logprobs),
            None if entropy is None else part.whole(entropy),
            None if of_candidates is None else part.whole(of_candidates),
            part.whole(states) if self.settings.with_states else None,
            routing,
        )

    def _own_logprobs(self, microbatch: Microbatch) -> Tensor:
        """Of a microbatch of one sequence."""
        logits: Tensor = self.causal_lm(input_ids=microbatch.token_ids[None], use_cache=False).logits[0]
        logprobs = logits[microbatch.rows].float().div(self.settings.temperature).log_softmax(dim=-1)
        return logprobs.gather(1, microbatch.targets[:, None])[:, 0]

    def top_candidates(self, microbatch: Microbatch, *, count: int) -> TopTokens:
        """The `count` tokens [N, count] that the policy finds most probable in place of each target. No gradient.

        A smaller vocabulary is there whole.
        """
        head, part = self._head(), part_of(self.causal_lm, microbatch, self.group)
        with torch.no_grad():
            token_ids, logprobs = head(
                predicting_states(self.causal_lm, part)[0],
                top=min(count, head.out_features),
                temperature=self.settings.temperature,
                chunking=self.settings.chunking,
            )
            return TopTokens(token_ids=part.whole(token_ids), logprobs=part.whole(logprobs))

    def _head(self) -> LogprobHead:
        head = _call(self.causal_lm, "get_output_embeddings")
        assert isinstance(head, LogprobHead), "set when the policy was made"
        return head


def _rules_of(causal_lm: nn.Module) -> LogitRules:
    config = causal_lm.config
    assert isinstance(config, PreTrainedConfig), "a model of transformers has a config"
    return logit_rules(config)


def _call(model: nn.Module, method: str, *arguments: object) -> object:
    """A method that every causal language model of transformers has, but no type that mypy sees."""
    function = getattr(model, method)
    assert callable(function), f"{type(model).__name__}.{method} is a method"
    result: object = function(*arguments)
    return result


def load_causal_lm(path: Path, *, dtype: torch.dtype, shard: Shard | None = None) -> nn.Module:
    """The model in `path`, in training mode without dropout; no download. UnfitModel: it cannot be trained rightly."""
    return load_decoder(path, AutoModelForCausalLM, dtype=dtype, shard=shard)[0]


def load_decoder(
    path: Path, kind: type, *, dtype: torch.dtype, shard: Shard | None = None, **settings: object
) -> tuple[nn.Module, Collection[str]]:
    """The model in `path` as `kind`, a class of transformers, makes it, and the names of weights that the folder lacks.

    It takes packed rows if all of its layers can. With `shard` no rank holds it whole: all ranks must call it. Raises
    UnfitModel for what cannot be trained as it is sampled.
    """
    check_trainable(path)
    register_packed_attention()
    reason = why_not_packed(path)
    loaded = None
    if reason is None:
        loaded = _load_packed(path, kind, dtype=dtype, shard=shard, settings=settings)
        reason = OWN_ATTENTION if loaded is None else why_modules_are_not_packed(loaded[0])
    if loaded is None or reason is not None:
        loaded = _load(path, kind, None, dtype=dtype, shard=shard, settings=settings)
    model, missing = loaded
    if reason is not None:
        say_unpacked(path, model, reason)
    disable_dropout(model)
    return model.train(), missing


def _load_packed(
    path: Path, kind: type, *, dtype: torch.dtype, shard: Shard | None, settings: Mapping[str, object]
) -> tuple[nn.Module, Collection[str]] | None:
    """The model with the attention of packed rows; None if its class has a table of attentions, as Falcon's, which
    lacks ours.
    """
    try:
        return _load(path, kind, ATTENTION_NAME, dtype=dtype, shard=shard, settings=settings)
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        return None


def _load(
    path: Path,
    kind: type,
    attention: str | None,
    *,
    dtype: torch.dtype,
    shard: Shard | None,
    settings: Mapping[str, object],
) -> tuple[nn.Module, Collection[str]]:
    if shard is not None:
        return load_shards(kind, path, shard=shard, dtype=dtype, attention=attention, settings=settings)
    model, report = cast(ModelClass, kind).from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        output_loading_info=True,
        **settings,
    )
    assert isinstance(model, nn.Module), "transformers returned something else than a module"
    return model, report["missing_keys"]


@dataclass(frozen=True)
class NamedTensor:
    """A tensor's name in the checkpoint format of its model, and a contiguous copy of its value on the CPU."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class WeightSnapshot:
    """The weights after a step, in the model's order; parameters that are tied appear once, under their first name. The
    buffers that a checkpoint of the model has come last, such as the biases of routers.

    A policy's have the names and shapes of its checkpoint format, which vLLM loads: within transformers they may have
    others, such as one tensor of all experts. A host copy's lie in `buckets`, as they are sent. `not_finite` are the
    names of those of which the device that they came from has seen that some numbers are not finite; None where that
    was not looked for.
    """

    tensors: tuple[NamedTensor, ...]
    buckets: tuple[LaidOut, ...] = ()
    not_finite: tuple[str, ...] | None = None
    shares: tuple[CopyShare, ...] = ()
    """Of a copy that ranks share: those that others keep."""

    @property
    def bytes(self) -> int:
        """The size of all values."""
        return sum(tensor.value.nbytes for tensor in self.tensors)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch type of a config's."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


@dataclass(frozen=True)
class WholeWeight:
    """A weight of the policy while it is whole on this rank: `base`, and what an adapter adds to it."""

    name: str
    base: Tensor
    adapter: Adapter | None = None

    def value(self) -> Tensor:
        """The weight without gradient, on its device: a new tensor in float32 if merged, otherwise the weight itself.

        Merging does not touch the model: its weights and its adapters stay apart.
        """
        return self.base if self.adapter is None else self.adapter.merged(self.base)

    def factors(self) -> Iterator[tuple[str, Tensor]]:
        """The factors of its adapter, down and then up, by the names of peft's files."""
        if self.adapter is not None:
            layer = self.name.removeprefix(PolicyModel.PREFIX).removesuffix(".weight")
            yield from zip(peft_names(layer), (self.adapter.down, self.adapter.up), strict=True)


class WholeModel(Protocol):
    """A model whose weights can be had whole: one that is trained (`Engine`), or one of a checkpoint."""

    @property
    def model(self) -> nn.Module:
        """Adapters included."""

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within it the parameters are whole on every rank. All ranks must enter it with the same ones."""

    def master_weight(self, parameter: nn.Parameter) -> Tensor:
        """The float32 weight that the optimizer keeps; of one that is not trained, the weight as it is."""


def host_copy(
    engine: WholeModel,
    *,
    dtype: Dtype,
    keep: bool,
    bucket_bytes: int = 0,
    rooms: Rooms | None = None,
    part: WeightPart = "merged",
    owned: Iterator[WholeWeight] | None = None,
    buffers: bool = True,
) -> WeightSnapshot:
    """The weights as of now, as `dtype`: the optimizer's own for float32, the model's for the model's type.

    Adapters are merged, in float32; or it is the weights without them, or their factors in float32, by peft's names.
    They lie in buckets of about `bucket_bytes`, in `rooms`; 0: each in memory of its own. All ranks must call it; those
    with `keep` false return no tensors, and spend no memory. Where ranks share a copy, `owned` are this rank's weights,
    and `buffers` tells that it keeps those.

    What comes from another device than the CPU is rounded there, and looked through for numbers that are not finite: at
    hundreds of times the speed of a thread of the CPU, which would read all of it once more.
    """
    wanted = torch_dtype(dtype)
    writer = BucketWriter(bucket_bytes=bucket_bytes, rooms=rooms)
    copies: list[NamedTensor] = []
    wrong: list[str] = []
    on_device = True

    def copy(name: str, value: Tensor, dtype: torch.dtype) -> None:
        nonlocal on_device
        value = value.detach()
        elsewhere = value.device.type != "cpu"
        value = value.to(dtype) if elsewhere else value
        on_device = on_device and elsewhere
        stored = list(_as_stored(engine.model, name.removeprefix(PolicyModel.PREFIX), value))
        wrong.extend([stored[0][0]] if elsewhere and not all_finite(value) else [])
        copies.extend(NamedTensor(each, writer.add(each, part, dtype=dtype)) for each, part in stored)

    for weight in whole_weights(engine, dtype=wanted, part=part) if owned is None else owned:
        if keep and part == "adapter":
            for name, factor in weight.factors():
                # In whatever type weights are sent: who merges it then comes to the same weights as the learner.
                copies.append(NamedTensor(name, writer.add(name, factor, dtype=torch.float32)))
        elif keep:
            copy(weight.name, weight.value(), wanted)
    on_device = on_device and part != "adapter"
    for name, buffer in _stored_buffers(engine.model) if keep and buffers and part != "adapter" else ():
        copy(name, buffer, buffer.dtype)  # as the model keeps it: a router's bias has more digits than the weights
    return WeightSnapshot(
        tensors=tuple(copies), buckets=writer.buckets(), not_finite=tuple(wrong) if on_device else None
    )


def _as_stored(model: nn.Module, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight of a policy as its checkpoint format has it: one tensor or, of experts, many."""
    causal_lm = model.causal_lm if isinstance(model, PolicyModel) else None
    # What it was loaded by; empty for most.
    if not isinstance(causal_lm, PreTrainedModel) or getattr(causal_lm, "_weight_conversions", None) == []:
        yield name, value
    else:
        yield from revert_weight_conversion(causal_lm, {name: value}).items()


def _stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def whole_weights(engine: WholeModel, *, dtype: torch.dtype, part: WeightPart = "merged") -> Iterator[WholeWeight]:
    """The weights of `engine.model` without adapters, in the model's order, one bucket of them whole at a time. Of the
    `base`, adapters are left out; of the `adapter`, whatever has none, and base weights may not be whole.

    Precise enough for `dtype`, but not converted to it. Each is valid until the next one is asked for. All ranks must
    iterate, and to the end.
    """
    for bucket in weight_groups(engine.model, part):
        with engine.gathered([parameter for weight in bucket for parameter in _of_part(weight, part)]):
            for weight in bucket:
                yield _whole(engine, replace(weight, adapter=None) if part == "base" else weight, dtype)


def _of_part(weight: MergedWeight, part: WeightPart) -> Sequence[nn.Parameter]:
    match part:
        case "merged":
            return weight.parameters
        case "base":
            return weight.parameters[:1]
        case "adapter":
            return weight.parameters[1:]


def _whole(engine: WholeModel, weight: MergedWeight, dtype: torch.dtype) -> WholeWeight:
    parameter, adapter = weight.parameter, weight.adapter
    if adapter is not None:
        _, down, up = weight.parameters
        masters = replace(adapter, up=engine.master_weight(up), down=engine.master_weight(down))
        return WholeWeight(name=weight.name, base=parameter.detach(), adapter=masters)
    base = engine.master_weight(parameter) if dtype != parameter.dtype else parameter.detach()
    return WholeWeight(name=weight.name, base=base)


def weight_groups(model: nn.Module, part: WeightPart) -> Iterator[list[MergedWeight]]:
    """The weights of the model in its order, in groups of about `GATHER_BYTES`."""
    bucket: list[MergedWeight] = []
    size = 0
    for weight in merged_weights(model):
        parameters = _of_part(weight, part)
        bucket += [weight] if parameters else []
        for parameter in parameters:
            size += whole_size(parameter) * parameter.element_size()
        if size >= GATHER_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@dataclass(frozen=True)
class TextFiles:
    """Files that a trained model is written with beside its weights: the tokenizer of a model's folder, and its chat
    template or another one's text in its place.
    """

    model: Path
    chat_template: str = ""

    def copy_to(self, folder: Path) -> None:
        """Writes them."""
        for pattern in TOKENIZER_FILES:
            for file in self.model.glob(pattern):
                shutil.copy2(file, folder / file.name)
        self.copy_template_to(folder)

    def copy_template_to(self, folder: Path) -> None:
        """Writes the chat template, if it is another one than the model's, for which every other one is left out."""
        if not self.chat_template:
            return
        (folder / "chat_template.json").unlink(missing_ok=True)
        (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        settings = folder / "tokenizer_config.json"
        known = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        if known.pop("chat_template", None) is not None:
            settings.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model_directory(
    snapshot: WeightSnapshot, *, causal_lm: nn.Module, source: TextFiles, destination: Path
) -> None:
    """Writes a Hugging Face model directory: config, weights of `snapshot`, and the tokenizer files of `source`.

    Whoever may read the config may read the weights; safetensors leaves them to this user alone.
    """
    save = causal_lm.save_pretrained
    assert callable(save), "a transformers model"
    destination.mkdir(parents=True, exist_ok=True)
    save(destination, state_dict={tensor.name: tensor.value for tensor in snapshot.tensors})
    for weights in destination.glob("*.safetensors"):
        shutil.copymode(destination / "config.json", weights)
    source.copy_to(destination)
