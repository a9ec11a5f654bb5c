"""An algorithm of a user's own, by its import path."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import AggregationKnobs
from services.process import WrongSettings
from services.user_code import in_a_sentence

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class AlgorithmNotFound(WrongSettings, ValueError):
    """The algorithm of a user's own cannot be had from where the config says."""


class CustomConfig(Algorithm, AggregationKnobs):
    """An algorithm of your own: a function from `options` to a Preset, named by import path."""

    type: Literal["custom"] = "custom"
    path: str = Field(description="The function, as package.module:function.", pattern=r"^[\w.]+:\w+$")
    options: dict[str, float | int | bool | str] = Field(
        default_factory=dict, description="Keyword arguments of the function."
    )

    @property
    def uses_reference(self) -> bool:
        return True  # whatever it is, it may

    def preset(self) -> Preset:
        """Calls the function. Raises AlgorithmNotFound."""
        from learner.algorithms.preset import Preset

        module, _, name = self.path.partition(":")
        try:
            build = getattr(importlib.import_module(module), name)
            preset = build(**self.options)
        except (Exception, SystemExit) as error:
            raise AlgorithmNotFound(
                f"algo.path is {self.path!r} and algo.options {self.options}: {in_a_sentence(error)}; expected "
                "a function of these options, in a module that can be imported, that returns a Preset"
            ) from error
        if not isinstance(preset, Preset):
            raise AlgorithmNotFound(
                f"algo.path is {self.path!r}, which returned {type(preset).__name__}; expected a Preset of "
                "learner.algorithms.preset"
            )
        if preset.greedy_baseline:
            raise AlgorithmNotFound(
                f"algo.path is {self.path!r}, whose Preset has greedy_baseline: greedy answers are sampled for remax "
                "alone; leave it out"
            )
        return preset
