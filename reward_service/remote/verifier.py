"""A verifier elsewhere as a verifier of the service."""

from reward_service.lanes.contract import Verifier
from reward_service.remote.config import RemoteConfig
from reward_service.remote.headway import PassedOnArguments, open_headway
from reward_service.remote.openrlhf import LabelArguments, open_openrlhf


def remote_verifier(config: RemoteConfig) -> Verifier:
    """Results of a Headway service have the version of the verifier there; the other shape knows none."""
    if config.kind == "openrlhf":
        return Verifier(
            name=config.name,
            version=f"1+{config.url}",
            description="What a reward server of OpenRLHF's shape says of the prompt with the completion.",
            arguments=LabelArguments,
            open=open_openrlhf(config),
        )
    return Verifier(
        name=config.name,
        version=f"1+{config.url}",
        description=f"The verifier {config.verifier or config.name} of another reward service.",
        arguments=PassedOnArguments,
        open=open_headway(config),
    )
