"""The version of an adapter on each token that is sampled with it.

An adapter is replaced between two steps of the engine, while completions run. vLLM's scheduler hears nothing of it, and
a step may be planned while another one runs: so each step notes at its planning which versions there are, and each of
its tokens is stamped with what its step has noted. The stamp travels in a field of the output that is free, since no
keys and values are transferred here.

    engine's process: add_lora ─▶ AdapterStamps.loaded     schedule ─▶ planned     update_from_output ─▶ stamp
    this process:     process_outputs ─▶ taken_stamp ─▶ AdapterSpans of the completion
"""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore

from protocol.adapters import AdapterSpan

_FIELD = "headway_adapter_version"
_NOTE = "headway_adapter_versions"


def versioned(target_id: str, *, number: int, version: int, path: str, in_place: bool = False) -> LoRARequest:
    """The adapter of slot `number` as vLLM is told of it; its version stands where vLLM has the name of a base."""
    return LoRARequest(target_id, number, path, base_model_name=str(version), load_inplace=in_place)


class AdapterStamps:
    """Of a scheduler: the version in each slot, and which requests sample with which slot."""

    def __init__(self) -> None:
        self._versions: Mapping[int, int] = {}
        self._slots: dict[str, int] = {}

    def loaded(self, request: LoRARequest) -> None:
        """The engine has the adapter from its next step on."""
        self._versions = {**self._versions, request.lora_int_id: int(request.base_model_name or 0)}

    def added(self, request: Any) -> None:
        """A request that may have an adapter begins to wait."""
        if request.lora_request is not None and request.lora_request.base_model_name is not None:
            self._slots[request.request_id] = request.lora_request.lora_int_id

    def planned(self, step: Any) -> None:
        """A step is planned: what runs it will have these versions."""
        if self._slots:
            setattr(step, _NOTE, self._versions)

    def stamp(self, step: Any, outputs: Iterable[EngineCoreOutput]) -> None:
        """Stamps what a step has sampled."""
        if not self._slots:
            return
        versions: Mapping[int, int] = getattr(step, _NOTE, {})
        for output in outputs:
            slot = self._slots.get(output.request_id)
            if slot is None:
                continue
            if slot in versions:
                output.kv_transfer_params = {_FIELD: versions[slot]}
            if output.finish_reason is not None:
                del self._slots[output.request_id]

    def keep(self, request_ids: Iterable[str]) -> None:
        """Forgets all requests but these."""
        self._slots = {name: self._slots[name] for name in self._slots.keys() & set(request_ids)}

    def __len__(self) -> int:
        return len(self._slots)


def tell_schedulers_of_adapters() -> None:
    """Has vLLM's engine tell its scheduler, if that has `adapter_loaded`, which adapter it has loaded."""
    load = EngineCore.add_lora
    if getattr(load, "tells_scheduler", False):
        return

    def add_lora(self: Any, lora_request: LoRARequest) -> bool:
        added: bool = load(self, lora_request)
        self.scheduler.adapter_loaded(lora_request)
        return added

    add_lora.tells_scheduler = True  # type: ignore[attr-defined]
    EngineCore.add_lora = add_lora


def taken_stamp(output: EngineCoreOutput) -> int | None:
    """Takes the stamp off an output; None if it has none."""
    told = output.kv_transfer_params
    if not isinstance(told, dict) or _FIELD not in told:
        return None
    output.kv_transfer_params = None
    return int(told[_FIELD])


def longer(spans: tuple[AdapterSpan, ...], *, version: int, tokens: int) -> tuple[AdapterSpan, ...]:
    """The spans of a completion that has some tokens more of a version."""
    start = spans[-1].end if spans else 0
    if not tokens:
        return spans
    if spans and spans[-1].version == version:
        return (*spans[:-1], spans[-1].model_copy(update={"end": start + tokens}))
    return (*spans, AdapterSpan(version=version, start=start, end=start + tokens))
