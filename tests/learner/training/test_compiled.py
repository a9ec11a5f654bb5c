"""Layers that torch compiled: the same steps, and a refusal by name of what cannot be compiled."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from learner.algorithms.presets.registry import AlgorithmConfig
from learner.training.compiled import check_compilable
from learner.training.config import TrainingConfig
from learner.training.policy import load_causal_lm
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.tiny_model import random_sequences
from tests.learner.training.tiny_models import write_tiny_model

ALGORITHM: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _of_a_learner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of a model under ZeRO-3, for which DeepSpeed replaces a function, and of an eager generator."""
    monkeypatch.setattr(nn.functional, "linear", torch._C._nn.linear)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


def trained(path: Path, commands: CommandChannel, *, algo: str = "grpo", **changes: object) -> dict[str, torch.Tensor]:
    """The weights after two steps over rows of different lengths."""
    algorithm = ALGORITHM.validate_python({"type": algo, "kl_coefficient": 0.1})
    torch.manual_seed(5)
    config = TrainingConfig.model_validate({"optimizer": {"learning_rate": 1e-2, "epsilon": 1e-3}, **changes})
    trainer = Trainer(path, algorithm=algorithm, config=config, ranks=Ranks(), commands=commands)
    for version, count in enumerate((16, 8)):
        trainer.train_step(random_sequences(count), version=version)
    weights = {tensor.name: tensor.value.clone() for tensor in trainer.host_copy().tensors}
    trainer.close()
    return weights


# Of torch's own tracer, which turns it off where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        pytest.param({}, "inductor", id="all weights"),
        # Traced alike, and then run as torch's own kernels, which need no compiler's time.
        pytest.param({"lora": {"rank": 4}, "gradient_checkpointing": True}, "aot_eager", id="adapters"),
        pytest.param({"algo": "ppo"}, "eager", id="policy and critic"),
    ],
)
def test_compiled_layers_take_the_same_steps(
    tied_llama: Path,
    commands: CommandChannel,
    changes: dict[str, Any],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_written = trained(tied_llama, commands, **changes)
    compiles = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **how: compiles(layer, backend=backend, **how))
    torch._dynamo.utils.counters.clear()
    found = trained(tied_llama, commands, compile=True, **changes)
    assert found.keys() == as_written.keys()
    for name, value in as_written.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    # One break a layer's attention, and none for another reason.
    assert all("torch.compiler.disable" in reason for reason in torch._dynamo.utils.counters["graph_break"])


def wrong_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """A compiler whose every number is a tenth too large."""

    def run(*given: object) -> tuple[object, ...]:
        return tuple(each * 1.1 if isinstance(each, torch.Tensor) else each for each in graph(*given))

    return run


def wrong_in_training(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """The same of passes with a gradient alone."""
    return wrong_backend(graph, inputs) if torch.is_grad_enabled() else graph


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("backend", "what"), [(wrong_backend, "numbers"), (wrong_in_training, "gradients")])
def test_layers_that_give_others_when_compiled_are_refused(
    tied_llama: Path,
    commands: CommandChannel,
    monkeypatch: pytest.MonkeyPatch,
    backend: Callable[..., object],
    what: str,
) -> None:
    compiles = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **how: compiles(layer, backend=backend, **how))
    with pytest.raises(ValueError, match=f"computes other {what} when it is compiled.*Leave learner.training.compile"):
        trained(tied_llama, commands, compile=True)


@pytest.mark.parametrize(
    ("name", "packed", "said"), [("qwen3 moe", True, "has experts"), ("lfm2", False, "takes no packed rows")]
)
def test_models_that_are_not_compiled_are_refused(
    commands: CommandChannel, tmp_path: Path, name: str, packed: bool, said: str
) -> None:
    model = load_causal_lm(write_tiny_model(name, tmp_path / "model"), dtype=torch.float32)
    with pytest.raises(ValueError, match=f"learner.training.compile is true, and .*{said}"):
        check_compilable(model, tmp_path, packed=packed, experts=packed, device=CPU)


@pytest.mark.parametrize(("device", "missing"), [("cpu", "g[+][+]"), ("cuda", "gcc")])
def test_a_machine_without_a_compiler_is_told(
    tied_llama: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch, device: str, missing: str
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    model = load_causal_lm(tied_llama, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"compiles kernels by {missing}, which is not here: expected it in PATH"):
        check_compilable(model, tied_llama, packed=True, experts=False, device=torch.device(device))


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_an_environment_in_which_torch_compiles_nothing_is_told(
    tied_llama: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=rf"rank 0 has .*{name}.* set to 1, by which torch compiles nothing"):
        trained(tied_llama, commands, compile=True)


def test_a_compiler_of_ones_own_is_the_first_word_of_its_variable(
    tied_llama: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(tied_llama, dtype=torch.float32)
    monkeypatch.setenv("CC", f"{sys.executable} gcc")
    check_compilable(model, tied_llama, packed=True, experts=False, device=torch.device("cuda"))
    monkeypatch.setenv("CC", "not-there gcc")
    with pytest.raises(ValueError, match="compiles kernels by not-there, which is not here"):
        check_compilable(model, tied_llama, packed=True, experts=False, device=torch.device("cuda"))


def test_sharded_parameters_are_not_compiled() -> None:
    with pytest.raises(ValidationError, match="compile is true and zero_stage is 3"):
        TrainingConfig(compile=True, zero_stage=3)
