"""Verifiers by name."""

import importlib.metadata
import logging
from collections.abc import Iterable
from dataclasses import replace

from reward_service.config import RewardServiceConfig
from reward_service.included import INCLUDED, configured
from reward_service.lanes.contract import Verifier
from reward_service.verifier import UserError

logger = logging.getLogger(__name__)


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
