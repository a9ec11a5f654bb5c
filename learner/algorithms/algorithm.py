"""An algorithm: its settings, and the preset that they make. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from learner.algorithms.knobs import (
    ClippedKnobs,
    CorrectionKnobs,
    KlKnobs,
    Knobs,
    PositiveKnobs,
    RewardKnobs,
    SampledKnobs,
    ScaleKnobs,
    StreamedKnobs,
)

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class Algorithm(Knobs):
    """The settings of an algorithm, told apart by `type`, made of the knobs of its parts.

    A knob that the other choices make useless is refused when it is given, and is left out when the model is dumped, so
    that a dumped config can always be read again.
    """

    learns_from_files: ClassVar[bool] = False
    """It learns from examples in files, and samples nothing."""
    greedy_baseline: ClassVar[bool] = False
    """It compares a group's rewards with that of an answer sampled at temperature 0."""
    of_groups: ClassVar[bool] = False
    """It makes of a group what it would make of it in any other step, unless a knob says otherwise."""
    unclipped: ClassVar[bool] = False
    """Nothing stops a token that a step's updates move: measured to lose what it had learned, where tokens were many
    updates old.
    """

    type: str

    @property
    def compares_in_group(self) -> bool:
        """It learns of a group from how its rewards differ, and nothing from rewards that are all equal."""
        return True

    @property
    def learns_from_rewards(self) -> bool:
        """Rewards say where it goes, at least in part."""
        return True

    @property
    def once_only(self) -> str:
        """Reason why a group is trained by one step only; empty where a later one may train it again."""
        if self.uses_teacher:
            return f"the teachers of algo {self.type} would be asked again for each of its tokens"
        if isinstance(self, RewardKnobs) and self.reward_normalisation != "none":
            return (
                f"algo.reward_normalisation is {self.reward_normalisation}, and the moments of all rewards so far "
                "would count those of a group again"
            )
        return ""

    @property
    def lost_to_age(self) -> str:
        """Reason why tokens of many updates ago took from it what it had learned, where that was measured; empty where
        they did not.
        """
        return f"algo {self.type} clips nothing within a step" if self.unclipped else ""

    @property
    def young_only(self) -> str:
        """Reason why no token that is older than all others may be is trained, even under a bound on the second moment
        of those; empty where they may.
        """
        if not isinstance(self, CorrectionKnobs) or not self.corrects:
            return f"algo {self.type} leaves out no tokens by their second moment"
        if self.correction == "none" and self.proximal != "behavior":
            return "algo.correction is none, and old tokens would count as if the present policy had sampled them"
        if self.divergence_limit is not None:
            return (
                "algo.divergence_limit leaves out tokens by their advantages, after their second moment was bounded, "
                "and that of the others may be above the limit"
            )
        return ""

    @property
    def whole_only(self) -> str:
        """Reason why tokens that are too old may not leave the loss by themselves; empty where they may."""
        if self.greedy_baseline:
            return f"the greedy answer of algo {self.type} would be older than what is known of who sampled it"
        if isinstance(self, RewardKnobs) and self.turn_discount < 1:
            return (
                f"algo.turn_discount is {self.turn_discount:g}, and of turns whose tokens are too old the rewards "
                "would come with others"
            )
        if getattr(self, "turn_rewards", False):
            return (
                "algo.turn_rewards is true, and of turns whose tokens are too old the last one would have the rewards"
            )
        return ""

    @property
    def whole_step(self) -> str:
        """Reason why nothing can be computed before all groups of a step are there; empty where each group can."""
        if not self.of_groups:
            return f"algo {self.type} looks at all groups of a step together"
        if self.uses_teacher:
            return f"the teachers of algo {self.type} are asked about a whole step"
        reasons = {
            "advantage_scale is batch, the deviation of all rewards of a step": isinstance(self, ScaleKnobs)
            and self.advantage_scale == "batch",
            "reward_normalisation goes by the moments of all rewards so far": isinstance(self, RewardKnobs)
            and self.reward_normalisation != "none",
            "kl_control is adaptive, and follows the divergence over a step": isinstance(self, KlKnobs)
            and self.kl_is_in_reward
            and self.kl_control == "adaptive",
            "positive_nll counts the good trajectories of a step": isinstance(self, PositiveKnobs)
            and self.positive_nll > 0,
            "self_normalise divides by the mean weight of a step": isinstance(self, CorrectionKnobs)
            and self.self_normalise,
            "second_moment_limit bounds a mean over a step": isinstance(self, CorrectionKnobs)
            and self.second_moment_limit is not None,
            "entropy_target goes by the entropy of a step": isinstance(self, SampledKnobs)
            and self.entropy_target is not None,
            "observation_weight weighs a mean over what environments said in a step": isinstance(self, SampledKnobs)
            and self.observation_weight > 0,
        }
        return next((f"algo.{reason}" for reason, applies in reasons.items() if applies), "")

    def preset(self) -> Preset:
        """The algorithm as the trainer sees it. Imports torch, which the settings alone do without."""
        raise NotImplementedError


class GroupAlgorithm(Algorithm, StreamedKnobs, ScaleKnobs):
    """An algorithm whose advantages compare the trajectories of a group."""

    of_groups: ClassVar[bool] = True


class ClippedGroupAlgorithm(Algorithm, ClippedKnobs, ScaleKnobs):
    """The same, under a clip of each token's ratio."""

    of_groups: ClassVar[bool] = True
