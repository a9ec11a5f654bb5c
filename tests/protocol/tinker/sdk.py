"""The interpreter that has the unmodified SDK, for tests that run programs with it."""

from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[3] / "build" / "tinker-sdk" / "bin" / "python"


def sdk_python() -> Path:
    """Skips the test if it is not there."""
    if not PYTHON.exists():
        pytest.skip("needs the Tinker SDK in an environment of its own: make tinker-sdk")
    return PYTHON
