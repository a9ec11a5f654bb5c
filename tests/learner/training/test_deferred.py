from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training import deferred
from learner.training.config import TrainingConfig
from learner.training.deferred import DeferredFiles, copied
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.training.tiny_model import random_sequences

EMA = {"mode": "ema", "decay": 0.5}


def test_a_deferred_file_holds_what_there_was_when_it_was_put(tmp_path: Path) -> None:
    weight = torch.ones(3)
    state = {"weights": [weight, (weight,)], "step": 4}
    files = DeferredFiles()
    files.put(torch.save, state, tmp_path / "state.pt")
    weight.zero_()
    state["step"] = 5
    assert not any(tmp_path.iterdir())
    assert files.write() is None
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found["step"] == 4
    assert found["weights"][0].tolist() == found["weights"][1][0].tolist() == [1.0, 1.0, 1.0]


def test_what_is_one_tensor_is_copied_once() -> None:
    flat = torch.arange(6.0)
    first, second = flat[:3], flat[3:]
    copies = copied({"tied": first, "again": flat[:3], "other": second}, {})
    assert copies["tied"] is copies["again"]
    assert copies["tied"].untyped_storage().nbytes() == first.nbytes
    assert copies["other"].tolist() == [3.0, 4.0, 5.0]


def test_a_file_that_there_is_no_room_for_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "available_memory", lambda: 12)
    files = DeferredFiles()
    files.put(torch.save, {"weight": torch.ones(3)}, tmp_path / "now.pt")  # a copy of 12 bytes leaves nothing
    assert (tmp_path / "now.pt").exists()
    assert files.bytes == 0


def test_ranks_that_copy_at_once_need_room_for_all_of_their_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of 12 bytes and a quarter to spare, of two ranks: 30."""
    for available, there in ((29, True), (30, False)):
        monkeypatch.setattr(deferred, "available_memory", lambda available=available: available)
        files = DeferredFiles(copying=2)
        files.put(torch.save, {"weight": torch.ones(3)}, tmp_path / f"{available}.pt")
        assert (tmp_path / f"{available}.pt").exists() == there


def test_a_disk_that_is_full_is_told_and_nothing_more_is_written(tmp_path: Path) -> None:
    files = DeferredFiles()
    for folder in ("missing", "."):
        files.put(torch.save, {"weight": torch.ones(3)}, tmp_path / folder / "state.pt")
    error = files.write()
    assert isinstance(error, OSError)
    assert "cannot be written" in str(error)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "float32")])
def test_a_save_beside_training_has_the_state_of_its_beginning(
    stage: int, dtype: str, tiny_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    config = TrainingConfig.model_validate(
        {
            "zero_stage": stage,
            "dtype": dtype,
            "publish_dtype": dtype,
            "reference": EMA,
            "optimizer": {"learning_rate": 0.01},
        }
    )
    trainer = Trainer(
        tiny_llama, algorithm=GrpoConfig(kl_coefficient=0.1), config=config, ranks=Ranks(), commands=commands
    )
    trainer.train_step(random_sequences(8, seed=1), version=0)
    trainer.save(tmp_path / "then")
    finish = trainer.begin_save(tmp_path / "beside")
    trainer.train_step(random_sequences(8, seed=2), version=1)
    finish()
    assert files_below(tmp_path / "beside") == files_below(tmp_path / "then")
    trained = weights(trainer)
    for folder in ("beside", "then"):
        trainer.load(tmp_path / folder)
        assert not all(torch.equal(value, trained[name]) for name, value in weights(trainer).items())
        trainer.train_step(random_sequences(8, seed=2), version=1)
        for name, value in weights(trainer).items():
            torch.testing.assert_close(value, trained[name], rtol=0, atol=0)
    for name, value in load_file(tmp_path / "then" / "reference.safetensors").items():
        assert torch.equal(load_file(tmp_path / "beside" / "reference.safetensors")[name], value)
    trainer.close()


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {tensor.name: tensor.value for tensor in trainer.host_copy().tensors}
