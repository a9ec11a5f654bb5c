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
from reward_service.models.reward_model import reward_model_verifier
from reward_service.verifier.config import CustomVerifier
from reward_service.verifier.lanes import Registry, Verifier, in_user_loop, in_workers, inline
from reward_service.verifier.submission import load_function
from reward_service.verifiers.arguments import (
    JsonSchemaArguments,
    MathArguments,
    ReasoningGymArguments,
    SimilarityArguments,
)
from reward_service.verifiers.composite import CompositeArguments, open_composite
from reward_service.verifiers.ifeval.checking import IfevalArguments
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

_OURS = "reward_service.verifiers"

INCLUDED = (
    Verifier(
        name="code",
        version="2",
        arguments=CodeArguments,
        open=open_code,
        description="The share of tests that the completion's program passes, run in a sandbox.",
    ),
    Verifier(
        name="composite",
        version="1",
        arguments=CompositeArguments,
        open=open_composite,
        description="A reward made of other verifiers' rewards: weights, gates, and one combination of them.",
    ),
    Verifier(
        name="exact_match",
        version="1",
        arguments=ExactMatchArguments,
        open=inline(exact_match),
        description="1 when the completion equals the answer, else 0.",
    ),
    Verifier(
        name="format",
        version="1",
        arguments=FormatArguments,
        open=inline(well_formed),
        description="1 when the completion has its tags, each once and in order, and its box, else 0, or a part.",
    ),
    Verifier(
        name="ifeval",
        version="1",
        arguments=IfevalArguments,
        open=in_workers(f"{_OURS}.ifeval.checking:ifeval"),
        packages=("langdetect",),
        description="The share of IFEval's instructions that the completion follows, or whether it follows all.",
    ),
    Verifier(
        name="json_schema",
        version="2",
        arguments=JsonSchemaArguments,
        open=in_workers(f"{_OURS}.json_schema:json_schema"),
        packages=("jsonschema",),
        description="1 when the completion holds a JSON value that the schema allows, else 0, or a part.",
    ),
    Verifier(
        name="length",
        version="1",
        arguments=LengthArguments,
        open=inline(length),
        description="Full reward in a range of lengths, and less with the distance outside it.",
    ),
    Verifier(
        name="math",
        version="6",
        arguments=MathArguments,
        open=in_workers(f"{_OURS}.mathematics.math_answer:math_answer"),
        packages=("math-verify",),
        description="1 when the final answer (the last box or expression) equals a right one as mathematics.",
    ),
    Verifier(
        name="multiple_choice",
        version="3",
        arguments=MultipleChoiceArguments,
        open=inline(multiple_choice),
        description="1 when the final statement names the right option and no other.",
    ),
    Verifier(
        name="numeric",
        version="3",
        arguments=NumericArguments,
        open=inline(numeric),
        description="1 when the final number is the right one within the tolerances.",
    ),
    Verifier(
        name="overlong",
        version="1",
        arguments=OverlongArguments,
        open=inline(overlong),
        description="0, and from some length on a punishment that grows to -1 at the longest (DAPO).",
    ),
    Verifier(
        name="qa",
        version="3",
        arguments=QaArguments,
        open=inline(qa),
        description="Whether a short answer in words is right: exactly, as a part, or by the F1 of its words.",
    ),
    Verifier(
        name="reasoning_gym",
        version="1",
        arguments=ReasoningGymArguments,
        open=in_workers(f"{_OURS}.reasoning_gym:sandboxed_score", unsafe=f"{_OURS}.reasoning_gym:unsafe_score"),
        packages=("reasoning-gym",),
        description="What the reasoning-gym dataset's own scorer gives to the extracted answer.",
    ),
    Verifier(
        name="regex",
        version="1",
        arguments=RegexArguments,
        open=in_workers(f"{_OURS}.patterns:regex"),
        description="The weighted share of patterns that the completion matches, or does not where they are forbidden.",
    ),
    Verifier(
        name="repetition",
        version="1",
        arguments=RepetitionArguments,
        open=in_workers(f"{_OURS}.lengths:repetition"),
        description="0 for a completion that does not repeat itself, down to -scale for one that does nothing else.",
    ),
    Verifier(
        name="similarity",
        version="1",
        arguments=SimilarityArguments,
        open=in_workers(f"{_OURS}.similarity:similarity"),
        packages=("rapidfuzz",),
        description="Similarity of the completion to references, from 0 to 1, by n-grams or edits.",
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
        open=in_user_loop(loaded.coroutine, together=loaded.together)
        if loaded.coroutine
        else in_workers(given.function, trusted=True, takes_groups=loaded.together is not None),
    )


def build_registry(config: RewardServiceConfig) -> Registry:
    """The verifiers that come with the service, and those of the configuration. Reads all of each reward model's files.

    Raises UserError.
    """
    return Registry([*with_packages(), *configured(config)])


def with_packages() -> Iterable[Verifier]:
    """The included verifiers whose packages are installed; the packages' versions become part of theirs."""
    for verifier in INCLUDED:
        try:
            parts = [f"{package}-{importlib.metadata.version(package)}" for package in verifier.packages]
        except importlib.metadata.PackageNotFoundError as error:
            logger.warning(
                "verifier %s is unavailable: package %s is missing; pip install 'headway[reward]'",
                verifier.name,
                error.name,
            )
            continue
        yield replace(verifier, version="+".join([verifier.version, *parts]))
