"""The algorithms by name. Loads no torch.

A new one is a file `presets/NAME.py` with its settings, a subclass of Algorithm, and its name in the list here.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from learner.algorithms.algorithm import Algorithm

_NAMES = (
    "grpo",
    "dr_grpo",
    "dapo",
    "clip_cov",
    "kl_cov",
    "max_rl",
    "pass_at_k",
    "gdpo",
    "gspo",
    "luspo",
    "gmpo",
    "sapo",
    "cispo",
    "topr",
    "kimi",
    "dro",
    "dppo",
    "vespo",
    "vcpo",
    "reinforce",
    "opo",
    "rae",
    "otb",
    "gvpo",
    "rloo",
    "remax",
    "reinforce_pp",
    "ppo",
    "gigpo",
    "hgpo",
    "treerl",
    "online_dpo",
    "best_of_k",
    "opd",
    "sft",
    "rm",
    "dpo",
    "distill",
    "custom",
)


def _settings_of(name: str) -> type[Algorithm]:
    """The one class of the algorithm's file that has its name as `type`."""
    there = vars(import_module(f"learner.algorithms.presets.{name}")).values()
    (found,) = (
        each
        for each in there
        if isinstance(each, type) and issubclass(each, Algorithm) and each.model_fields["type"].default == name
    )
    return found


ALGORITHMS = {name: _settings_of(name) for name in _NAMES}
STREAMED = tuple(each for name, each in ALGORITHMS.items() if not each.learns_from_files and name != "custom")
"""The algorithms that sample; a user's own may do either."""

if TYPE_CHECKING:
    AlgorithmConfig = Algorithm
else:
    AlgorithmConfig = Annotated[reduce(or_, ALGORITHMS.values()), Field(discriminator="type")]
