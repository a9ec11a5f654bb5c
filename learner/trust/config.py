"""The settings of trust in generators. Loads no torch."""

from pydantic import Field

from services.config.models import ConfigModel


class TrustConfig(ConfigModel):
    """Evidence, gathered from what is trained, that a generator samples otherwise than it says."""

    enabled: bool = Field(True, description="whether generators are tested at all")
    evidence: float = Field(
        16.0,
        gt=0,
        le=700,
        description="nats of evidence at which a generator is named; an honest one reaches 16 with a probability of "
        "about one in ten million, however long the run is",
    )
    tolerance: float = Field(
        1.5,
        ge=1,
        description="how many times as far as the others' a generator's logprobs may be from the learner's; more where "
        "generators differ in hardware or type of numbers",
    )
    quarantine: bool = Field(
        False,
        description="a generator that is named leaves the fleet until it is restarted, and what it sampled and is not "
        "trained yet is sampled again; false: it is named only",
    )
