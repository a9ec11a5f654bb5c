"""Results of agents, however they are given: returned, posted, or printed as the last line.

0.5                                            the trajectory's reward
{"reward": 1.0, "rewards": [0.0, 0.5]}         besides, one for each completion, in the order of the requests
{"rewards": {"chatcmpl-…-2": 0.5}}             or by the completion's id; the others have 0
"""

import json
import math
from typing import Annotated

from pydantic import Field, JsonValue, ValidationError

from env_service.environments.interface import AgentResult, EnvironmentFailed, Verification
from env_service.rollouts.conversation import Nonsense, check_fields
from env_service.rollouts.outcomes import in_whole_characters
from protocol.codec import describe
from protocol.model import WireModel
from services.user_code import number_of

MAX_COMPLETIONS = 1024
"""Of a session."""
_Number = Annotated[float, Field(allow_inf_nan=False)]


class RewardPosted(WireModel):
    """`POST /v1/sessions/{id}/reward`: the reward, or the verifier that gives it; what ends the session."""

    reward: float | None = Field(
        None,
        allow_inf_nan=False,
        description="the trajectory's reward; a verifier's and those of completions are added",
    )
    rewards: Annotated[list[_Number], Field(max_length=MAX_COMPLETIONS)] | dict[str, _Number] = Field(
        default_factory=list,
        description="of each completion, in the order of the requests, or by its id; added to the trajectory's",
    )
    metrics: dict[str, float] = Field(default_factory=dict, max_length=64)
    stop: str = Field("finished", min_length=1, max_length=64, description="why it ended, in a word")
    verifier: str | None = Field(None, min_length=1, max_length=256)
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    answer: str | None = Field(
        None,
        max_length=1 << 20,
        description="what the verifier judges; if not given, what the policy said last",
    )

    def result(self) -> AgentResult:
        """The same, as an agent returns it."""
        verification = None if self.verifier is None else Verification(self.verifier, self.arguments)
        return AgentResult(
            reward=self.reward,
            rewards=self.rewards,
            metrics=self.metrics,
            stop=self.stop,
            verification=verification,
            answer=self.answer,
        )


def result_in(line: str) -> AgentResult | float | None:
    """Read the last line of a program's output; None if it is neither a number nor an object with rewards.

    Raises EnvironmentFailed for an object that has rewards and cannot be read.
    """
    try:
        return float(line)
    except ValueError:
        pass
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not said.keys() & {"reward", "rewards"}:
        return None
    try:
        return RewardPosted.model_validate(said).result()
    except ValidationError as error:
        text = f"the last line of the agent's output is no reward: {describe(error)}"
        raise EnvironmentFailed("nonsense", text) from error


def checked_result(returned: object) -> AgentResult:
    """The result, if it is one. Raises Nonsense."""
    reward = number_of(returned)
    if reward is not None:
        returned = AgentResult(reward)
    if not isinstance(returned, AgentResult):
        raise Nonsense(f"the agent returned {type(returned).__name__}, expected its reward or an AgentResult")
    rewards = returned.rewards
    if not isinstance(rewards, dict | list | tuple):
        raise Nonsense(f"the agent gives {type(rewards).__name__} as its rewards, expected a list, or a dict by id")
    if returned.reward is None and returned.verification is None and not rewards:
        raise Nonsense("the agent ended without a reward; expected `reward`, `rewards` of completions, or a verifier")
    each = rewards.items() if isinstance(rewards, dict) else enumerate(rewards)
    of_completions = ((f"reward of completion {which}", number) for which, number in each)
    whole = () if returned.reward is None else (("reward", returned.reward),)
    for name in (returned.stop, *returned.metrics):
        if not isinstance(name, str) or in_whole_characters(name) != name:
            raise Nonsense(
                f"the agent gives {name!r} as its stop or a metric's name, expected text of whole characters"
            )
    for name, given in (*whole, *returned.metrics.items(), *of_completions):
        plain = number_of(given)
        if plain is None or not math.isfinite(plain):
            raise Nonsense(f"the agent gives {given!r} as its {name}, expected a finite number")
    if not isinstance(returned.answer, str | None):
        raise Nonsense(f"the agent gives {type(returned.answer).__name__} as its answer, expected text")
    check_fields(returned, "verification")
    return returned
