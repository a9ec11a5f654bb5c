"""The learner's adapter in vLLM's LoRA layers: in the first slot, under all requests, and 0 until one is sent.

A request that had none would be computed with whatever is in the last slot, on a CPU, and one that runs over a commit
keeps what it began with: so every request has this adapter, also while whole weights are served. To be used in the
worker's process, for engines that sample with no other adapter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from generator.weights.hashes import update_digest
from generator.weights.plan import POLICY_ADAPTER
from protocol.fleet import LowRank

_STACKED = "_stacked"


class PolicyAdapter:
    """Of one worker's model. A load takes place between two steps of the engine."""

    def __init__(self, runner: Any) -> None:
        """Makes the model of `runner` compute with an adapter of zeros."""
        self._worker_manager = runner.lora_manager
        self._manager = runner.lora_manager._adapter_manager
        self._model: nn.Module = runner.get_model()
        self._leave_ends_alone()
        self._dense: _DenseLayers | None = None
        if self._manager.device.type == "cpu" and all(map(_is_plain, self._manager.modules.values())):
            (punica,) = self._manager.punica_wrapper_mapping.values()
            self._dense = _DenseLayers(runner, punica)
        self._known = frozenset(self._names())
        self.clear()

    def clear(self) -> None:
        """From now on the adapter adds 0."""
        manager = self._manager
        manager.remove_adapter(POLICY_ADAPTER)
        zeros = LoRARequest("zeros", POLICY_ADAPTER, "/not/a/file")
        self._worker_manager.add_dummy_lora(zeros, rank=min(8, manager.lora_config.max_lora_rank))
        self._activate()

    def fault(self, names: Sequence[str], adapter: LowRank) -> str:
        """Reason why factors of these names cannot be held, which vLLM would leave out; empty if they can."""
        most = self._manager.lora_config.max_lora_rank
        if adapter.rank > most:
            return f"it has rank {adapter.rank}, and this engine's LoRA layers are for ranks up to {most}"
        unknown = sorted({self._module(name) for name in names} - self._known)
        where = f"{', '.join(unknown[:3])} ({len(unknown)} in all)"
        return f"vLLM has no LoRA layer for {where}" if unknown else ""

    def load(self, factors: Mapping[str, Tensor], adapter: LowRank) -> None:
        """Takes these factors in place of the former ones."""
        targets = sorted({self._module(name).rpartition(".")[2] for name in factors})
        made = LoRAModel.from_lora_tensors(
            POLICY_ADAPTER,
            # What is staged is used again for the next version, and vLLM scales one of the factors in place.
            {name: factor.clone() for name, factor in factors.items()},
            PEFTHelper(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets),
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=self._mapper(),
        )
        self._manager.remove_adapter(POLICY_ADAPTER)
        self._manager.add_adapter(made)
        self._activate()

    def _activate(self) -> None:
        self._manager.activate_adapter(POLICY_ADAPTER)
        if self._dense is not None:
            self._dense.fuse(self._manager.modules.values(), self._slot)

    @property
    def _slot(self) -> int:
        return int(self._manager.lora_index_to_id.index(POLICY_ADAPTER))

    def update(self, digest: xxhash.xxh3_64) -> None:
        """Adds what the layers hold to a digest."""
        slot = self._slot
        for name, module in self._manager.modules.items():
            digest.update(name.encode())
            for stacked in (value for key, value in vars(module).items() if key.endswith(_STACKED)):
                for tensor in stacked if isinstance(stacked, tuple | list) else (stacked,):
                    update_digest(digest, tensor[slot])

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within it the model is what it is without adapters, for whoever loads its weights."""
        for name, module in self._manager.modules.items():
            _put(self._model, name, module.base_layer)
        try:
            yield
        finally:
            for name, module in self._manager.modules.items():
                _put(self._model, name, module)

    def _leave_ends_alone(self) -> None:
        """No adapter of the learner's is on embeddings or on the output projection, where vLLM would compute them."""
        ends = (VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)
        for name, module in list(self._model.named_modules()):
            if isinstance(module, ends):
                _put(self._model, name, module.base_layer)
        modules = self._manager.modules  # which has the processor of logits under the name of the head
        self._manager.modules = {name: module for name, module in modules.items() if not isinstance(module, ends)}

    def _names(self) -> Iterator[str]:
        for name in self._manager.modules:
            yield from self._manager.packed_modules.get(name, [name])

    def _module(self, name: str) -> str:
        return str(parse_fine_tuned_lora_name(name, self._mapper())[0])

    def _mapper(self) -> Any:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()


def _is_plain(module: Any) -> bool:
    return isinstance(module, BaseLinearLayerWithLoRA) and module.tp_size == 1


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


class _DenseLayers:
    """All rows have the one adapter: vLLM's kernels for a CPU would copy its factors for each row."""

    def __init__(self, runner: Any, punica: Any) -> None:
        self._fused: dict[int, tuple[Tensor, Tensor]] = {}
        punica.add_lora_linear = self._add
        runner.set_active_loras = lambda *_, **__: None  # which says of each row what adapter it has

    def fuse(self, modules: Iterable[Any], slot: int) -> None:
        """Of layers that are packed, such as q, k and v, the factors become one pair."""
        for module in modules:
            downs = [down[slot, 0] for down in module.lora_a_stacked]
            ups = [up[slot, 0] for up in module.lora_b_stacked]
            self._fused[id(module.lora_a_stacked)] = torch.cat(downs).T.contiguous(), torch.block_diag(*ups).T  # type: ignore[no-untyped-call]

    def _add(self, y: Tensor, x: Tensor, downs: Sequence[Tensor], *_: Any, **__: Any) -> None:
        down, up = self._fused[id(downs)]
        y.view(-1, y.shape[-1]).addmm_(x.view(-1, x.shape[-1]) @ down, up)
