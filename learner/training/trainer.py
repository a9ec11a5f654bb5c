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
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from learner.algorithms.config import AlgorithmConfig
from learner.algorithms.preset import Preset
from learner.algorithms.registry import build_preset
from learner.training.adapters import add_adapters
from learner.training.batch import FlatBatch, TrainSequence, flatten
from learner.training.config import TrainingConfig
from learner.training.distribution import share_batch
from learner.training.engine import Engine
from learner.training.logprobs import Chunking
from learner.training.metrics import StepMetrics
from learner.training.packing import pack
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from learner.training.prefixes import shared_prefixes
from learner.training.random_state import load_random_state, save_random_state
from learner.training.ranks import Command, CommandChannel, Ranks
from learner.training.reference import Reference, open_reference
from learner.training.step import Step, TrainingStopped
from learner.training.weights import WeightSnapshot, host_copy, torch_dtype, write_model_directory

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
        should_stop: Callable[[], bool] = _never,
    ) -> None:
        self._model_path = model_path
        self._preset: Preset = build_preset(algorithm)
        self._config = config
        self._ranks = ranks
        self._commands = commands
        self._updates = 0
        self._policy = self._load_policy(with_entropy=config.report_entropy, adapted=config.lora.enabled)
        self._engine: Engine[tuple[Tensor, Tensor | None]] = Engine(self._policy, config=config, device=ranks.device)
        self._reference = self._open_reference() if self._preset.needs_reference else None
        self._step = Step(
            self._engine,
            preset=self._preset,
            config=config,
            ranks=ranks,
            reference=self._reference,
            should_stop=should_stop,
        )
        if config.updates_per_step == 1 and self._preset.samples_policy:
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
        return host_copy(self._engine, dtype=self._config.publish_dtype, keep=self._ranks.leads)

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
        snapshot = self.host_copy()
        write_model_directory(
            snapshot, causal_lm=self._policy.causal_lm, source=self._model_path, destination=directory
        )

    def follow(self) -> None:
        """On the ranks other than 0: takes part in whatever rank 0 does, until it closes."""
        while (command := self._commands.receive()).action != "stop":
            try:
                self._obey(command)
            except TrainingStopped:
                logger.info("rank %d left a step that was stopped", self._ranks.rank)
        self._engine.close()

    def close(self) -> None:
        """Ends the other ranks' `follow`, and releases the model. The process group stays open."""
        self._tell(Command(action="stop"))
        self._engine.close()

    def _obey(self, command: Command) -> None:
        if command.action == "train_step":
            self._train_step(None)
        elif command.action == "host_copy":
            host_copy(self._engine, dtype=self._config.publish_dtype, keep=False)
        elif command.action == "probe":
            self._probe(json.loads(command.path))
        elif command.action == "save":
            self._save(Path(command.path))
        elif command.action == "load":
            self._load(Path(command.path))

    def _tell(self, command: Command) -> None:
        self._commands.send(command)

    def _load_policy(self, *, with_entropy: bool, adapted: bool) -> PolicyModel:
        causal_lm = load_causal_lm(self._model_path, dtype=torch_dtype(self._config.dtype))
        if adapted:
            add_adapters(causal_lm, self._config.lora)
        if self._config.gradient_checkpointing:
            enable = causal_lm.gradient_checkpointing_enable
            assert callable(enable), "a transformers model"
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        chunking = Chunking(tokens=self._config.logprob_chunk_tokens, vocabulary=self._config.logprob_chunk_vocabulary)
        settings = LogprobSettings(temperature=self._config.temperature, chunking=chunking, with_entropy=with_entropy)
        return PolicyModel(causal_lm, settings=settings)

    def _open_reference(self) -> Reference:
        def load() -> PolicyModel:
            return self._load_policy(with_entropy=False, adapted=False).to(self._ranks.device)

        return open_reference(self._policy, engine=self._engine, config=self._config, load=load)

    def _train_step(self, given: FlatBatch | None) -> StepMetrics:
        metrics = self._step.run(share_batch(given), first_update=self._updates)
        self._updates += metrics.updates
        if self._reference is not None:
            self._reference.after_step()
        return metrics

    def _probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        token_count = len(token_ids)
        assert token_count > 1, "a prompt of one token has no logprobs"
        mask = np.arange(token_count) > 0
        batch = flatten([TrainSequence.supervised(token_ids=np.array(token_ids, dtype=np.int32), loss_mask=mask)])
        row = np.zeros(1, dtype=np.int64)
        microbatch = pack(batch, row, prefixes=shared_prefixes(batch), weights=np.ones(1)).to(self._ranks.device)
        # The generators' logprobs of given tokens are those at temperature 1, whatever they sample at.
        with torch.no_grad(), self._policy.at_temperature(1.0):
            logprobs, _ = self._engine.forward(microbatch)
        return logprobs.float().cpu().numpy()

    def _save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with _writing(directory):
            save_random_state(self._random_state(directory), device=self._ranks.device)
            if self._ranks.leads:
                (directory / PROGRESS_FILE).write_text(json.dumps({"updates": self._updates}), encoding="utf-8")
            self._engine.save(directory)
            if self._reference is not None:
                self._reference.save(directory, leads=self._ranks.leads)
        torch.distributed.barrier()  # rank 0 goes on when every rank's part is there

    def _random_state(self, directory: Path) -> Path:
        return directory / f"random_state_{self._ranks.rank}.safetensors"

    def _load(self, directory: Path) -> None:
        progress = directory / PROGRESS_FILE
        if not progress.is_file():
            raise FileNotFoundError(f"no checkpoint in {directory}: expected {progress}; name a folder that save wrote")
        self._engine.load(directory)
        if self._reference is not None:
            self._reference.load(directory)
        load_random_state(self._random_state(directory), device=self._ranks.device)
        self._updates = int(json.loads(progress.read_text(encoding="utf-8"))["updates"])
