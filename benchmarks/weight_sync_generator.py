"""The generator's side of `benchmarks/weight_sync.py`: a process that does as the lines on its standard input say.

    python -m benchmarks.weight_sync_generator FOLDER DTYPE DEVICE

Each line is JSON with `do` and its arguments; each answer a line of JSON that begins with `{"did"`.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.machine import peak_rss, rss
from benchmarks.soak.generator import install
from protocol.fleet import Prepare

if find_spec("vllm") is None:  # of which nothing is needed here but that it can be imported
    install()

from generator.weights import transfer
from generator.weights.transfer import GroupInfo, HeadwayTransferEngine

_TTL_S = 120.0
_POLL_S = 0.001


class LoadableModel(nn.Module):
    """A transformers model that takes weights as vLLM's models do: by name, a copy each."""

    def __init__(self, folder: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        with device:
            self.inner = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.own = {name: parameter.data for name, parameter in self.inner.named_parameters()}

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """Under the checkpoint's names."""
        return self.inner.named_parameters()

    def get_submodule(self, target: str) -> nn.Module:
        """As above."""
        found: nn.Module = self.inner.get_submodule(target)
        return found

    def get_parameter(self, target: str) -> nn.Parameter:
        """As above."""
        found: nn.Parameter = self.inner.get_parameter(target)
        return found

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The names that were loaded."""
        loaded = set()
        for name, value in weights:
            self.own[name].copy_(value)
            loaded.add(name)
        return loaded


class TransferEngineHost:
    """The real transfer engine, without vLLM's own part of a load."""

    def __init__(self, model: LoadableModel, device: torch.device) -> None:
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1), model_config=None
        )
        self._engine = HeadwayTransferEngine(config, config, device, model)
        self._model = model
        # A GPU works while the CPU waits.
        self._clock = time.process_time if device.type == "cpu" else time.perf_counter
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def answer(self, line: dict[str, Any]) -> dict[str, object]:
        """Does the work that a line asks for; returns its answer."""
        work = cast("Callable[..., dict[str, object]]", getattr(self, line.pop("do")))
        return work(**line)

    def meet_raw(self, url: str) -> dict[str, object]:
        """Joins the raw group, as rank 1."""
        dist.init_process_group("gloo", init_method=url, rank=1, world_size=2)
        return {}

    def room_for_raw(self, size: int) -> dict[str, object]:
        """Memory that has been written to, before the clock runs."""
        self._buffer = torch.zeros(size, dtype=torch.uint8).add_(1)
        return {}

    def raw(self, sizes: list[int]) -> dict[str, object]:
        """Receives by plain torch."""
        for size in sizes:
            dist.broadcast(self._buffer[:size], src=0)
        return {}

    def drop_raw(self) -> dict[str, object]:
        """Lets go of the raw buffer."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        return {}

    def join(self, spec: str) -> dict[str, object]:
        """Joins the learner's group."""
        self._engine.init_transfer_engine(GroupInfo(spec=spec))
        return self._ended()

    def stage(self, plan: str) -> dict[str, object]:
        """Receives and verifies; the peak counts from here."""
        rss()
        start = time.process_time()
        self._engine.stage(Prepare.model_validate_json(plan))
        return {**self._ended(), "cpu_s": time.process_time() - start}

    def stage_files(self, plan: str, paths: list[str]) -> dict[str, object]:
        """The same from files."""
        rss()
        start = time.process_time()
        self._engine.stage_files(Prepare.model_validate_json(plan), paths)
        return {**self._ended(), "cpu_s": time.process_time() - start}

    def load(self) -> dict[str, object]:
        """The load, within which serving is paused, and the fingerprint after it; seconds of CPU, or by the clock."""
        start = self._clock()
        self._engine.first_bucket(ttl_s=_TTL_S)
        self._engine.start_weight_update()
        self._engine.update_weights({})
        self._engine.finish_weight_update()
        loaded = self._clock()
        self._engine.begin_fingerprint()
        self._ended()
        hashed = self._clock()
        return {
            "load_s": loaded - start, "hash_s": hashed - loaded, "fingerprint": self._engine.fingerprint(),
            "peak": peak_rss(),
        }  # fmt: skip

    def copy(self) -> dict[str, object]:
        """Seconds of a plain copy of all weights from warm memory, a parameter at a time."""
        sources = {name: value.clone() for name, value in self._model.own.items()}
        start = self._clock()
        for name, value in sources.items():
            self._model.own[name].copy_(value)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {"copy_s": self._clock() - start}

    def _ended(self) -> dict[str, object]:
        while not self._engine.progress():
            time.sleep(_POLL_S)
        return {}


def main() -> None:
    """Answers until its standard input ends."""
    folder, dtype, device = sys.argv[1:]
    torch.set_num_threads(1)
    nothing = rss()
    where = torch.device(device)
    generator = TransferEngineHost(LoadableModel(folder, getattr(torch, dtype), where), where)
    print(json.dumps({"did": "start", "nothing": nothing}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        did = asked["do"]
        print(json.dumps({"did": did, **generator.answer(asked)}), flush=True)


if __name__ == "__main__":
    with mock.patch.multiple(
        transfer, initialize_layerwise_reload=mock.DEFAULT, finalize_layerwise_reload=mock.DEFAULT,
        _pack_heads_again=mock.DEFAULT, _forget_half_loaded_layers=mock.DEFAULT,
    ):  # fmt: skip
        main()
