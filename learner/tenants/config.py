"""Settings of the service of the Tinker API, which a learner is in place of training a run. Loads no torch."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from services.config.agreements import Reaches
from services.config.models import ConfigModel
from services.config.run_paths import WrittenPath
from services.network import HttpAddress


class TinkerConfig(ConfigModel):
    """The Tinker API, for training loops of others: with it the learner trains adapters for them in place of a run."""

    enabled: bool = Field(
        False,
        description="serve the Tinker API at the learner's HTTP address; state and checkpoints are kept in the run's "
        "folder, and a later start goes on with them",
    )
    base_model: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="name of the model for clients, by which they also load its tokenizer: a name on the hub, or a "
        "folder on their machine; the folder of `model` if none",
    )
    context_tokens: int | None = Field(
        None,
        ge=2,
        description="most tokens of prompt and completion of a sample together, no more than engine.max_model_len of "
        "the generators; as many as the model has positions for if none",
    )
    keys_file: Annotated[Path | None, WrittenPath()] = Field(
        None,
        description="file of the tenants: the hash of each one's key, its share and its bounds; tinker-keys.json in "
        "the run's folder if none. One that is not there is made with one key, which is written beside it",
    )
    generators: Annotated[tuple[HttpAddress, ...], Reaches("generator")] = Field(
        (),
        max_length=1024,
        description="HTTP addresses of the generators that sample, which have adapters.slots; weights.generator_token "
        "is their token; none: nothing is sampled",
    )
    all_weights: bool = Field(
        False,
        description="one client trains all weights of the model in place of adapters: it asks for rank 0, and has the "
        "server to itself until it unloads its model; the generators want adapters.whole",
    )
    sample_silence_s: float = Field(
        180.0, gt=0, description="a sample fails if no generator has answered for so long, in seconds"
    )
    sample_timeout_s: float = Field(3600.0, gt=0, description="longest time of a sample with its retries, in seconds")
    snapshot_every: int = Field(
        64, ge=1, description="operations between two snapshots of a training model; a start does later ones again"
    )
    max_resident: int = Field(
        256, ge=1, description="training models in memory at once; others are on the disk until their next operation"
    )
    round_tokens: int = Field(
        1 << 16, ge=1, description="most tokens of all tenants together that are trained in one turn"
    )
    round_s: float = Field(
        0.1,
        gt=0,
        description="a turn holds no more than the learner trains in about so many seconds, so that nobody waits long "
        "for another's flood; an operation is never divided",
    )
    shared_tokens: int = Field(
        1024,
        ge=0,
        description="operations of different models share passes if each has at most so many tokens; what a larger one "
        "computes is the same bit by bit whatever else waits, and with 0 that of all",
    )
    retain_targets_s: float = Field(
        86_400.0,
        gt=0,
        description="weights of a sampling session, and results that nobody asked for, go after so many seconds "
        "without their client",
    )

    def keys_path(self, folder: Path) -> Path:
        """The keys file, of a run in the folder."""
        return self.keys_file or folder / "tinker-keys.json"
