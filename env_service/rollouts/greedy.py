"""A group's greedy answer: a conversation of its own beside the others, sampled at temperature 0, for what it is worth.

    opening ─┬─ the group's conversations, by the lease's sampling ─▶ trajectories
             └─ one more, at temperature 0 ────────────────────────▶ a reward, with its stamps

It is judged beside the others, never among those that a verifier compares, and is no trajectory of the group: its
tokens stay here.
"""

from collections.abc import Sequence
from dataclasses import replace

from env_service.environments.interface import OfferedEnvironment
from env_service.rollouts.completions import SilentProgress
from env_service.rollouts.conversation import Conversation, Speaker
from env_service.rollouts.outcomes import DataFailure, InfrastructureFailure
from protocol.messages import Lease, without_greedy_answer
from protocol.trajectories import GreedyBaseline, Trajectory


def refuse_without_greedy(lease: Lease, offered: OfferedEnvironment) -> None:
    """Raises DataFailure if the lease asks for a greedy answer, and there is none to tasks of this environment. The
    learner has been told at the hello that there is none, and grants no such lease.
    """
    if lease.greedy_baseline and offered.no_greedy_answer:
        raise DataFailure(without_greedy_answer(offered.no_greedy_answer))


def greedy(speaker: Speaker) -> Speaker:
    """The same speaker, at temperature 0. Generators are asked as for an evaluation, since none of it is trained.
    Nor does the age of its tokens hold up anything.
    """
    request = speaker.request
    sampling = request.sampling.model_copy(update={"temperature": 0.0})
    return replace(
        speaker,
        request=request.model_copy(update={"sampling": sampling, "purpose": "evaluate", "routed_experts": False}),
        progress=SilentProgress(speaker.progress),
    )


def set_apart(
    trajectories: Sequence[Trajectory], answer: Conversation
) -> tuple[tuple[Trajectory, ...], GreedyBaseline]:
    """The group's trajectories, and the record of the greedy answer, which is the last of those that had a turn.

    Raises InfrastructureFailure if it or all others had none.
    """
    if not answer.transcript.turns or len(trajectories) == 1:
        whose = "the greedy answer" if not answer.transcript.turns else "the group"
        raise InfrastructureFailure(f"{whose} had no turn within the time of a conversation")
    *others, last = trajectories
    baseline = GreedyBaseline(
        reward=last.reward,
        version_spans=last.version_spans,
        sampled_tokens=last.sampled_tokens,
        generator_ids=tuple(dict.fromkeys(name for turn in last.turns for name in turn.generator_ids)),
    )
    return tuple(others), baseline
