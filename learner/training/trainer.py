"""The training step on every rank, and the random states that a resumed run draws on.

Rank 0 calls the methods of `Trainer`; the other ranks sit in `Trainer.follow`, and are told over the command channel to
call the same method, so that each collective finds all of its partners:

    rank 0     train_step: tell, share the batch ─┐   plan -> microbatches -> update -> sums over ranks -> StepMetrics
    the others follow: wait for a command ────────┘   the same plan, their own microbatches, the same update

Numbers that are not finite are never applied, published or written to a checkpoint: NotFinite.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C._distributed_c10d import Store

from learner.algorithms.old_tokens import OldTokenBound
from learner.algorithms.preset import CarriedState, Preset
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.algorithms.shaping import RunningMoments
from learner.teachers.teachers import TeacherScores, TeacherTopTokens
from learner.training.adapters import why_merged
from learner.training.batch import FlatBatch, TrainSequence, flatten
from learner.training.config import Dtype, TrainingConfig
from learner.training.deferred import DeferredFiles, PartsOfRanks
from learner.training.finite import all_finite
from learner.training.models import TokenValues, open_models
from learner.training.packing import pack, shared_prefixes
from learner.training.policy import (
    PolicyModel,
    TextFiles,
    WeightPart,
    WeightSnapshot,
    write_model_directory,
)
from learner.training.pulls import TokenPulls
from learner.training.ranks import (
    CommandChannel,
    RankCommand,
    Ranks,
    any_rank,
    last_rank,
    raise_on_all,
    share_batch,
)
from learner.training.score_model import save_score_model
from learner.training.shards import whole_size
from learner.training.shared_copies import CopyOrder, SharedCopies
from learner.training.step import StepMetrics, TrainingStep, TrainingStopped
from learner.training.step_parts import parts_of

logger = logging.getLogger(__name__)

_ALIKE_ON_DISKS = ("save", "begin_save", "load")
"""Commands of which all ranks raise an OSError where one does."""

_CLIPPING = ("clip_low", "clip_high", "log_clip_low", "log_clip_high", "dual_clip")
_BOUND_BY_PRODUCTS = 50_000_000
"""Weights. A model of 0.6M spends its time around the products of matrices; 135M is the least that was measured."""
_FASTER = {
    "float32": "training.dtype is bfloat16, and this CPU has neither AMX nor AVX512_BF16: float32 (and "
    "training.publish_dtype and generator.engine.dtype with it) takes twice the memory and hardly more than half the "
    "time",
    "bfloat16": "training.dtype is float32, and this CPU multiplies bfloat16 fast: bfloat16 (and "
    "training.publish_dtype and generator.engine.dtype with it) takes half the memory and about half the time",
}
PROGRESS_FILE = "trainer.json"
_AVERAGE = "average"
"""In place of the version of weights, of which an average has many."""
_SHOWN = "with demonstrations"
"""Of a step's command: a second batch follows the first."""


class NotFinite(RuntimeError):
    """Weights, logprobs or too many gradients in a row are not finite. The text says which, and what to look at.

    A new start would come to the same point: the batches are replayed as they were.
    """


def check_snapshot(snapshot: WeightSnapshot) -> WeightSnapshot:
    """The snapshot itself. Raises NotFinite with the name of a weight that is not finite as it lies there: in the type
    that is published, which may not hold what the optimizer's own does.
    """
    wrong = snapshot.not_finite
    if wrong is None:
        wrong = tuple(tensor.name for tensor in snapshot.tensors if not all_finite(tensor.value))
    if wrong:
        dtypes = {tensor.name: str(tensor.value.dtype).removeprefix("torch.") for tensor in snapshot.tensors}
        raise NotFinite(
            f"the learner's weight {wrong[0]} is not finite as {dtypes[wrong[0]]}, in which it would be published: it "
            "is not, nor is it written. Resume from an earlier checkpoint, with a lower learning rate, or start "
            "from another model"
        )
    return snapshot


def check_shares(share: WeightSnapshot) -> None:
    """Raises NotFinite, on every rank, if a weight of any rank's share is not finite. All ranks must call it."""
    error: NotFinite | None = None
    try:
        check_snapshot(share)
    except NotFinite as found:
        error = found
    wrong = last_rank(error is not None)
    if error is not None:
        raise error
    if wrong is not None:
        raise NotFinite(
            f"a weight that the learner's rank {wrong} would publish is not finite: nothing is published or written; "
            "its own log names the weight. Resume from an earlier checkpoint, with a lower learning rate, or start "
            "from another model"
        )


def check_probe(logprobs: list[float]) -> list[float]:
    """The logprobs themselves, which the learner's weights, finite as they are, give of a text."""
    wrong = sum(not math.isfinite(logprob) for logprob in logprobs)
    if wrong:
        raise NotFinite(
            f"{wrong} of the learner's own {len(logprobs)} logprobs of the probe text are not finite: its weights are "
            "not published. Resume from an earlier checkpoint with a lower learning rate, or set training.dtype to "
            "float32"
        )
    return logprobs


def stop_after_skips(metrics: StepMetrics, *, most: int) -> None:
    """Raises NotFinite if `most` updates in a row were left out, this step's the last of them."""
    if metrics.skipped_in_row >= most:
        raise NotFinite(
            f"{metrics.skipped_in_row} updates in a row had a gradient that is not finite, and were left out; "
            f"training.max_skipped_updates is {most}. Look at the rewards and leases that the log names, lower the "
            "learning rate, or set training.dtype to float32"
        )


def save_random_state(path: Path, *, device: torch.device) -> None:
    """Writes the states of torch (on the CPU, and on this rank's GPU), numpy and Python."""
    version, words, gauss = random.getstate()
    assert version == 3, "since Python 3.2"
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937", "numpy's global generator is always this one"
    tensors = {
        "torch": torch.get_rng_state(),
        "python_words": torch.tensor(words, dtype=torch.int64),
        "python_gauss": _optional(gauss),
        "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_place": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    save_file(tensors, path)


def load_random_state(path: Path, *, device: torch.device) -> None:
    """Takes up what `save_random_state` wrote for the same kind of device."""
    tensors = load_file(path)
    torch.set_rng_state(tensors["torch"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python_words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = tensors["numpy_place"].tolist()
    keys = tensors["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(tensors["numpy_gauss"])))
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], device)


def draw_apart(rank: int) -> None:
    """Has torch draw other numbers than the rank whose state was taken up, the same ones each time: such as of
    dropout. It is for a rank that was not there when the states were written.
    """
    state = torch.get_rng_state().numpy().tobytes()
    torch.manual_seed(int.from_bytes(hashlib.sha256(state + rank.to_bytes(8, "little")).digest()[:8], "little"))


def _random_state(directory: Path, rank: int | str) -> Path:
    return directory / f"random_state_{rank}.safetensors"


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)


def _is_same(one: Sequence[TrainSequence], other: Sequence[TrainSequence]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _never() -> bool:
    return False


def _error_of(work: Callable[[], None], *, directory: Path, done: str = "written") -> OSError | None:
    """The disk's error behind it. safetensors has an error of its own for a disk that takes no more."""
    try:
        work()
    except SafetensorError as error:
        return OSError(errno.EIO, f"{directory} cannot be {done}: {str(error).splitlines()[0]}")
    except OSError as error:
        return error
    return None


def _missing(part: Path) -> str:
    return f"no checkpoint in {part.parent}: expected {part}; name a folder that save wrote"


def _carried(found: dict[str, Any]) -> CarriedState:
    """As `asdict` wrote it; JSON keeps every digit of a float, and makes names of numbers that are keys."""
    baselines = {int(role): baseline for role, baseline in found.get("baselines", {}).items()}
    return CarriedState(**{**found, "rewards": RunningMoments(**found.get("rewards", {})), "baselines": baselines})


def faster_dtype(dtype: Dtype, *, device: torch.device, cpu: Mapping[str, Any], weights: int) -> Dtype:
    """The type in which this CPU trains a model of so many weights fastest, as far as that is known: `dtype` if not.

    An x86 multiplies bfloat16 fast with AMX or AVX512_BF16, and slower than float32 without (`benchmarks/against_trl`).
    """
    instructions = [cpu[name] for name in ("amx_bf16", "avx512_bf16") if name in cpu]
    if device.type != "cpu" or not instructions or (dtype == "float32" and weights < _BOUND_BY_PRODUCTS):
        return dtype
    return "bfloat16" if any(instructions) else "float32"


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
        keeps_tokens: bool = False,
        keeps_pulls: bool = False,
        chat_template: str = "",
        demonstration_weight: float = 0.0,
        average: float | None = None,
        old_tokens: OldTokenBound | None = None,
    ) -> None:
        """`teachers` are folders of models that each rank loads; `keeps_tokens` and `keeps_pulls`, whether `tokens` and
        `pulls` are filled: the same on every rank. `chat_template` is exported in place of the model's, if it is not
        empty. `demonstration_weight`, `average`, the decay of the policy's average, and `old_tokens`, the bound on what
        is older than others may be, are those of LearnerConfig.
        """
        assert not (config.partial_batches and (algorithm.whole_step or old_tokens)), "checked by LearnerConfig"
        self._source = TextFiles(model_path, chat_template)
        self._preset: Preset = algorithm.preset()
        self._config = config
        self._ranks = ranks
        self._commands = commands
        self._updates = 0
        self._begun: list[Sequence[TrainSequence]] = []
        self._saves = 0
        self._saving: PartsOfRanks | None = None
        self._saves_store: Store | None = None
        self._models = open_models(
            model_path, config=config, preset=self._preset, teachers=teachers, device=ranks.device, average=average
        )
        self._copies = SharedCopies(self._models.engine, dtype=config.publish_dtype, ranks=ranks, commands=commands)
        self._step = TrainingStep(
            self._models,
            preset=self._preset,
            config=config,
            ranks=ranks,
            should_stop=should_stop,
            reached=self._reached,
        )
        assert old_tokens is None or self._preset.bounds_old_tokens, "checked by LearnerConfig"
        self._step.old_tokens = old_tokens
        self._step.demonstration_weight = demonstration_weight
        self._step.keeps_tokens = keeps_tokens
        self._step.keeps_pulls = keeps_pulls
        weights = sum(map(whole_size, self._models.trained.parameters()))
        faster = faster_dtype(config.dtype, device=ranks.device, cpu=torch.cpu.get_capabilities(), weights=weights)
        if ranks.leads and faster != config.dtype:
            logger.info(_FASTER[faster])
        self._say_what_has_no_effect(algorithm)

    def _say_what_has_no_effect(self, algorithm: AlgorithmConfig) -> None:
        has_ratio = self._preset.samples_policy and self._preset.advantages is not None
        if not self._config.moves_within_step and has_ratio and not self._preset.moves_at_once:
            # Of the defaults nobody asked anything.
            given = [f"algo.{knob}" for knob in _CLIPPING if knob in algorithm.model_fields_set]
            if given:
                logger.info(
                    "%s: without effect, since a step makes one update, and so the ratio to the proximal policy is 1: "
                    "raise training.updates_per_step or training.epochs_per_step, or leave it out",
                    ", ".join(given),
                )

    @property
    def preset(self) -> Preset:
        """The algorithm in use."""
        return self._preset

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the policy predicts."""
        trained = self._models.trained
        assert isinstance(trained, PolicyModel), "it has logprobs of tokens"
        return trained.vocabulary

    @property
    def replays_routers(self) -> bool:
        """True if the policy's routers take the experts that generators chose, where these are told."""
        return isinstance(self._models.trained, PolicyModel) and self._models.trained.replay is not None

    @property
    def tokens(self) -> TokenValues | None:
        """The newest step's values of each token of its sequences, end to end; None if it was not kept."""
        return self._step.tokens

    @property
    def tokens_s(self) -> float:
        """CPU seconds that it took to fill `tokens`."""
        return self._step.tokens_s

    @property
    def pulls(self) -> TokenPulls | None:
        """The newest step's pull of each token of its sequences, end to end; None if it was not kept."""
        return self._step.pulls

    @property
    def updates(self) -> int:
        """Optimizer updates since the initial model; those that were left out count, too."""
        return self._updates

    def train_step(
        self, sequences: Sequence[TrainSequence], *, version: int, demonstrations: Sequence[TrainSequence] = ()
    ) -> StepMetrics:
        """Takes a step on the whole batch, which only rank 0 gives: its updates, then means over all ranks.

        `version` is the learner's version before the step; it only labels the command. `demonstrations` are trained
        beside the batch. Raises TrainingStopped.
        """
        *earlier, last = self._parts(sequences) if self._config.partial_batches else [sequences]
        self._compute(earlier, version=version)
        self._begun = []
        self._tell(RankCommand(action="train_step", version=version, path=_SHOWN if demonstrations else ""))
        return self._train_step(flatten(last), flatten(demonstrations) if demonstrations else None)

    def begin_step(self, sequences: Sequence[TrainSequence], *, version: int) -> None:
        """Computes what it can of the next step, with `partial_batches`: `sequences` are those of its first groups, in
        training order, and with them those of earlier calls. Should they not be, or the step turn out to begin with
        others, what was computed is discarded, and computed anew. Raises TrainingStopped.
        """
        self._compute(self._parts(sequences)[:-1], version=version)

    def discard_step(self) -> None:
        """Forgets what was begun of the next step."""
        if self._begun:
            self._tell(RankCommand(action="discard_parts"))
            self._begun = []
            self._step.discard()

    def host_copy(
        self, *, bucket_bytes: int = 0, part: WeightPart = "merged", shared: bool = False, mapped: bool = False
    ) -> WeightSnapshot:
        """The weights as of now in `publish_dtype`, on rank 0's CPU, or `shared`: some of them on that of each rank,
        which sends them itself. Later steps do not change the copy. What rank 0 has all of may be `mapped`: in memory
        that generators of its host can map.

        They lie in buckets of about `bucket_bytes`; 0: each in memory of its own. `part` is as in the function of this
        name. Raises NotFinite for weights that are not finite.
        """
        order = self._copies.order(bucket_bytes=bucket_bytes, part=part, shared=shared, mapped=mapped)
        self._tell(RankCommand(action="host_copy", path=order.to_text()))
        return self._host_copy(order)

    @property
    def why_merged(self) -> str:
        """Reason why its adapters cannot be sent alone; empty if they can. For a policy with adapters."""
        trained = self._models.trained
        assert isinstance(trained, PolicyModel), "generators sample from a policy"
        return why_merged(trained.causal_lm, self._config.lora)

    def probe_logprobs(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Logprobs at temperature 1, in nats, of the tokens 1… of each text by the present weights, end to end.

        Raises NotFinite if one is not: no generator is to blame for what the learner itself cannot compute.
        """
        self._tell(RankCommand(action="probe", path=json.dumps([list(text) for text in texts])))
        return check_probe(self._probe(texts))

    def save(self, directory: Path) -> None:
        """Writes model, optimizer, progress of the schedule and random states; each rank writes its part.

        Returns when all parts are written. Raises OSError, on every rank, when one cannot write its own; NotFinite
        instead of writing weights that are not finite.
        """
        self._tell(RankCommand(action="save", path=str(directory)))
        self._save(directory)

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copies what `save` would write. The files are there when the function returned has been called, in any thread
        and while training goes on; it raises OSError if a rank could not write its part. Of one save after the other.
        """
        self._tell(RankCommand(action="begin_save", path=str(directory)))
        return self._begin_save(directory).finish

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote with the same ZeRO stage and types, by however many ranks.

        Raises FileNotFoundError, and ValueError for what it cannot continue.
        """
        self._tell(RankCommand(action="load", path=str(directory)))
        self._load(directory)

    def export(self, directory: Path) -> None:
        """Writes a Hugging Face model directory with the initial model's tokenizer, and the run's chat template."""
        snapshot, trained, source = self.host_copy(), self._models.trained, self._source
        if isinstance(trained, PolicyModel):
            write_model_directory(snapshot, causal_lm=trained.causal_lm, source=source, destination=directory)
        else:
            save_score_model(snapshot, model=trained, source=source, destination=directory)

    def outputs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """Output of the model as it stands for each sequence, at its trained tokens: logprobs, or scores.

        Only rank 0 gives the sequences.
        """
        self._tell(RankCommand(action="outputs"))
        return self._split(sequences, self._step.outputs(share_batch(flatten(sequences)), reference=False))

    def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        """Logprobs by the reference, for each sequence at its trained tokens. Only rank 0 gives the sequences."""
        self._tell(RankCommand(action="reference"))
        return self._split(sequences, self._step.outputs(share_batch(flatten(sequences)), reference=True))

    def average_scores(self, sequences: Sequence[TrainSequence], *, top: int) -> list[TeacherScores]:
        """Scores of each sequence behind its first token by the average of the policy: 0 where nothing is trained.

        Only rank 0 gives the sequences. `top` of its likeliest tokens are told in each place, 0 for none.
        """
        self._tell(RankCommand(action="average", path=str(top)))
        batch = share_batch(flatten(sequences))
        found = self._step.average_outputs(batch, top=top)
        rows = [slice(start + 1, start + length) for start, length in zip(batch.starts, batch.lengths, strict=True)]
        return [
            TeacherScores(
                found.logprobs[at],
                _AVERAGE,
                TeacherTopTokens(found.top_token_ids[at].astype(np.int32), found.top_logprobs[at]) if top else None,
            )
            for at in rows
        ]

    def sketches(
        self, sequences: Sequence[TrainSequence], *, units: Sequence[int], parts: Sequence[int]
    ) -> NDArray[np.float64]:
        """Sketch of each unit's share in the gradient of its part, [U, D], by the weights as they are.

        `units` is the unit of each sequence, `parts` the part of each unit; a part's loss is that of an update of its
        own. Training goes on as without it, to the last digit. Raises TrainingStopped.
        """
        self._tell(RankCommand(action="sketches", path=json.dumps([list(units), list(parts)])))
        return self._sketches(flatten(sequences), [list(units), list(parts)])

    def follow(self) -> None:
        """On the ranks other than 0: takes part in whatever rank 0 does, until it closes."""
        while (command := self._commands.receive()).action != "stop":
            try:
                self._obey(command)
            except TrainingStopped:
                logger.info("rank %d left a step that was stopped", self._ranks.rank)
            except (OSError, NotFinite) as error:
                if isinstance(error, OSError) and command.action not in _ALIKE_ON_DISKS:
                    logger.error(
                        "rank %d ends, since %s failed on it alone: %s", self._ranks.rank, command.action, error
                    )
                    raise
                # Rank 0 has one, too, and says what follows from it.
                logger.warning("rank %d: %s of %s: %s", self._ranks.rank, command.action, command.path, error)
        self._copies.close()
        self._models.close()

    def close(self) -> None:
        """Ends the other ranks' `follow`, and releases the model. The process group stays open."""
        self._commands.stop()
        self._copies.close()
        self._models.close()

    def _obey(self, command: RankCommand) -> None:
        if command.action == "train_step":
            self._train_step(None, None, shown=command.path == _SHOWN)
        elif command.action in ("add_part", "discard_parts"):
            self._step.discard() if command.action == "discard_parts" else self._add_part(None)
        elif command.action == "host_copy":
            self._host_copy(CopyOrder.from_text(command.path))
        elif command.action in ("outputs", "reference", "average"):
            self._look(command)
        elif command.action == "sketches":
            self._sketches(None, json.loads(command.path))
        elif command.action == "probe":
            self._probe(json.loads(command.path))
        elif command.action == "save":
            self._save(Path(command.path))
        elif command.action == "begin_save":
            self._begin_save(Path(command.path))
        elif command.action == "load":
            self._load(Path(command.path))

    def _look(self, command: RankCommand) -> None:
        if command.action == "average":
            self._step.average_outputs(share_batch(None), top=int(command.path))
        else:
            self._step.outputs(share_batch(None), reference=command.action == "reference")

    def _host_copy(self, order: CopyOrder) -> WeightSnapshot:
        copy = self._copies.take(order)
        if order.shared:
            check_shares(copy)
        else:
            check_snapshot(copy)
        return self._copies.with_shares(order, copy)

    def _reached(self, place: str) -> None:
        self._commands.place = f"{self._commands.place.partition(',')[0]}, {place}"

    def _tell(self, command: RankCommand) -> None:
        self._commands.send(command)

    @staticmethod
    def _split(sequences: Sequence[TrainSequence], values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        ends = np.cumsum([len(sequence.token_ids) for sequence in sequences])[:-1]
        parts = np.split(values, ends)
        return [part[sequence.loss_mask] for part, sequence in zip(parts, sequences, strict=True)]

    def _train_step(
        self, given: FlatBatch | None, demonstrations: FlatBatch | None, *, shown: bool = False
    ) -> StepMetrics:
        """`shown`: rank 0 has demonstrations, too."""
        batch = share_batch(given)
        if shown or demonstrations is not None:
            demonstrations = share_batch(demonstrations)
        self._step.check_routing(batch)
        metrics = self._step.run(batch, first_update=self._updates, demonstrations=demonstrations)
        self._updates += metrics.updates
        for follower in (self._models.reference, self._models.average):
            if follower is not None:
                follower.after_step()
        return metrics

    def _parts(self, sequences: Sequence[TrainSequence]) -> list[Sequence[TrainSequence]]:
        return parts_of(sequences, tokens=self._config.microbatch_tokens * self._ranks.count)

    def _compute(self, parts: Sequence[Sequence[TrainSequence]], *, version: int) -> None:
        """Computes the first parts of the next step, but for those that are computed already."""
        if not all(map(_is_same, parts, self._begun)) or len(parts) < len(self._begun):
            logger.info("what was begun of step %d is computed again: one of its groups was withdrawn", version + 1)
            self.discard_step()
        for part in parts[len(self._begun) :]:
            begun, self._begun = self._begun, []  # of what is stopped in the middle nothing is left
            self._tell(RankCommand(action="add_part", version=version))
            self._add_part(flatten(part))
            self._begun = [*begun, part]

    def _add_part(self, given: FlatBatch | None) -> None:
        batch = share_batch(given)
        self._step.check_routing(batch)
        self._step.add(batch)

    def _sketches(self, given: FlatBatch | None, places: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        units, parts = (np.array(each, dtype=np.int64) for each in places)
        return self._step.sketches(share_batch(given), units=units, parts=parts)

    def _probe(self, texts: Sequence[Sequence[int]]) -> list[float]:
        assert min(map(len, texts)) > 1, "a text of one token has no logprobs"
        batch = flatten(
            [
                TrainSequence.supervised(token_ids=np.array(text, dtype=np.int32), loss_mask=np.arange(len(text)) > 0)
                for text in texts
            ]
        )
        row = np.arange(len(texts), dtype=np.int64)
        microbatch = pack(batch, row, prefixes=shared_prefixes(batch)).to(self._ranks.device)
        policy = self._models.trained
        assert isinstance(policy, PolicyModel), "generators sample from a policy"
        # The generators' logprobs of given tokens are those at temperature 1, whatever they sample at.
        with torch.no_grad(), policy.at_temperature(1.0):
            logprobs = self._models.engine.forward(microbatch)[0]
        return [float(logprob) for logprob in logprobs.float().cpu()]

    def _begin_save(self, directory: Path) -> PartsOfRanks:
        if self._saving is not None:
            self._saving.join()
        self._saves += 1
        if self._saves_store is None and self._ranks.count > 1:
            self._saves_store = self._commands.another_store()
        files = DeferredFiles(copying=self._ranks.on_host)
        self._save(directory, later=files)
        self._saving = PartsOfRanks(files, directory, ranks=self._ranks, store=self._saves_store, number=self._saves)
        return self._saving

    def _save(self, directory: Path, *, later: DeferredFiles | None = None) -> None:
        if any_rank(not self._models.has_finite_weights()):
            raise NotFinite(f"the learner's weights are not finite: they are not written to {directory}")
        error = _error_of(partial(self._save_progress, directory, later), directory=directory)
        raise_on_all(error, directory=directory)
        self._models.save(directory, later=later)  # rank 0 goes on when every rank's part is there

    def _save_progress(self, directory: Path, later: DeferredFiles | None) -> None:
        """Saves what no other rank takes part in."""
        directory.mkdir(parents=True, exist_ok=True)
        save_random_state(_random_state(directory, self._ranks.rank), device=self._ranks.device)
        for follower in (self._models.reference, self._models.average):
            if follower is not None:
                follower.save(directory, leads=self._ranks.leads, later=later)
        if self._models.engine.alignment is not None:
            self._models.engine.alignment.save(directory, rank=self._ranks.rank, later=later)
        if self._ranks.leads:
            progress = {
                "updates": self._updates,
                "skipped_in_row": [engine.skipped_in_row for engine in self._models.engines],
                "carried": asdict(self._step.carried),
            }
            (directory / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")

    def _load(self, directory: Path) -> None:
        progress = directory / PROGRESS_FILE
        wrote = max(len(list(directory.glob(_random_state(directory, "*").name))), 1)
        state = _random_state(directory, self._ranks.rank % wrote)
        missing = next((FileNotFoundError(_missing(part)) for part in (progress, state) if not part.is_file()), None)
        raise_on_all(missing, directory=directory, did="read")
        if self._ranks.leads and wrote != self._ranks.count:
            logger.info("%s is of %d ranks, and is taken up by %d", directory, wrote, self._ranks.count)
        self._models.load(directory)
        error = _error_of(partial(self._load_progress, progress, state), directory=directory, done="read")
        raise_on_all(error, directory=directory, did="read")
        if self._ranks.rank >= wrote:
            draw_apart(self._ranks.rank)

    def _load_progress(self, progress: Path, state: Path) -> None:
        """Loads what no other rank takes part in."""
        load_random_state(state, device=self._ranks.device)
        if self._models.engine.alignment is not None:
            self._models.engine.alignment.load(progress.parent, rank=self._ranks.rank, device=self._ranks.device)
        found = json.loads(progress.read_text(encoding="utf-8"))
        self._updates = int(found["updates"])
        in_row = [*found.get("skipped_in_row", ()), 0, 0]  # older checkpoints say nothing of it
        for engine, skipped in zip(self._models.engines, in_row, strict=False):
            engine.skipped_in_row = int(skipped)
        self._step.carried = _carried(found.get("carried", {}))
