"""Interpreters that have harnesses, for tests that run programs with them."""

from pathlib import Path

import pytest

from env_service.harnesses.catalog import HarnessName, python_of
from env_service.harnesses.installing import is_installed

FOLDER = Path(__file__).parents[3] / "build" / "harnesses"


def python_with(name: HarnessName) -> Path:
    """Skips the test if the harness is not there."""
    if not is_installed(name, folder=FOLDER):
        pytest.skip(f"needs {name} in an environment of its own: make harnesses")
    return python_of(name, installed=FOLDER)
