"""The leases that were granted since generators serve the newest version: all that they sample is of it, or newer."""

from collections.abc import Callable, Iterable

from learner.ledger import AttemptId, Grant


class NewestGrants:
    """Attempts that were granted while the newest version was the oldest one that is served, in that order."""

    def __init__(self) -> None:
        self._version = -1
        self._attempts: list[AttemptId] = []

    def granted(self, grants: Iterable[Grant]) -> None:
        """Notes attempts. Those of an older version than the newest are of no use: they may sample by that one."""
        for grant in grants:
            if grant.version > self._version:
                self._version, self._attempts = grant.version, []
            if grant.version == self._version:
                self._attempts.append(AttemptId(grant.lease_id, grant.attempt))

    def of(self, version: int) -> tuple[AttemptId, ...]:
        """The attempts that were granted while `version` was the newest; none if it is not."""
        return tuple(self._attempts) if version == self._version else ()

    def run(self, *, version: int, groups: int, runs: Callable[[AttemptId], bool]) -> bool:
        """True if one of the first attempts of the version, so many of them, is still at its holder."""
        return any(map(runs, self.of(version)[:groups]))
