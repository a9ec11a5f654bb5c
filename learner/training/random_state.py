"""The random states of one rank, kept so that a resumed run draws what the former would have drawn."""

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_random_state(path: Path, *, device: torch.device) -> None:
    """Writes the states of torch (on the CPU, and on this rank's GPU), numpy and Python."""
    version, words, gauss = random.getstate()
    assert version == 3, "since Python 3.2"
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937", "numpy's global generator is always this one"
    tensors = {
        "torch": torch.get_rng_state(),
        "python_words": torch.tensor(words, dtype=torch.int64),
        "python_gauss": _optional(gauss),
        "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_place": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    save_file(tensors, path)


def load_random_state(path: Path, *, device: torch.device) -> None:
    """Takes up what `save_random_state` wrote for the same kind of device."""
    tensors = load_file(path)
    torch.set_rng_state(tensors["torch"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python_words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = tensors["numpy_place"].tolist()
    keys = tensors["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(tensors["numpy_gauss"])))
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], device)


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)
