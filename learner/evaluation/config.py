"""What a user can set about the judge of an evaluation. Loads no torch."""

from pydantic import Field, SecretStr

from services.config import ConfigModel

_DEFAULT_URL = "http://127.0.0.1:7320"


class JudgingConfig(ConfigModel):
    """Who judges pairs of completions, ours and those of `against`: a verifier that takes a `baseline`."""

    verifier: str | None = Field(
        None, min_length=1, max_length=256, description="pairwise verifier of the reward service; none: no such judging"
    )
    urls: tuple[str, ...] = Field(
        (), description=f"addresses of reward services that have it; {_DEFAULT_URL} if left out"
    )
    token: SecretStr | None = Field(None, description="bearer token of the reward services")
    timeout_s: float = Field(120.0, gt=0, le=3600, description="time for one request of pairs, in seconds")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The reward services, without a slash at the end."""
        return tuple(url.rstrip("/") for url in self.urls or (_DEFAULT_URL,))
