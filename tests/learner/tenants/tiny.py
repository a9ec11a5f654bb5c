"""A tiny model with a byte tokenizer, and a sampler of it by transformers: for tests, where no generator runs.

The SDK loads a tokenizer by the name of the base model, which it finds as a folder below the working folder.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from learner.tenants.service import ServedBase
from learner.tenants.turns import TargetWeights
from protocol.tinker.sampling import NO_TARGET, BestTokens, SampleAnswer, SampledTokens, SampleRequest

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_PREFIX = "base_model.model."


def make_tiny_model(folder: Path, *, hidden: int = 32) -> None:
    """Writes a random Qwen3 of two layers, whose output projection is its embedding."""
    words = _tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=-(-len(words) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    words.save_pretrained(folder)


def _tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def tiny_service_parts(folder: Path, name: str) -> tuple[Any, Any, ServedBase, Any]:
    """The real trainer, the sampler of this file, and what else a service needs, for the model in the folder."""
    from learner.tinker import parse_graph
    from learner.training.adapter_trainer import AdapterTrainer

    torch.set_num_threads(1)
    path = folder / name
    if not path.exists():
        make_tiny_model(path)
    trainer = AdapterTrainer.open(path, name=name)
    base = ServedBase(name, trainer.base.context_length, "qwen3")
    return trainer, TinySampler(path), base, parse_graph


class TinySampler:
    """A Sampler; one request at a time, in a thread. Reads the weights of its target before each token."""

    def __init__(self, path: Path) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(path).float().eval()
        self._words: Any = PreTrainedTokenizerFast.from_pretrained(path)
        self._layers = dict(self._model.named_modules())
        self._lock, self._offered = threading.Lock(), dict[str, TargetWeights]()
        self._loaded: dict[Path, Any] = {}

    async def offer(self, weights: TargetWeights) -> None:
        self._factors(weights)
        self._offered[weights.target_id] = weights

    async def forget(self, target_id: str) -> None:
        self._offered.pop(target_id, None)

    async def sample(self, weights: TargetWeights, request: SampleRequest, *, namespace: str) -> SampleAnswer:
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._sample, weights, request, given_up)
        finally:
            given_up.set()

    def _factors(self, weights: TargetWeights) -> Any:
        if weights.folder is None:
            return 0.0, {}
        if weights.folder not in self._loaded:
            config = json.loads((weights.folder / "adapter_config.json").read_text())
            tensors = load_file(weights.folder / "adapter_model.safetensors")
            self._loaded[weights.folder] = config["lora_alpha"] / config["r"], tensors
        return self._loaded[weights.folder]

    @contextmanager
    def _adapted(self, weights: TargetWeights) -> Iterator[None]:
        scale, tensors = self._factors(weights)
        hooks = []
        for name in {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in tensors}:
            down, up = (tensors[f"{_PREFIX}{name}.lora_{side}.weight"] for side in "AB")

            def add(_: Any, inputs: Any, output: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
                adapted: Tensor = output + scale * (inputs[0] @ down.T) @ up.T
                return adapted

            hooks.append(self._layers[name].register_forward_hook(add))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _scores(self, weights: TargetWeights, ids: Tensor, cache: DynamicCache) -> tuple[Tensor, int]:
        current = self._offered.get(weights.target_id, weights)
        with self._adapted(current), torch.no_grad():
            logits = self._model(input_ids=ids, past_key_values=cache, use_cache=True).logits.float()
        return torch.log_softmax(logits[0], dim=-1), current.version

    def _sample(self, weights: TargetWeights, request: SampleRequest, given_up: threading.Event) -> SampleAnswer:
        random = torch.Generator()
        if request.seed is None:
            random.seed()
        else:
            random.manual_seed(request.seed)
        with self._lock:
            prompt, _ = self._scores(weights, torch.tensor([request.prompt]), DynamicCache())
            sequences = tuple(self._sequence(weights, request, random, given_up) for _ in range(request.samples))
        return SampleAnswer(sequences, **_prompt_scores(prompt[:-1], request, random))

    def _sequence(
        self, weights: TargetWeights, request: SampleRequest, random: torch.Generator, given_up: threading.Event
    ) -> SampledTokens:
        cache, ids = DynamicCache(), torch.tensor([request.prompt])
        tokens: list[int] = []
        logprobs, versions, rows, stopped = [], [], [], False
        while len(tokens) < request.max_tokens and not stopped and not given_up.is_set():
            scores, version = self._scores(weights, ids, cache)
            row = _warmed(scores[-1], request)
            chosen = (
                int(row.argmax())
                if request.temperature == 0
                else int(torch.multinomial(row.exp(), 1, generator=random))
            )
            tokens.append(chosen)
            logprobs.append(float(row[chosen]))
            versions.append(version)
            rows.append(row)
            ids = torch.tensor([[chosen]])
            stopped = self._stops(tokens, request)
        top = _best(torch.stack(rows), request.topk_sample) if request.topk_sample else None
        return SampledTokens(tokens, logprobs, versions, stopped=stopped, top=top)

    def _stops(self, tokens: list[int], request: SampleRequest) -> bool:
        if request.stop is None:
            return bool(tokens[-1] == self._words.eos_token_id)
        if tokens[-1] in request.stop:
            return True
        text = self._words.decode(tokens)
        return any(isinstance(stop, str) and stop in text for stop in request.stop)


def _warmed(row: Tensor, request: SampleRequest) -> Tensor:
    """Logprobs of what is sampled from."""
    if request.temperature == 0:
        return row
    row = torch.log_softmax(row / request.temperature, dim=-1)
    if request.top_k > 0:
        least = row.topk(min(request.top_k, len(row))).values[-1]
        row = row.masked_fill(row < least, -torch.inf)
    if request.top_p < 1:
        ordered, order = row.exp().sort(descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= request.top_p
        row = row.index_fill(0, order[beyond], -torch.inf)
    final: Tensor = torch.log_softmax(row, dim=-1)
    return final


def _prompt_scores(scores: Tensor, request: SampleRequest, random: torch.Generator) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if request.prompt_logprobs:
        later = torch.tensor(request.prompt[1:])
        own = [float("nan"), *scores.gather(1, later[:, None])[:, 0].tolist()]
        first = len(own) - request.last_n if request.last_n else 0
        given["prompt_logprobs"] = [float("nan")] * first + own[first:]
    if request.topk_prompt:
        best = _best(scores, request.topk_prompt)
        blank = np.full((1, request.topk_prompt), np.nan, np.float32)
        given["topk_prompt"] = BestTokens(
            np.concatenate([np.zeros_like(best.token_ids[:1]), best.token_ids]), np.concatenate([blank, best.logprobs])
        )
    if request.targets is not None:
        asked = torch.from_numpy(request.targets)
        found = scores.gather(1, asked.clamp(min=0)).numpy()
        given["targets"] = np.where(request.targets != NO_TARGET, found, 0.0).astype(np.float32)
    if request.alternatives:
        warm = torch.softmax(scores / max(request.temperature, 1e-6), dim=-1)
        drawn = torch.multinomial(warm, request.alternatives, replacement=True, generator=random)
        given["alternatives"] = drawn.numpy(), scores.gather(1, drawn).numpy()
    return given


def _best(rows: Tensor, count: int) -> BestTokens:
    values, ids = rows.topk(count)
    return BestTokens(ids.int().numpy(), values.float().numpy())
