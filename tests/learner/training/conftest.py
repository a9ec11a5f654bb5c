from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner.training.ranks import CommandChannel, Ranks, close_process_group, open_process_group
from tests.learner.training.tiny_model import write_tiny_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def tiny_llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), tied=request.param)


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), tied=True)


# DeepSpeed remembers the first process group that it sees: a process has one, for as long as it lives.
@pytest.fixture(scope="session")
def commands() -> Iterator[CommandChannel]:
    yield open_process_group(Ranks(), timeout_s=30)
    close_process_group()
