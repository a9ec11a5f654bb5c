from pathlib import Path

import pytest
import torch

from tests.learner.training.tiny_model import write_tiny_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def tiny_llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), tied=request.param)


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), tied=True)
