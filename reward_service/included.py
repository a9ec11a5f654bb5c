"""The verifiers that come with the service, by name, and those that a configuration makes."""

from collections.abc import Iterable

from reward_service.composite import CompositeArguments, open_composite
from reward_service.config import CustomVerifier, RewardServiceConfig
from reward_service.embeddings.verifier import embedding_verifier, encoder_verifier
from reward_service.judges.verifier import judge_verifier
from reward_service.lanes.contract import Verifier
from reward_service.lanes.event_loop import on_event_loop
from reward_service.lanes.inline import inline
from reward_service.lanes.workers import in_workers
from reward_service.remote.verifier import remote_verifier
from reward_service.reward_models.verifier import reward_model_verifier
from reward_service.verifier import load_function
from reward_service.verifiers.arguments import MathArguments, ReasoningGymArguments
from reward_service.verifiers.exact_match import ExactMatchArguments, exact_match

INCLUDED = (
    Verifier(
        name="composite",
        version="1",
        description="A reward made of other verifiers' rewards: weights, gates, and one combination of them.",
        arguments=CompositeArguments,
        open=open_composite,
    ),
    Verifier(
        name="exact_match",
        version="1",
        description="1 when the completion equals the answer, else 0.",
        arguments=ExactMatchArguments,
        open=inline(exact_match),
    ),
    Verifier(
        name="math",
        version="1",
        description="1 when the final answer (the last box or expression) equals the right one as mathematics.",
        arguments=MathArguments,
        open=in_workers("reward_service.verifiers.math_answer:math_answer"),
        packages=("math-verify",),
    ),
    Verifier(
        name="reasoning_gym",
        version="1",
        description="What the reasoning-gym dataset's own scorer gives to the extracted answer.",
        arguments=ReasoningGymArguments,
        open=in_workers(
            "reward_service.verifiers.reasoning_gym:sandboxed_score",
            unsafe="reward_service.verifiers.reasoning_gym:unsafe_score",
        ),
        packages=("reasoning-gym",),
    ),
)


def configured(config: RewardServiceConfig) -> Iterable[Verifier]:
    """The verifiers that the configuration makes. Raises UserError for one that cannot be loaded."""
    yield from map(_custom, config.verifiers)
    yield from map(reward_model_verifier, config.reward_models)
    yield from map(embedding_verifier, config.embeddings)
    yield from map(encoder_verifier, config.encoders)
    yield from map(judge_verifier, config.judges)
    yield from map(remote_verifier, config.remotes)


def _custom(given: CustomVerifier) -> Verifier:
    loaded = load_function(given.function)
    return Verifier(
        name=given.name,
        version=given.version,
        description=loaded.description,
        arguments=loaded.arguments,
        open=on_event_loop(loaded.coroutine) if loaded.coroutine else in_workers(given.function, trusted=True),
    )
