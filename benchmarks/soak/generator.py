"""The soak's generator: the real one, but for the engine. vLLM's place is taken by `torch_engine`.

    python -m benchmarks.soak.generator --config RUN.toml ...

Commands, routes, gate, weight sync, transfer of weights, checksums and probes are the generator's own; what it imports
of vLLM is replaced here, before it is imported. For this benchmark only: vLLM takes some 10 ms for a token and 30 s for
a start on two cores, and 50,000 steps with hundreds of restarts would take days.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

Init = TypeVar("Init")
Update = TypeVar("Update")


class WeightTransferEngine(Generic[Init, Update]):
    """The part of vLLM's transfer engine that the generator's own builds on."""

    update_info_cls: type[Any]

    def __init__(self, config: object, vllm_config: Any, device: object, model: object) -> None:
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        """See vLLM."""
        return self.update_info_cls(**info)


class WeightTransferEngineFactory:
    """Nobody makes an engine by name here."""

    _registry: dict[str, type[Any]] = {}  # noqa: RUF012 - as vLLM has it

    @classmethod
    def register_engine(cls, name: str, engine: type[Any]) -> None:
        """See vLLM."""
        cls._registry[name] = engine


@dataclass
class Info:
    """Base of both messages to a transfer engine."""


class LayerInfo:
    """No layer is ever half loaded: parameters are copied in place."""

    def __init__(self, layer: Any) -> None:
        self.restore_metadata: tuple[dict[str, Any], dict[str, Any]] = (dict(layer.named_parameters(recurse=False)), {})

    def can_load(self) -> bool:
        """See vLLM."""
        return False


class NeverRefused(Exception):
    """No request is refused here by the engine."""


class NoHead:
    """No module is one of vLLM's heads, or packs experts."""


def _nothing(*_: object, **__: object) -> None:
    """Of a reload, for which nothing has to be made ready."""


def install() -> None:
    """Puts the replacements where the generator looks for vLLM, before it is imported."""
    transfer = "vllm.distributed.weight_transfer"
    loading = "vllm.model_executor.model_loader"
    _put("vllm.config", VllmConfig=object)
    _put("vllm.config.weight_transfer", WeightTransferConfig=object)
    _put(f"{transfer}.factory", WeightTransferEngineFactory=WeightTransferEngineFactory)
    layers = "vllm.model_executor.layers"
    _put(f"{layers}.vocab_parallel_embedding", ParallelLMHead=NoHead)
    _put(f"{layers}.fused_moe.oracle.unquantized", UnquantizedMoeBackend=SimpleNamespace(CPU="cpu"))
    _put(f"{layers}.fused_moe.unquantized_fused_moe_method", UnquantizedFusedMoEMethod=NoHead)
    _put(f"{loading}.reload", finalize_layerwise_reload=_nothing, initialize_layerwise_reload=_nothing)
    _put(f"{loading}.reload.layerwise", get_layerwise_info=LayerInfo, _layerwise_process=_nothing)
    _put(f"{loading}.reload.meta", SKIP_TENSORS=frozenset(), materialize_layer=_nothing)
    _put("generator.openai_routes", mount_openai_routes=None)
    from benchmarks.soak import torch_engine as ours

    _put(
        f"{transfer}.base",
        WeightTransferEngine=WeightTransferEngine,
        WeightTransferInitInfo=Info,
        WeightTransferUpdateInfo=Info,
        WeightTransferInitRequest=ours.WeightTransferInitRequest,
    )
    _put(
        "vllm.v1.engine.exceptions",
        EngineDeadError=ours.EngineDeadError,
        EngineGenerateError=ours.EngineGenerateError,
    )
    _put("vllm.exceptions", GracefulHTTPError=NeverRefused, VLLMClientError=NeverRefused)
    _put("vllm.v1.engine.async_llm", AsyncLLM=ours.AsyncLLM)
    _put("vllm.outputs", CompletionOutput=object, RequestOutput=object)
    _put("vllm.lora.request", LoRARequest=object)
    _put("vllm.lora.layers", LogitsProcessorWithLoRA=NoHead, VocabParallelEmbeddingWithLoRA=NoHead)
    _put("vllm.lora.layers.base_linear", BaseLinearLayerWithLoRA=NoHead)
    _put("vllm.lora.lora_model", LoRAModel=object)
    _put("vllm.lora.peft_helper", PEFTHelper=object)
    _put("vllm.lora.utils", parse_fine_tuned_lora_name=None)
    _put("generator.engine.socket_folder", make_socket_folder=_nothing, remove_socket_folder=_nothing, PREFIX="")
    _put("generator.engine.routed_experts", UntoldRows=object)
    _put(
        "generator.weights.routing_capture",
        NotCaptured=NeverRefused,
        RoutingCapture=object,
        asks_for_experts=lambda params: False,
    )
    _put("generator.engine.adapter_stamps", longer=None, taken_stamp=lambda output: None, versioned=None)
    _put("vllm.v1.engine.output_processor", OutputProcessor=object, RequestState=object)
    _put(
        "generator.engine.arguments",
        engine_args=lambda options, **_: options,
        engine_kind=lambda config: "torch float32",
        capture_of_experts=lambda config: "none",
        dtype_name=lambda config: "float32",
    )
    _put(
        "generator.engine.answers",
        adapter_answer=None,
        adapter_sampling_params=None,
        generate_part=lambda part, *, instance, oldest_cache: part.signed(instance, oldest_cache=oldest_cache),
        sampling_params=lambda routed_experts=False, routed_experts_from=0, **given: ours.TorchParams(**given),
        scoring_params=lambda top=0: ours.TorchParams(),
        scored_sequence=ours.scored_sequence,
    )
    _put(
        "generator.engine.packing",
        pack_outputs=lambda config: False,
        unpack=lambda output: None,
        wants_sampled_only=lambda params: False,
    )
    vars(import_module("generator.engine.gated_llm"))["CountingOutputProcessor"] = ours.CountingOutputProcessor


def _put(name: str, **members: object) -> None:
    """A module of this name, and the packages above it that are not there."""
    above, _, _ = name.rpartition(".")
    if above and not above.startswith("generator") and above not in sys.modules:
        _put(above)
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # it is found, and has no source to read
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules[name] = module


def main() -> None:
    """The command `generator`, with that engine."""
    from generator import command

    install()
    vars(command)["open_fork_server"] = _nothing
    command.main()


if __name__ == "__main__":
    main()
