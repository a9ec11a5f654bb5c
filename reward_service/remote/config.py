"""What a user can set about a verifier elsewhere."""

from typing import Literal, Self

from pydantic import Field, model_validator

from reward_service.endpoints.config import EndpointConfig

_OF_OPENRLHF = ("requests_per_s", "most_requests", "most_tokens")


class RemoteConfig(EndpointConfig):
    """A verifier elsewhere: an entry of [[reward-service.remotes]].

    `url` is the address of a Headway reward service, or the whole address of an OpenRLHF reward server, such as
    http://host:5000/get_reward. The key is the reward service's token.
    """

    kind: Literal["headway", "openrlhf"] = Field("headway", description="what kind of service it is")
    verifier: str | None = Field(
        None, min_length=1, max_length=256, description="name of the verifier there; the same as here if left out"
    )
    batch_items: int = Field(256, ge=1, le=4096, description="most items in one request")
    wait_s: float = Field(0.005, ge=0, le=1.0, description="how long items are gathered for a request, in seconds")

    @model_validator(mode="after")
    def _settings_of_its_kind(self) -> Self:
        useless = sorted(self.limits.model_fields_set.intersection(_OF_OPENRLHF))
        if self.kind == "headway" and useless:
            raise ValueError(f"remote {self.name}: limits.{useless[0]} has no effect on kind headway; remove it")
        if self.kind == "openrlhf" and self.verifier is not None:
            raise ValueError(f"remote {self.name}: verifier has no effect on kind openrlhf; remove it")
        return self
