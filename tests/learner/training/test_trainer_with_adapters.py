from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.batch import TrainSequence
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
        torch.testing.assert_close(ours, logprobs_of(export, [3, 4, 5, 6]), rtol=0, atol=1e-5)
    made.close()
    return losses


def test_dropout_of_adapters_is_of_training_alone(tied_llama: Path, commands: CommandChannel, tmp_path: Path) -> None:
    made = Trainer(
        tied_llama,
        algorithm=GrpoConfig(kl_coefficient=0.1),
        config=config_with(lora={**LORA, "dropout": 0.5}, temperature=1.0),
        ranks=Ranks(),
        commands=commands,
    )
    text = [3, 4, 5, 6]
    asked = TrainSequence.supervised(token_ids=np.array(text, dtype=np.int32), loss_mask=np.arange(4) > 0)
    made.train_step(random_sequences(16), version=0)
    before = torch.get_rng_state()
    first, again = made.probe_logprobs([text]), made.probe_logprobs([text])
    (told,), (of_reference,) = made.outputs([asked]), made.reference_logprobs([asked])
    assert torch.equal(torch.get_rng_state(), before), "no number was drawn"
    assert first == again
    made.export(tmp_path / "export")
    for folder, found in ((tmp_path / "export", first), (tmp_path / "export", told), (tied_llama, of_reference)):
        expected = logprobs_of(folder, text)
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs_of(tied_llama, text), logprobs_of(tmp_path / "export", text), atol=1e-3)
    made.train_step(random_sequences(16), version=1)
    assert not torch.equal(torch.get_rng_state(), before), "training drops as it did"
    made.close()


def logprobs_of(folder: Path, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.tensor([text])).logits[0]
    return torch.log_softmax(logits, dim=1)[torch.arange(len(text) - 1), text[1:]]


def test_a_trainer_of_adapters_exports_the_merged_model_and_is_held_by_its_reference(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    free = losses_of(tied_llama, commands, coefficient=0.0, export=tmp_path / "export")
    held = losses_of(tied_llama, commands, coefficient=5.0)
    # At first the policy is the reference, and the penalty 0; then it is positive.
    assert held[0] == pytest.approx(free[0], abs=1e-5)
    assert held[1] > free[1] + 1e-4
