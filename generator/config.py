"""The settings of a generator. Loads neither vllm nor torch."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, SecretStr, field_validator, model_validator

from generator.engine.options import extra_fault
from protocol.fleet import Backend, Channel, WeightWay
from services.config.agreements import EqualTo, ModelFolder, Reaches
from services.config.models import ConfigModel, HttpConfig, ProcessConfig
from services.config.run_paths import WrittenPath
from services.model_folder import positions, quantization
from services.network import HttpAddress

_USUAL_TOKENS = 2048
_QUANTIZING = ("quantization", "quantization_config")


class EngineConfig(ConfigModel):
    """vLLM."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of weights and activations"
    )
    head_dtype: Annotated[Literal["model", "float32"], EqualTo("learner", "training.head_dtype")] = Field(
        "model",
        description="type of the products with the output matrix, of which logits are made: dtype, or float32, which "
        "brings learner and generator nearer to each other in bfloat16",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="most tokens of prompt and completion together; 2048 if none, or what the model has positions for",
    )
    max_num_seqs: int = Field(64, ge=1, description="completions sampled at once")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens in one engine step; vLLM's own if none. Scoring given tokens holds the logits of so "
        "many over the whole vocabulary: a teacher on a GPU wants it small, 1024 for example",
    )
    kv_cache_gb: float = Field(1.0, gt=0, description="cache of keys and values on a CPU, in GiB")
    gpu_memory_fraction: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory that vLLM takes")
    tensor_parallel_size: int = Field(1, ge=1, description="workers that share one model")
    threads: int = Field(1, ge=1, description="CPU threads that compute")
    niceness: int = Field(
        0,
        ge=0,
        le=19,
        description="niceness of the engine's processes, as of the command nice. Above 0, other work on the same "
        "cores goes first, and the engine may not answer for long (stall_timeout_s)",
    )
    seed: int = Field(0, ge=0, lt=1 << 32, description="seed of sampling")
    enforce_eager: bool = Field(
        True, description="no compilation and no CUDA graphs: quick start, slower steps on a GPU"
    )
    stream_interval: int = Field(
        32, ge=1, description="tokens of a completion that are sent together; a slow engine sends those of 2 s"
    )
    lora_rank: int = Field(
        0,
        ge=0,
        le=512,
        description="a learner's adapters up to this rank are computed beside the weights (vLLM's LoRA layers), so "
        "that a commit pauses less and each token costs more; 0, and what vLLM has no such layers for: adapters are "
        "added to the weights at each commit",
    )
    staging: Literal["staging", "none"] = Field(
        "staging", description="receive new weights beside the old ones while serving, or within the pause"
    )
    recompute_on_update: bool = Field(
        False,
        description="at each update, recompute the keys and values of running completions with the new weights, so "
        "that later tokens are those of the new policy alone; else they rest on the old keys and "
        "values, and updates cost nothing",
    )
    routed_experts: Literal["auto", "on", "off"] = Field(
        "auto",
        description="tell a learner that asks for them the experts that a mixture's tokens are sent to "
        "(learner.training.router.replay): where that is known to work, which is on CPUs (auto), off, or on, with "
        "which an engine that cannot does not start, and a GPU's uses vLLM's own capture, which nobody has tried here",
    )
    stall_timeout_s: float = Field(
        15.0, gt=0, description="an engine that does not answer for so long is out of service until it does, in seconds"
    )
    extra: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="further arguments of vLLM, by its names, such as quantization or enable_expert_parallel; those "
        "that Headway sets itself are refused",
    )
    verbose: bool = Field(False, description="let vLLM's own log through")

    @field_validator("extra")
    @classmethod
    def _extra_is_known(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if (fault := extra_fault(value)) is not None:
            raise ValueError(fault)
        return value


class JoinConfig(ConfigModel):
    """The learner whose policy is served."""

    learner: Annotated[HttpAddress | None, Reaches("learner")] = Field(
        "http://127.0.0.1:7300",
        description="the learner's HTTP address; none serves the model as it is, alone, such as a teacher",
    )
    token: Annotated[SecretStr | None, EqualTo("learner", "http.token")] = Field(
        None, description="bearer token of the learner"
    )
    channel: Channel = Field(
        "latest",
        description="versions that it holds: latest, each new one, for rollouts; released, for users "
        "(learner.release); canary, for some users: a candidate on trial, and the released one while there is none",
    )
    feedback: bool = Field(
        False,
        description="tell the learner what is answered on the OpenAI routes, prompt and text, so that users can rate "
        "it by POST /v1/feedback; not with channel latest",
    )
    url: HttpAddress | None = Field(None, description="address under which others reach this generator, if not its own")
    backend: Annotated[Backend, EqualTo("learner", "weights.backend")] = Field(
        "gloo", description="collective of weight broadcasts: gloo on CPUs, nccl on GPUs"
    )
    download_folder: Annotated[Path | None, WrittenPath()] = Field(
        None, description="where downloaded weights lie until they are loaded; the system's temporary folder if none"
    )
    weights: WeightWay = Field(
        "broadcast",
        description="way in which new weights come: broadcast to all generators at once, or pull, a download of what "
        "each version has changed, for generators on a slow link or in another data centre",
    )
    relays: tuple[HttpAddress, ...] = Field(
        (),
        description="addresses of copies of the learner's tree of weights, for weights = pull: of `headway relay`, or "
        "of any web server that has one; the learner is asked for what none of them has",
    )
    relay_token: SecretStr | None = Field(None, description="bearer token of the relays")
    relay_patience_s: float = Field(
        5.0,
        ge=0,
        description="how long relays that fail, or have not got a version yet, are asked before the learner is",
    )
    pause_ttl_s: float = Field(60.0, gt=0, description="longest pause for a commit; the old weights serve on after it")

    @field_validator("learner", mode="before")
    @classmethod
    def _none_in_toml(cls, value: object) -> object:
        """TOML has no word for nothing."""
        return None if value == "none" else value

    @model_validator(mode="after")
    def _relays_are_pulled_from(self) -> Self:
        if self.relays and self.weights != "pull":
            raise ValueError(
                f"join.relays has {len(self.relays)} addresses, and nothing is pulled from them with join.weights = "
                f"{self.weights}: set join.weights to pull, or leave join.relays out"
            )
        return self


class AdapterConfig(ConfigModel):
    """Adapters that are sampled from, for a server of the Tinker API."""

    slots: int = Field(
        0, ge=0, le=256, description="adapters that are held at once, and sampled from in one step; 0 takes none"
    )
    max_rank: int = Field(32, ge=1, le=512, description="largest rank of an adapter; memory is taken for it")
    whole: bool = Field(
        False,
        description="all weights are fetched in place of adapters, for a server with tinker.all_weights; those of one "
        "target at a time are held, and requests for another one wait until its own have ended",
    )
    source: HttpAddress | None = Field(None, description="HTTP address of the server whose adapters are fetched")
    token: SecretStr | None = Field(None, description="bearer token of that server")

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.slots and self.source is None:
            raise ValueError(f"adapters.source is missing: with {self.slots} slots, expected the server's HTTP address")
        if self.whole and self.source is None:
            raise ValueError("adapters.source is missing: with adapters.whole, expected the server's HTTP address")
        if self.whole and self.slots:
            raise ValueError(
                f"adapters.whole is set beside {self.slots} adapters.slots: weights that are replaced as a whole have "
                "no adapters. Leave one of them out"
            )
        return self

    @property
    def are_taken(self) -> bool:
        """True if a server of the Tinker API samples here."""
        return self.slots > 0 or self.whole


class GeneratorConfig(ProcessConfig):
    """The generator: its model, and how many requests it takes."""

    usual_groups: ClassVar[tuple[str, ...]] = ("engine", "join", "http")

    http: HttpConfig = Field(HttpConfig(port=7310), description="the generator's HTTP address")
    id: str | None = Field(
        None, description="name of this generator; made from host and port if left out", max_length=256
    )
    model: Annotated[Path, ModelFolder(("model", "tokenizer", "chat_template"))] = Field(
        description="Hugging Face directory of the model"
    )
    served_model_name: str = Field("policy", description="name of the model on the OpenAI routes")
    openai: bool = Field(True, description="serve vLLM's OpenAI-compatible routes")
    tool_parser: str | None = Field(
        None,
        description="vLLM's parser of tool calls for the OpenAI routes, such as hermes; none: calls are not parsed. "
        "Environments have `tool_format`",
    )
    reasoning_parser: str | None = Field(
        None, description="vLLM's parser that takes the reasoning out of an answer, for the OpenAI routes"
    )
    max_waiting_requests: int = Field(4096, ge=1, description="requests at once; more are refused with status 429")
    drain_s: float = Field(5.0, ge=0, description="how long requests may finish after SIGTERM, in seconds")
    engine: EngineConfig = EngineConfig()
    join: JoinConfig = JoinConfig()
    adapters: AdapterConfig = AdapterConfig()

    @model_validator(mode="after")
    def _adapters_are_of_fixed_weights(self) -> Self:
        if self.adapters.whole and self.join.learner is not None:
            raise ValueError(
                f"adapters.whole: the learner at {self.join.learner} sends weights, too; expected one source of them. "
                "Set join.learner to none"
            )
        if self.adapters.slots and self.join.learner is not None:
            raise ValueError(
                f"adapters.slots: {self.adapters.slots} adapters on weights that the learner at {self.join.learner} "
                "changes; expected a base model that stays. Set join.learner to none"
            )
        return self

    @model_validator(mode="after")
    def _users_have_a_channel(self) -> Self:
        if self.join.learner is None and self.join.channel != "latest":
            raise ValueError(
                f"join.channel is {self.join.channel} and join.learner is none: nobody sends it versions; set the "
                "learner's address, or leave join.channel out"
            )
        if self.join.feedback and (self.join.channel == "latest" or not self.openai):
            raise ValueError(
                f"join.feedback is true, join.channel {self.join.channel} and openai {str(self.openai).lower()}: users "
                "ask on the OpenAI routes of channel released or canary; set both, or leave join.feedback out"
            )
        return self

    @model_validator(mode="after")
    def _updates_are_not_quantized(self) -> Self:
        """A learner sends weights alone, and an engine that quantizes them has scales too, which none would set."""
        set_here = [name for name in _QUANTIZING if self.engine.extra.get(name) is not None]
        if self.join.learner is not None and set_here:
            raise ValueError(
                f"engine.extra: {set_here[0]} quantizes the engine, whose weights the learner at {self.join.learner} "
                "could not update; expected a quantized engine only where join.learner is none. Leave it out, or set "
                "join.learner to none"
            )
        if self.join.learner is not None and (method := quantization(self.model)) is not None:
            raise ValueError(
                f"model: the weights in {self.model} are quantized ({method}, by its own files), and the learner at "
                f"{self.join.learner} could not update them; expected float32 or bfloat16. Load the model with "
                "transformers, dequantize() it and write it with save_pretrained, for learner and generator alike, or "
                "set join.learner to none"
            )
        return self

    @property
    def context_tokens(self) -> int:
        """Of prompt and completion together; reads the model's config.json where the settings do not say it."""
        return self.engine.max_model_len or min(_USUAL_TOKENS, positions(self.model) or _USUAL_TOKENS)

    @property
    def gpus_wanted(self) -> int:
        """Counts one GPU for each worker."""
        return self.engine.tensor_parallel_size

    @property
    def alone_in(self) -> frozenset[str]:
        """Where it samples for a server of the Tinker API, no learner sends it weights."""
        is_joined = self.join.learner is not None or not self.adapters.are_taken
        of_join = (f"join.{name}" for name in JoinConfig.model_fields)
        return frozenset() if is_joined else frozenset({*of_join, "engine.head_dtype"})

    @property
    def collective(self) -> str:
        """Of the learner's weight broadcasts; empty if it serves alone."""
        return self.join.backend if self.join.learner is not None else ""

    @property
    def staging(self) -> Literal["staging", "none"]:
        """Place in which an update is received.

        Within the pause also where workers speak NCCL among each other while they serve: two communicators that run at
        the same time on one GPU, begun in another order on another, wait for each other for ever.
        """
        alone = self.engine.tensor_parallel_size == 1 or self.join.backend != "nccl"
        return self.engine.staging if alone else "none"
