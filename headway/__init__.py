"""The umbrella command: all four processes on one machine, evaluation, keys, and the doctor. And from Python:

headway.train("run.toml"), headway.evaluate("run.toml"), headway.rewards.for_trl("math")
"""

import importlib
from typing import TYPE_CHECKING

from headway.library import Run, RunFailed, evaluate, train

if TYPE_CHECKING:
    from headway import rewards

__all__ = ["Run", "RunFailed", "evaluate", "rewards", "train"]


def __getattr__(name: str) -> object:
    """`rewards` at its first use: it loads the reward service."""
    if name == "rewards":
        return importlib.import_module("headway.rewards")
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
