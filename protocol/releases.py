"""HTTP bodies by which releases are asked about, taken back, and promoted by hand, at the learner."""

from typing import Annotated

from pydantic import Field, StringConstraints

from protocol.fleet import Channel, Digest
from protocol.model import VersionText, WireModel

ReleaseName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$")]
"""A version as it stands on the wire, or its number alone, where only one release has it."""


class RollBack(WireModel):
    """`POST /v1/releases/rollback`: release a version again that was released before, and hold promotions. `run` is
    the content of `run_name` in the folder of the run that is meant; empty if the caller does not know it.
    """

    version: ReleaseName
    reason: str = Field(default="", max_length=1000)
    run: str = Field(default="", max_length=256)
    wait_s: float = Field(default=60.0, ge=0, le=600)


class Promote(WireModel):
    """`POST /v1/releases/promote`: let promotions go on after a rollback; with a version, release the candidate that is
    on trial with users now. `run` is as in RollBack.
    """

    version: ReleaseName | None = None
    run: str = Field(default="", max_length=256)
    wait_s: float = Field(default=60.0, ge=0, le=600)


class ReleaseHolder(WireModel):
    """A generator of a channel: the version that it is proven to serve, and the checksum of what it loaded.
    `same_as_first` is False if no generator of its kind had proven this version before it.
    """

    generator_id: str = Field(max_length=256)
    channel: Channel
    serving_version: VersionText | None
    fingerprint: str | None = Field(default=None, max_length=128)
    same_as_first: bool = False


class ReleaseStatus(WireModel):
    """`GET /v1/releases`, and the answer to a rollback and a promotion. `digest` is that of the released weights, of
    which every file was compared with its hash; `held` says why nothing is promoted, if so.
    """

    released: VersionText | None
    digest: Digest = Field(default="", max_length=128)
    trial: VersionText | None = None
    trial_text: str = ""
    held: str = ""
    former: tuple[VersionText, ...] = ()
    generators: tuple[ReleaseHolder, ...] = ()
