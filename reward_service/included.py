"""The verifiers that come with the service, by name, and those that a configuration makes."""

import importlib.metadata
import logging
from collections.abc import Iterable
from dataclasses import replace

from reward_service.code.arguments import CodeArguments
from reward_service.code.code_judge import open_code
from reward_service.config import RewardServiceConfig
from reward_service.embeddings.verifier import embedding_verifier, encoder_verifier
from reward_service.endpoints.remote import remote_verifier
from reward_service.judges.judge import judge_verifier
from reward_service.reward_models.lane import reward_model_verifier
from reward_service.verifier.config import CustomVerifier
from reward_service.verifier.contract import Registry, Verifier
from reward_service.verifier.runners import in_workers, inline, on_event_loop
from reward_service.verifier.submission import load_function
from reward_service.verifiers.arguments import (
    JsonSchemaArguments,
    MathArguments,
    ReasoningGymArguments,
    SimilarityArguments,
)
from reward_service.verifiers.composite import CompositeArguments, open_composite
from reward_service.verifiers.ifeval.arguments import IfevalArguments
from reward_service.verifiers.lengths import LengthArguments, OverlongArguments, RepetitionArguments, length, overlong
from reward_service.verifiers.multiple_choice import MultipleChoiceArguments, multiple_choice
from reward_service.verifiers.numeric import NumericArguments, numeric
from reward_service.verifiers.patterns import (
    ExactMatchArguments,
    FormatArguments,
    RegexArguments,
    exact_match,
    well_formed,
)
from reward_service.verifiers.qa import QaArguments, qa

logger = logging.getLogger(__name__)

INCLUDED = (
    Verifier(
        name="code",
        version="1",
        description="The share of tests that the completion's program passes, run in a sandbox.",
        arguments=CodeArguments,
        open=open_code,
    ),
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
        name="format",
        version="1",
        description="1 when the completion has its tags, each once and in order, and its box, else 0, or a part.",
        arguments=FormatArguments,
        open=inline(well_formed),
    ),
    Verifier(
        name="ifeval",
        version="1",
        description="The share of IFEval's instructions that the completion follows, or whether it follows all.",
        arguments=IfevalArguments,
        open=in_workers("reward_service.verifiers.ifeval.checking:ifeval"),
        packages=("langdetect",),
    ),
    Verifier(
        name="json_schema",
        version="1",
        description="1 when the completion holds a JSON value that the schema allows, else 0, or a part.",
        arguments=JsonSchemaArguments,
        open=in_workers("reward_service.verifiers.json_schema:json_schema"),
        packages=("jsonschema",),
    ),
    Verifier(
        name="length",
        version="1",
        description="Full reward in a range of lengths, and less with the distance outside it.",
        arguments=LengthArguments,
        open=inline(length),
    ),
    Verifier(
        name="math",
        version="2",
        description="1 when the final answer (the last box or expression) equals a right one as mathematics.",
        arguments=MathArguments,
        open=in_workers("reward_service.verifiers.mathematics.math_answer:math_answer"),
        packages=("math-verify",),
    ),
    Verifier(
        name="multiple_choice",
        version="1",
        description="1 when the final statement names the right option and no other.",
        arguments=MultipleChoiceArguments,
        open=inline(multiple_choice),
    ),
    Verifier(
        name="numeric",
        version="1",
        description="1 when the final number is the right one within the tolerances.",
        arguments=NumericArguments,
        open=inline(numeric),
    ),
    Verifier(
        name="overlong",
        version="1",
        description="0, and from some length on a punishment that grows to -1 at the longest (DAPO).",
        arguments=OverlongArguments,
        open=inline(overlong),
    ),
    Verifier(
        name="qa",
        version="1",
        description="Whether a short answer in words is right: exactly, as a part, or by the F1 of its words.",
        arguments=QaArguments,
        open=inline(qa),
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
    Verifier(
        name="regex",
        version="1",
        description="The weighted share of patterns that the completion matches, or does not where they are forbidden.",
        arguments=RegexArguments,
        open=in_workers("reward_service.verifiers.patterns:regex"),
    ),
    Verifier(
        name="repetition",
        version="1",
        description="0 for a completion that does not repeat itself, down to -scale for one that does nothing else.",
        arguments=RepetitionArguments,
        open=in_workers("reward_service.verifiers.lengths:repetition"),
    ),
    Verifier(
        name="similarity",
        version="1",
        description="How close the completion is to references, from 0 to 1, by n-grams or edits.",
        arguments=SimilarityArguments,
        open=in_workers("reward_service.verifiers.similarity:similarity"),
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


def build_registry(config: RewardServiceConfig) -> Registry:
    """The verifiers that come with the service, and those of the configuration. Reads all of each reward model's files.

    Raises UserError.
    """
    return Registry([*_with_packages(INCLUDED), *configured(config)])


def _with_packages(verifiers: Iterable[Verifier]) -> Iterable[Verifier]:
    """Those whose packages are installed; the packages' versions become part of theirs."""
    for verifier in verifiers:
        try:
            parts = [f"{package}-{importlib.metadata.version(package)}" for package in verifier.packages]
        except importlib.metadata.PackageNotFoundError as error:
            logger.warning(
                "verifier %s is not offered: %s is missing; pip install 'headway[reward]'", verifier.name, error.name
            )
            continue
        yield replace(verifier, version="+".join([verifier.version, *parts]))
