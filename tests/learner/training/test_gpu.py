"""The same code on a GPU in bfloat16: what it computes is what a CPU computes, and its memory is bounded."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from benchmarks.learner_gpu import Workload, measure
from benchmarks.learner_shapes import SHAPES, QwenShape, write_random_model
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training import varlen
from learner.training.attention import build_packed_index
from learner.training.batch import TrainSequence, flatten
from learner.training.config import TrainingConfig
from learner.training.packing import pack, shared_prefixes
from learner.training.policy import PolicyModel, load_causal_lm
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import load_policy
from tests.learner.training.test_varlen import row_of, run
from tests.learner.training.tiny_model import random_sequences

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
OPTIMIZER = {"learning_rate": 1e-2, "epsilon": 1e-4}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def logprobs(policy: PolicyModel, sequences: list[TrainSequence], device: str) -> torch.Tensor:
    batch = flatten(sequences)
    row = pack(batch, np.arange(len(sequences)), prefixes=shared_prefixes(batch)).to(torch.device(device))
    with torch.no_grad():
        found: torch.Tensor = policy.to(device)(row)[0]
    return found.float().cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_gpu_gives_the_logprobs_that_a_cpu_gives(
    tiny_llama: Path, dtype: Literal["float32", "bfloat16"], tolerance: float
) -> None:
    sequences = random_sequences(16)
    on_cpu = logprobs(load_policy(tiny_llama, TrainingConfig()), sequences, "cpu")
    on_gpu = logprobs(load_policy(tiny_llama, TrainingConfig(dtype=dtype)), sequences, "cuda")
    torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=tolerance)


ALGORITHMS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"type": "grpo", "kl_coefficient": 0.1}, {"updates_per_step": 2}),
    ({"type": "ppo", "kl_coefficient": 0.1}, {}),
    ({"type": "ppo"}, {"critic": {"kind": "head", "trunk_gradient": 0.5, "optimizer": OPTIMIZER}}),
    ({"type": "reinforce_pp", "kl_coefficient": 0.1, "kl_control": "adaptive"}, {"zero_stage": 2}),
    ({"type": "sft"}, {"zero_stage": 3, "gradient_checkpointing": True}),
]


@pytest.mark.parametrize(("algo", "training"), ALGORITHMS, ids=[str(algo["type"]) for algo, _ in ALGORITHMS])
def test_a_run_in_bfloat16_trains_and_goes_on_from_its_checkpoint(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path, algo: dict[str, object], training: dict[str, object]
) -> None:
    config = TrainingConfig.model_validate({"optimizer": OPTIMIZER, "dtype": "bfloat16", **training})

    def trainer() -> Trainer:
        return Trainer(
            tied_llama, algorithm=ADAPTER.validate_python(algo), config=config, ranks=Ranks(), commands=commands
        )

    batch = random_sequences(16)
    made = trainer()
    before = made.host_copy()
    first = made.train_step(batch, version=0)
    assert np.isfinite([first.loss, first.grad_norm]).all()
    changed = made.host_copy()
    assert any(not torch.equal(a.value, b.value) for a, b in zip(before.tensors, changed.tensors, strict=True))
    assert all(tensor.value.device.type == "cpu" for tensor in changed.tensors)
    made.save(tmp_path)
    second = made.train_step(batch, version=1)
    made.close()
    again = trainer()
    again.load(tmp_path)
    repeated = again.train_step(batch, version=1)
    again.close()
    assert repeated.loss == pytest.approx(second.loss, abs=1e-2)


def test_a_step_over_8192_tokens_never_holds_a_logit_of_every_token_and_every_word(
    commands: CommandChannel, tmp_path: Path
) -> None:
    # The plain way holds at least the logits of all tokens in bfloat16: 8192 x 150,000 x 2 bytes, 2.4 GB.
    shape = QwenShape("wide", hidden=32, layers=1, heads=4, key_value_heads=2, intermediate=64, vocabulary=150_000)
    model = write_random_model(shape, tmp_path)
    draw = np.random.default_rng(0)
    batch = [
        TrainSequence.supervised(
            token_ids=draw.integers(3, shape.vocabulary, 1024).astype(np.int32), loss_mask=np.arange(1024) > 0
        )
        for _ in range(8)
    ]
    config = TrainingConfig.model_validate({"dtype": "bfloat16", "microbatch_tokens": 8192})
    made = Trainer(
        model, algorithm=ADAPTER.validate_python({"type": "sft"}), config=config, ranks=Ranks(), commands=commands
    )
    made.train_step(batch, version=0)
    torch.cuda.reset_peak_memory_stats()
    standing = torch.cuda.memory_allocated()
    assert made.train_step(batch, version=1).microbatches == 1
    made.close()
    assert torch.cuda.max_memory_allocated() - standing < 1.5e9


def test_the_benchmark_runs_in_bfloat16(commands: CommandChannel) -> None:
    workload = Workload(dtype="bfloat16", pack_tokens=256, sequences=8, longest=128, steps=2, tflops=989.0)
    rows = measure(SHAPES["tiny"], workload, commands=commands)
    assert all(row.peak_memory_gib is not None and row.peak_memory_gib > 0 for row in rows)


def test_a_model_is_loaded_in_the_type_asked_for(tied_llama: Path) -> None:
    loaded = load_causal_lm(tied_llama, dtype=torch.bfloat16).to("cuda")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


LENGTHS = ((300, 41, 512), 0), ((200, 200, 331, 90), 64)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("lengths", "shared"), LENGTHS, ids=["apart", "with a prompt in common"])
def test_attention_in_one_call_is_that_of_rectangles(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], shared: int, window: int | None
) -> None:
    rows, tokens = row_of(list(lengths), shared=shared)
    index = build_packed_index(rows, tokens=tokens).to(torch.device("cuda"))
    drawn = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(1, tokens, heads, 64, generator=drawn, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (8, 2, 2)
    ]
    inputs.append(torch.randn(1, tokens, 8, 64, generator=drawn, device="cuda", dtype=torch.bfloat16))
    assert varlen.kernel_taking(inputs[0][0].transpose(0, 1), inputs[2][0].transpose(0, 1)) is not None
    found = run(index, inputs, window=window)
    monkeypatch.setattr(varlen, "kernel_taking", lambda query, value: None)
    expected = run(index, inputs, window=window)
    for one, other in zip(found, expected, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 0.01


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}], ids=["all", "checkpointing", "adapters"]
)
def test_compiled_layers_give_the_losses_of_layers_as_they_are_written(
    tied_llama: Path, commands: CommandChannel, changes: dict[str, object]
) -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(5)
        config = TrainingConfig.model_validate(
            {"optimizer": OPTIMIZER, "dtype": "bfloat16", "compile": compiled, **changes}
        )
        made = Trainer(
            tied_llama,
            algorithm=ADAPTER.validate_python({"type": "grpo"}),
            config=config,
            ranks=Ranks(),
            commands=commands,
        )
        losses.append([made.train_step(random_sequences(count), version=0).loss for count in (16, 8, 12)])
        made.close()
    assert losses[1] == pytest.approx(losses[0], abs=2e-2)
