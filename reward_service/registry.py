"""Verifiers by name."""

import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import BaseModel

from protocol.rewards import VerifierInfo
from reward_service.config import CustomVerifier, RewardModelConfig, Sandbox
from reward_service.reward_models.arguments import RewardModelArguments
from reward_service.reward_models.folder import RewardModel, open_reward_model
from reward_service.verifier import UserError, inspect_function, load_function
from reward_service.verifiers.arguments import MathArguments, ReasoningGymArguments
from reward_service.verifiers.exact_match import exact_match

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """A named verifier: a `reward_model`, or else the `function` in the service, or else `path` in worker processes.

    `trusted`: its workers may see the service's environment variables.
    """

    name: str
    version: str
    description: str
    arguments: type[BaseModel]
    path: str
    function: Callable[..., object] | None = None
    is_async: bool = False
    trusted: bool = False
    reward_model: RewardModel | None = None

    def info(self) -> VerifierInfo:
        """How the verifier is described on the wire."""
        schema = self.arguments.model_json_schema()
        return VerifierInfo(name=self.name, version=self.version, description=self.description, arguments_schema=schema)


class Registry:
    """The verifiers that this service offers. Raises UserError if two have one name."""

    def __init__(self, verifiers: Iterable[Verifier]) -> None:
        self._verifiers: dict[str, Verifier] = {}
        for verifier in verifiers:
            if verifier.name in self._verifiers:
                raise UserError(f"two verifiers are named {verifier.name!r}; give yours another name")
            self._verifiers[verifier.name] = verifier

    def get(self, name: str) -> Verifier:
        """The verifier of that name. Raises UserError that lists the names there are."""
        verifier = self._verifiers.get(name)
        if verifier is None:
            raise UserError(f"unknown verifier {name!r}; this service offers: {', '.join(sorted(self._verifiers))}")
        return verifier

    def all(self) -> tuple[Verifier, ...]:
        """All verifiers, by name."""
        return tuple(sorted(self._verifiers.values(), key=lambda verifier: verifier.name))


def build_registry(
    *, custom: Iterable[CustomVerifier], sandbox: Sandbox, reward_models: Iterable[RewardModelConfig] = ()
) -> Registry:
    """The verifiers that come with the service, and those of the configuration. Reads all of each reward model's files.

    Raises UserError.
    """
    return Registry([*_included(sandbox=sandbox), *map(_custom, custom), *map(_reward_model, reward_models)])


def _included(*, sandbox: Sandbox) -> Iterable[Verifier]:
    function = inspect_function(function=exact_match, path="exact_match")
    yield Verifier(
        name="exact_match",
        version="1",
        description=function.description,
        arguments=function.arguments,
        path="reward_service.verifiers.exact_match:exact_match",
        function=exact_match,
    )
    gym = "unsafe_score" if sandbox == "unsafe" else "sandboxed_score"
    yield from _from_package(
        name="math",
        package="math-verify",
        description="1 when the final answer (the last box or expression) equals the right one as mathematics.",
        arguments=MathArguments,
        path="reward_service.verifiers.math_answer:math_answer",
    )
    yield from _from_package(
        name="reasoning_gym",
        package="reasoning-gym",
        description="What the reasoning-gym dataset's own scorer gives to the extracted answer.",
        arguments=ReasoningGymArguments,
        path=f"reward_service.verifiers.reasoning_gym:{gym}",
    )


def _from_package(
    *, name: str, package: str, description: str, arguments: type[BaseModel], path: str
) -> Iterable[Verifier]:
    """A verifier around a package; its version holds the package's. Not offered where that is not installed."""
    try:
        version = f"1+{package}-{importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        logger.warning("verifier %s is not offered: %s is missing; pip install 'headway[reward]'", name, package)
        return
    yield Verifier(name=name, version=version, description=description, arguments=arguments, path=path)


def _custom(given: CustomVerifier) -> Verifier:
    loaded = load_function(given.function)
    return Verifier(
        name=given.name,
        version=given.version,
        description=loaded.description,
        arguments=loaded.arguments,
        path=given.function,
        function=loaded.function if loaded.is_async else None,
        is_async=loaded.is_async,
        trusted=True,
    )


def _reward_model(given: RewardModelConfig) -> Verifier:
    """Its version holds the fingerprint of its files, so that each reward says which model gave it."""
    model = open_reward_model(given)
    logger.info("reward model %s: %s, fingerprint %s", given.name, given.path, model.fingerprint)
    return Verifier(
        name=given.name,
        version=f"1+{model.fingerprint}",
        description="What a reward model says about the completion: a sequence-classification model with one label.",
        arguments=RewardModelArguments,
        path=str(given.path),
        reward_model=model,
    )
