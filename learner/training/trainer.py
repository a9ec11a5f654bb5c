"""The training step, on every rank.

Rank 0 calls the methods of `Trainer`; the other ranks sit in `Trainer.follow`, and are told over the command channel to
call the same method, so that each collective finds all of its partners:

    rank 0     train_step: tell, share the batch ─┐   plan -> microbatches -> update -> sums over ranks -> StepMetrics
    the others follow: wait for a command ────────┘   the same plan, their own microbatches, the same update
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from learner.algorithms.config import AlgorithmConfig
from learner.algorithms.preset import Carried, Preset
from learner.algorithms.registry import build_preset
from learner.algorithms.shaping import RunningMoments
from learner.training.batch import FlatBatch, TrainSequence, flatten
from learner.training.config import TrainingConfig
from learner.training.distribution import share_batch
from learner.training.metrics import StepMetrics
from learner.training.models import open_models
from learner.training.packing import pack
from learner.training.policy import PolicyModel
from learner.training.prefixes import shared_prefixes
from learner.training.random_state import load_random_state, save_random_state
from learner.training.ranks import Command, CommandChannel, Ranks
from learner.training.score_model import save_score_model
from learner.training.step import Step, TrainingStopped
from learner.training.weights import WeightSnapshot, host_copy, write_model_directory

logger = logging.getLogger(__name__)

PROGRESS_FILE = "trainer.json"


def _never() -> bool:
    return False


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """torch and safetensors have errors of their own for a disk that takes no more."""
    try:
        yield
    except torch.distributed.DistError:
        raise
    except (SafetensorError, RuntimeError) as error:
        raise OSError(errno.EIO, f"{directory} cannot be written: {str(error).splitlines()[0]}") from error


def _carried(found: dict[str, Any]) -> Carried:
    """As `asdict` wrote it; JSON keeps every digit of a float."""
    return Carried(**{**found, "rewards": RunningMoments(**found.get("rewards", {}))})


class Trainer:
    """The policy, its optimizer and the algorithm, on this rank. The process group must be open."""

    def __init__(
        self,
        model_path: Path,
        *,
        algorithm: AlgorithmConfig,
        config: TrainingConfig,
        ranks: Ranks,
        commands: CommandChannel,
        teachers: Sequence[Path] = (),
        should_stop: Callable[[], bool] = _never,
    ) -> None:
        """`teachers` are folders of models that each rank loads."""
        self._model_path = model_path
        self._preset: Preset = build_preset(algorithm)
        self._config = config
        self._ranks = ranks
        self._commands = commands
        self._updates = 0
        self._models = open_models(
            model_path, config=config, preset=self._preset, teachers=teachers, device=ranks.device
        )
        self._step = Step(self._models, preset=self._preset, config=config, ranks=ranks, should_stop=should_stop)
        has_ratio = self._preset.samples_policy and self._preset.advantages is not None
        if config.updates_per_step == 1 and has_ratio and not self._preset.ratio_to_behavior:
            logger.info("one update per step: the ratio to the proximal policy is 1, so its clip has no effect")

    @property
    def preset(self) -> Preset:
        """The algorithm in use."""
        return self._preset

    @property
    def updates(self) -> int:
        """Optimizer updates made since the initial model."""
        return self._updates

    def train_step(self, sequences: Sequence[TrainSequence], *, version: int) -> StepMetrics:
        """One step on the whole batch, which only rank 0 gives: `updates_per_step` updates, then means over all ranks.

        `version` is the learner's version before the step; it only labels the command. Raises TrainingStopped.
        """
        self._tell(Command(action="train_step", version=version))
        return self._train_step(flatten(sequences))

    def host_copy(self) -> WeightSnapshot:
        """The weights as of now in `publish_dtype`, on rank 0's CPU. Later steps do not change the copy."""
        self._tell(Command(action="host_copy"))
        return host_copy(self._models.engine, dtype=self._config.publish_dtype, keep=self._ranks.leads)

    def probe_logprobs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs at temperature 1, float32 [T-1] in nats, of tokens 1 to T-1 of a prompt, by the present weights."""
        self._tell(Command(action="probe", path=json.dumps(list(token_ids))))
        return self._probe(token_ids)

    def save(self, directory: Path) -> None:
        """Writes model, optimizer, progress of the schedule and random states; each rank writes its part.

        Returns when all parts are written. Raises OSError when this rank cannot write its own.
        """
        self._tell(Command(action="save", path=str(directory)))
        self._save(directory)

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote with the same ranks, ZeRO stage and types. Raises FileNotFoundError."""
        self._tell(Command(action="load", path=str(directory)))
        self._load(directory)

    def export(self, directory: Path) -> None:
        """Writes a Hugging Face model directory with the tokenizer of the initial model."""
        snapshot, trained = self.host_copy(), self._models.trained
        if isinstance(trained, PolicyModel):
            write_model_directory(snapshot, causal_lm=trained.causal_lm, source=self._model_path, destination=directory)
        else:
            save_score_model(snapshot, model=trained, source=self._model_path, destination=directory)

    def outputs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """What the model as it stands gives for each sequence, at its trained tokens: logprobs, or scores.

        Only rank 0 gives the sequences.
        """
        self._tell(Command(action="outputs"))
        return self._split(sequences, self._step.outputs(share_batch(flatten(sequences)), reference=False))

    def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """Logprobs by the reference, for each sequence at its trained tokens. Only rank 0 gives the sequences."""
        self._tell(Command(action="reference"))
        return self._split(sequences, self._step.outputs(share_batch(flatten(sequences)), reference=True))

    def follow(self) -> None:
        """On the ranks other than 0: takes part in whatever rank 0 does, until it closes."""
        while (command := self._commands.receive()).action != "stop":
            try:
                self._obey(command)
            except TrainingStopped:
                logger.info("rank %d left a step that was stopped", self._ranks.rank)
        self._models.close()

    def close(self) -> None:
        """Ends the other ranks' `follow`, and releases the model. The process group stays open."""
        self._tell(Command(action="stop"))
        self._models.close()

    def _obey(self, command: Command) -> None:
        if command.action == "train_step":
            self._train_step(None)
        elif command.action == "host_copy":
            host_copy(self._models.engine, dtype=self._config.publish_dtype, keep=False)
        elif command.action in ("outputs", "reference"):
            self._step.outputs(share_batch(None), reference=command.action == "reference")
        elif command.action == "probe":
            self._probe(json.loads(command.path))
        elif command.action == "save":
            self._save(Path(command.path))
        elif command.action == "load":
            self._load(Path(command.path))

    def _tell(self, command: Command) -> None:
        self._commands.send(command)

    @staticmethod
    def _split(sequences: Sequence[TrainSequence], values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        ends = np.cumsum([len(sequence.token_ids) for sequence in sequences])[:-1]
        parts = np.split(values, ends)
        return [part[sequence.loss_mask] for part, sequence in zip(parts, sequences, strict=True)]

    def _train_step(self, given: FlatBatch | None) -> StepMetrics:
        metrics = self._step.run(share_batch(given), first_update=self._updates)
        self._updates += metrics.updates
        if self._models.reference is not None:
            self._models.reference.after_step()
        return metrics

    def _probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        token_count = len(token_ids)
        assert token_count > 1, "a prompt of one token has no logprobs"
        mask = np.arange(token_count) > 0
        batch = flatten([TrainSequence.supervised(token_ids=np.array(token_ids, dtype=np.int32), loss_mask=mask)])
        row = np.zeros(1, dtype=np.int64)
        microbatch = pack(batch, row, prefixes=shared_prefixes(batch)).to(self._ranks.device)
        policy = self._models.trained
        assert isinstance(policy, PolicyModel), "generators sample from a policy"
        # The generators' logprobs of given tokens are those at temperature 1, whatever they sample at.
        with torch.no_grad(), policy.at_temperature(1.0):
            logprobs = self._models.engine.forward(microbatch)[0]
        return logprobs.float().cpu().numpy()

    def _save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with _writing(directory):
            save_random_state(self._random_state(directory), device=self._ranks.device)
            if self._ranks.leads:
                progress = {"updates": self._updates, "carried": asdict(self._step.carried)}
                (directory / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")
            self._models.save(directory, leads=self._ranks.leads)
        torch.distributed.barrier()  # rank 0 goes on when every rank's part is there

    def _random_state(self, directory: Path) -> Path:
        return directory / f"random_state_{self._ranks.rank}.safetensors"

    def _load(self, directory: Path) -> None:
        progress = directory / PROGRESS_FILE
        if not progress.is_file():
            raise FileNotFoundError(f"no checkpoint in {directory}: expected {progress}; name a folder that save wrote")
        self._models.load(directory)
        load_random_state(self._random_state(directory), device=self._ranks.device)
        found = json.loads(progress.read_text(encoding="utf-8"))
        self._updates = int(found["updates"])
        self._step.carried = _carried(found.get("carried", {}))
