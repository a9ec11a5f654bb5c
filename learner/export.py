"""A checkpoint as a Hugging Face folder: the whole model, or its low-rank adapters by themselves, as peft keeps them.

    checkpoint (DeepSpeed's files, of any ZeRO stage and number of ranks) ─┬▶ model: the file that the run would have
    initial model (config, tokenizer, weights under adapters) ─────────────┘  written had it ended there, bit for bit

No rank, no optimizer and no GPU is needed. The run's folder is only read.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from learner.config import LearnerConfig
from learner.journal.checkpoints import Checkpoint, checkpoints_of
from learner.training.adapters import ADAPTER, Targets, is_renamed_by_peft, merged_weights, peft_config
from learner.training.config import TrainingConfig
from learner.training.models import new_policy, new_score_model
from learner.training.policy import PolicyModel, TextFiles, host_copy, write_model_directory
from learner.training.saved_parts import saved_weights
from learner.training.score_model import ScoreModel, save_score_model
from learner.training.trainer import NotFinite, check_snapshot
from protocol.rewards import REWARD_INPUT_FILE
from services.config import made_with
from services.model_folder import fingerprint_directory
from services.process import WrongSettings
from services.run_lock import holder_of

logger = logging.getLogger(__name__)

Trained = PolicyModel | ScoreModel


class SavedModel:
    """A model of a checkpoint, on the CPU, whose weights are had as those of one that is trained."""

    def __init__(self, model: Trained, saved: Mapping[str, Tensor]) -> None:
        """`saved` by the names of `model`. Raises WrongSettings if it lacks what was trained, or has other things."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        there = {id(parameters[name]) for name in saved if name in parameters}  # tied ones have several names
        absent = [name for name, each in parameters.items() if each.requires_grad and id(each) not in there]
        other = [name for name in saved if name not in parameters and name not in dict(model.named_buffers())]
        other += [name for name, each in parameters.items() if name in saved and each.shape != saved[name].shape]
        if absent or other:
            raise WrongSettings(
                f"the checkpoint is not of this model: {(absent or other)[0]} is {'missing' if absent else 'another'} "
                "there; is the initial model still that of the run?"
            )
        for name in parameters.keys() & saved.keys():
            parameters[name].data.copy_(saved[name])
        self._model = model
        self._masters = {id(parameters[name]): saved[name] for name in parameters.keys() & saved.keys()}

    @property
    def model(self) -> nn.Module:
        """Adapters included."""
        return self._model

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """They are whole."""
        return nullcontext()

    def master_weight(self, parameter: nn.Parameter) -> Tensor:
        """In float32 if it was trained."""
        return self._masters.get(id(parameter), parameter.detach())


def export(config: LearnerConfig, source: Path, destination: Path, *, merged: bool) -> tuple[Path, str]:
    """Writes the checkpoint `source`, or the newest one of the run `source`, as a new folder. `config` is the run's.

    Returns the checkpoint and what was written. Of a run with adapters these alone are written, unless `merged`. Raises
    WrongSettings for what cannot be exported, with what to do; then no folder is left.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise WrongSettings(f"{destination} exists already, and is not overwritten: name another folder, or remove it")
    checkpoint = _checkpoint(source)
    _check_initial_model(config, checkpoint)
    draft = destination.with_name(f"{destination.name}.draft-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        kind = _write(config, checkpoint, draft, merged=merged)
        if destination.exists():
            destination.rmdir()
        draft.rename(destination)
    except OSError as error:
        raise WrongSettings(f"cannot write {destination}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return checkpoint.path, kind


def _write(config: LearnerConfig, checkpoint: Checkpoint, folder: Path, *, merged: bool) -> str:
    saved, source = _saved(checkpoint), TextFiles(config.model, config.run.template_text)
    model = _initial(config.model, config.training, scores=any(name.startswith(ScoreModel.PREFIX) for name in saved))
    whole = SavedModel(model, saved)
    if config.training.lora.enabled and not merged:
        if isinstance(model, ScoreModel):
            raise WrongSettings("a reward model's head is trained beside its adapters: export it with --merged")
        write_adapters(whole, model, config=config, folder=folder)
        source.copy_template_to(folder)
        return "adapters"
    try:
        snapshot = check_snapshot(host_copy(whole, dtype=config.training.publish_dtype, keep=True))
    except NotFinite as error:
        raise WrongSettings(f"{checkpoint.path} is not exported: {error}") from error
    if isinstance(model, PolicyModel):
        write_model_directory(snapshot, causal_lm=model.causal_lm, source=source, destination=folder)
        return "model"
    save_score_model(snapshot, model=model, source=source, destination=folder)
    for place in (checkpoint.path.parent, config.exported_model):
        if (place / REWARD_INPUT_FILE).exists():
            shutil.copy2(place / REWARD_INPUT_FILE, folder / REWARD_INPUT_FILE)
            break
    return "reward model"


def _saved(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    try:
        return saved_weights(checkpoint.trainer)
    except (OSError, ValueError) as error:
        raise WrongSettings(f"{checkpoint.path} cannot be read: {error}; export another checkpoint") from error


def _initial(path: Path, training: TrainingConfig, *, scores: bool) -> Trained:
    if scores:
        return new_score_model(path, config=training)
    return new_policy(path, config=training, entropy=(False, False), adapted=training.lora.enabled)


def _checkpoint(source: Path) -> Checkpoint:
    """The one named, or the newest whole one of a run that has ended."""
    named = next((each for each in checkpoints_of(source.parent) if each.path == source), None)
    if named is not None:
        if fault := named.fault():
            raise WrongSettings(f"{source} cannot be used: {fault}; export another checkpoint of the run")
        return named
    found = checkpoints_of(source)
    if (holder := holder_of(source)) is not None:
        newest = f", or export a checkpoint by its folder, such as {found[-1].path}" if found else ""
        raise WrongSettings(f"the run in {source} still trains: {holder} has it. Wait for its end{newest}")
    whole = [each for each in reversed(found) if each.fault() is None]
    if not whole:
        there = (
            f"its model at the end is in {source / 'model'}, a Hugging Face folder"
            if (source / "model").is_dir()
            else "checkpoint.every_steps of its run.toml says how often one is written"
        )
        raise WrongSettings(f"{source} holds no {'whole ' if found else ''}checkpoint to export; {there}")
    return whole[0]


def _check_initial_model(config: LearnerConfig, checkpoint: Checkpoint) -> None:
    path = config.model
    if not (path / "config.json").is_file():
        raise WrongSettings(
            f"the initial model of the run, {path}, is not there; config, tokenizer and what was not trained are taken "
            "from it: give its folder with --model"
        )
    known = made_with.read(checkpoint.path.parent).get("settings", {}).get("model_fingerprint")
    if known is not None and fingerprint_directory(path).model != known:
        raise WrongSettings(f"{path} is not the initial model of the run: its config.json is another; give --model")


def write_adapters(whole: SavedModel, model: PolicyModel, *, config: LearnerConfig, folder: Path) -> None:
    """Writes the adapters of `model`, with the weights of `whole`, into an empty folder as peft reads them."""
    settings = peft_config(config.training.lora, targets=_targets(model.causal_lm))
    settings.task_type, settings.inference_mode = "CAUSAL_LM", True
    if settings.target_parameters:
        settings.lora_dropout = 0.0  # peft refuses another beside them; it is of training alone
    settings.base_model_name_or_path, settings.revision = _name_of(config.model)
    settings.save_pretrained(folder)
    save_file(dict(_factors(whole, model.causal_lm)), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")


def _name_of(model: Path) -> tuple[str, str | None]:
    """The name and revision on the hub of a folder in its cache; of another folder its path."""
    kind, _, name = model.parent.parent.name.partition("--")
    if model.parent.name == "snapshots" and kind == "models":
        return name.replace("--", "/"), model.name
    return str(model.resolve()), None


def _factors(whole: SavedModel, causal_lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in causal_lm.named_parameters():
        if parameter.requires_grad:
            plain = name.replace(f".{ADAPTER}.", ".")
            yield f"base_model.model.{plain}", whole.master_weight(parameter).float().contiguous().clone()


def _targets(causal_lm: nn.Module) -> Targets:
    """Targets as others name them, by the layers' last names, where these mean no other layer.

    A linear layer of a name that peft would take for experts' is one of the parameters, by the name of its weight: the
    adapter is computed and called the same.
    """
    weights = list(merged_weights(causal_lm))
    experts = [each.name for each in weights if each.adapter is not None and each.parameter.dim() == 3]
    layers = {each.name.removesuffix(".weight"): each.adapter is not None for each in weights}
    adapted = [name for name, is_adapted in layers.items() if is_adapted and name not in experts]
    renamed = {last for last in map(_last, adapted) if is_renamed_by_peft(causal_lm, last)}
    short = set(map(_last, adapted)) - renamed
    named = [name for name in adapted if _last(name) in short]
    alike = all(layers[name] and name not in experts for name in layers if _last(name) in short)
    parameters = [f"{name}.weight" for name in adapted if _last(name) in renamed]
    return Targets(sorted(short) if alike else named, parameters + experts)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def behind(source: Path, checkpoint: Path) -> str:
    """A note where the run went on beyond its newest checkpoint; else nothing."""
    try:
        steps = json.loads((source / "summary.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError):
        return ""
    version = int(checkpoint.name.rpartition("-")[2])
    if checkpoint.parent != source or steps <= version:
        return ""
    return f"note: the run ended at step {steps}; its whole model of then is in {source / 'model'}\n"
