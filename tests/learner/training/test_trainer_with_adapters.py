from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import LORA, config_with
from tests.learner.training.tiny_model import random_sequences


def losses_of(path: Path, commands: CommandChannel, *, coefficient: float, export: Path | None = None) -> list[float]:
    made = Trainer(
        path,
        algorithm=GrpoConfig(kl_coefficient=coefficient),
        config=config_with(lora=LORA, temperature=1.0),
        ranks=Ranks(),
        commands=commands,
    )
    losses = [made.train_step(random_sequences(16), version=number).loss for number in range(3)]
    if export is not None:
        made.export(export)
        ours = torch.tensor(made.probe_logprobs([[3, 4, 5, 6]]))
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(export)(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0]
        expected = torch.log_softmax(logits, dim=1)[torch.arange(3), [4, 5, 6]]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    made.close()
    return losses


def test_a_trainer_of_adapters_exports_the_merged_model_and_is_held_by_its_reference(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    free = losses_of(tied_llama, commands, coefficient=0.0, export=tmp_path / "export")
    held = losses_of(tied_llama, commands, coefficient=5.0)
    # At first the policy is the reference, and the penalty 0; then it is positive.
    assert held[0] == pytest.approx(free[0], abs=1e-5)
    assert held[1] > free[1] + 1e-4
