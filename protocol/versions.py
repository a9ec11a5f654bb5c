"""The versions that messages carry: of the protocol, and of the policy."""

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import StringConstraints

PROTOCOL_VERSION = 2
"""Rises with every change that an older peer would misread."""

VersionText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$")]
"""A policy version as it stands on the wire: `incarnation.number`, such as `1.42`. Both parts fit an int32."""


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Which weights: the start of the learner that published them, and the number of steps they were trained for.

    Lag counts numbers only: a restarted learner replays its batch log, so a number names the same policy in every
    incarnation. The incarnation keeps caches and late replies of an earlier life apart.
    """

    incarnation: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str()`. Raises ValueError that names the text."""
        incarnation, dot, number = text.partition(".")
        if not (dot and incarnation.isdecimal() and number.isdecimal()):
            raise ValueError(f"policy version {text!r} is not of the form incarnation.number, such as '1.42'")
        return cls(incarnation=int(incarnation), number=int(number))

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"
