"""A training model that is all weights, against plain torch on the same model; beside adapters it cannot be."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_operations import AdamStep, AdapterShape, OperationError, OperationResult
from tests.learner.training.client_work import gradients_of, operation

WHOLE = AdapterShape(rank=0, seed=0)
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def trainer(tied_llama: Path) -> AdapterTrainer:
    return AdapterTrainer.open(tied_llama, name="tiny")


def loss_of(trainer: AdapterTrainer, name: str, seed: int, *, forward_only: bool = False) -> float:
    (result,) = trainer.run_round([operation(name, seed, forward_only=forward_only)])
    assert isinstance(result, OperationResult), result
    return result.metrics["loss:sum"]


def plain_loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    losses = []
    for datum in operation("", seed).data:
        logits = model(input_ids=torch.from_numpy(datum.token_ids)[None]).logits[0].float()
        target = torch.from_numpy(datum.inputs["target_tokens"])
        logprobs = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]
        losses.append(-(torch.from_numpy(datum.inputs["weights"]) * logprobs).sum())
    return torch.stack(losses).sum()


def test_losses_gradients_and_steps_are_those_of_plain_torch(trainer: AdapterTrainer, tied_llama: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tied_llama).float()
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=ADAM["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    trainer.create("whole", WHOLE)
    for seed in range(4):
        expected = plain_loss(plain, seed)
        optimizer.zero_grad()
        expected.backward()  # type: ignore[no-untyped-call]
        assert loss_of(trainer, "whole", seed) == pytest.approx(float(expected.detach()), rel=1e-5)
        found = gradients_of(trainer.state("whole"))
        wanted = {f"{name}.gradient": each.grad for name, each in plain.named_parameters()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert gradient is not None
            gap = np.linalg.norm(found[name] - gradient.numpy()) / np.linalg.norm(gradient.numpy())
            assert gap < 1e-4, name
        trainer.step(AdamStep("whole", **ADAM))
        optimizer.step()
    state = trainer.state("whole")
    for name, weight in plain.named_parameters():
        np.testing.assert_allclose(state[name], weight.detach().numpy(), rtol=0, atol=1e-5)


def test_transformers_loads_what_is_saved(trainer: AdapterTrainer, tmp_path: Path) -> None:
    trainer.create("whole", WHOLE)
    loss_of(trainer, "whole", 1)
    trainer.step(AdamStep("whole", learning_rate=1e-2))
    tensors, config = trainer.peft("whole")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).float()
    assert loss_of(trainer, "whole", 2, forward_only=True) == pytest.approx(
        float(plain_loss(saved, 2).detach()), rel=1e-5
    )


def test_a_restored_model_goes_on_bit_by_bit_and_the_base_comes_back(trainer: AdapterTrainer) -> None:
    trainer.create("adapter", AdapterShape(rank=4, seed=1))
    before = loss_of(trainer, "adapter", 3)
    trainer.remove("adapter")

    trainer.create("whole", WHOLE)
    loss_of(trainer, "whole", 1)
    trainer.step(AdamStep("whole", learning_rate=1e-2))
    loss_of(trainer, "whole", 2)
    parked = trainer.state("whole")
    trainer.step(AdamStep("whole", learning_rate=1e-2))
    went_on = trainer.state("whole")
    trainer.remove("whole")

    trainer.create("adapter", AdapterShape(rank=4, seed=1))
    assert loss_of(trainer, "adapter", 3) == before, "a base model that was trained"
    trainer.remove("adapter")

    trainer.restore("whole", WHOLE, parked)
    trainer.step(AdamStep("whole", learning_rate=1e-2))
    again = trainer.state("whole")
    assert {name: value.tobytes() for name, value in again.items()} == {
        name: value.tobytes() for name, value in went_on.items()
    }


def test_all_weights_have_no_adapters_beside_them(trainer: AdapterTrainer) -> None:
    trainer.create("adapter", AdapterShape(rank=4, seed=1))
    with pytest.raises(OperationError, match="all weights are trained by one training model at a time"):
        trainer.create("whole", WHOLE)
    trainer.remove("adapter")
    trainer.create("whole", WHOLE)
    with pytest.raises(OperationError, match="without adapters beside it: expected no other training model"):
        trainer.create("adapter", AdapterShape(rank=4, seed=1))
