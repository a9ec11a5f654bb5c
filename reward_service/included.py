"""The verifiers that come with the service, by name, and those that a configuration makes."""

import importlib.metadata
import logging
from collections.abc import Iterable
from dataclasses import replace

from pydantic import BaseModel

from reward_service.code.arguments import CodeArguments
from reward_service.code.code_judge import open_code
from reward_service.config import RewardServiceConfig
from reward_service.embeddings.verifier import embedding_verifier, encoder_verifier
from reward_service.endpoints.remote import remote_verifier
from reward_service.judges.judge import judge_verifier
from reward_service.models.reward_model import reward_model_verifier
from reward_service.verifier.config import CustomVerifier
from reward_service.verifier.lanes import Opener, Registry, Verifier, in_user_loop, in_workers, inline
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

# Each with its name, its version, its arguments, how it is run, the packages that it needs, and what it says of itself.
# fmt: off
_TABLE: tuple[tuple[str, str, type[BaseModel], Opener, tuple[str, ...], str], ...] = (
    ("code", "1", CodeArguments, open_code, (),
     "The share of tests that the completion's program passes, run in a sandbox."),
    ("composite", "1", CompositeArguments, open_composite, (),
     "A reward made of other verifiers' rewards: weights, gates, and one combination of them."),
    ("exact_match", "1", ExactMatchArguments, inline(exact_match), (),
     "1 when the completion equals the answer, else 0."),
    ("format", "1", FormatArguments, inline(well_formed), (),
     "1 when the completion has its tags, each once and in order, and its box, else 0, or a part."),
    ("ifeval", "1", IfevalArguments, in_workers(f"{_OURS}.ifeval.checking:ifeval"), ("langdetect",),
     "The share of IFEval's instructions that the completion follows, or whether it follows all."),
    ("json_schema", "1", JsonSchemaArguments, in_workers(f"{_OURS}.json_schema:json_schema"), ("jsonschema",),
     "1 when the completion holds a JSON value that the schema allows, else 0, or a part."),
    ("length", "1", LengthArguments, inline(length), (),
     "Full reward in a range of lengths, and less with the distance outside it."),
    ("math", "3", MathArguments, in_workers(f"{_OURS}.mathematics.math_answer:math_answer"), ("math-verify",),
     "1 when the final answer (the last box or expression) equals a right one as mathematics."),
    ("multiple_choice", "1", MultipleChoiceArguments, inline(multiple_choice), (),
     "1 when the final statement names the right option and no other."),
    ("numeric", "1", NumericArguments, inline(numeric), (),
     "1 when the final number is the right one within the tolerances."),
    ("overlong", "1", OverlongArguments, inline(overlong), (),
     "0, and from some length on a punishment that grows to -1 at the longest (DAPO)."),
    ("qa", "1", QaArguments, inline(qa), (),
     "Whether a short answer in words is right: exactly, as a part, or by the F1 of its words."),
    ("reasoning_gym", "1", ReasoningGymArguments,
     in_workers(f"{_OURS}.reasoning_gym:sandboxed_score", unsafe=f"{_OURS}.reasoning_gym:unsafe_score"),
     ("reasoning-gym",),      "What the reasoning-gym dataset's own scorer gives to the extracted answer."),
    ("regex", "1", RegexArguments, in_workers(f"{_OURS}.patterns:regex"), (),
     "The weighted share of patterns that the completion matches, or does not where they are forbidden."),
    ("repetition", "1", RepetitionArguments, in_workers(f"{_OURS}.lengths:repetition"), (),
     "0 for a completion that does not repeat itself, down to -scale for one that does nothing else."),
    ("similarity", "1", SimilarityArguments, in_workers(f"{_OURS}.similarity:similarity"), ("rapidfuzz",),
     "How close the completion is to references, from 0 to 1, by n-grams or edits."),
)
# fmt: on

INCLUDED = tuple(
    Verifier(name=name, version=version, arguments=arguments, open=opener, packages=packages, description=description)
    for name, version, arguments, opener, packages, description in _TABLE
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
