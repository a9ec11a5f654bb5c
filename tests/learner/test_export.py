"""`headway export`: what is in the folder is the trainer's model, and transformers and peft load it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headway.file_commands import export_checkpoint
from learner.config import LearnerConfig
from learner.export import SavedModel, export, write_adapters
from learner.journal.checkpoints import Checkpoints, checkpoints_of
from learner.journal.run_folder import keep_template
from learner.training.adapters import merged_weights
from learner.training.models import new_policy
from learner.training.ranks import CommandChannel, Ranks
from learner.training.saved_parts import saved_weights
from learner.training.trainer import Trainer
from protocol.rewards import RewardInput, write_reward_input
from services.config import made_with
from services.config.sources import ConfigError
from services.model_folder import chat_template
from services.process import WrongSettings
from services.run_lock import RunLock
from tests.learner.training.tiny_model import random_sequences, write_tiny_llama
from tests.learner.training.tiny_models import ARCHITECTURES, write_tiny_model

LORA = {"rank": 4, "alpha": 8.0}
TEXT = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(autouse=True)
def libraries_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their variables would stay for other tests."""
    monkeypatch.setattr("learner.command._tune_libraries", lambda config: None)


def trained(
    folder: Path, model: Path, commands: CommandChannel, *, template: Path | None = None, **training: Any
) -> tuple[LearnerConfig, list[float]]:
    """A run of two checkpoints of one step each and its model at the end, and its probe logprobs of TEXT."""
    rate = {"optimizer": {"learning_rate": 1e-2}}
    config = LearnerConfig.model_validate(
        {
            "model": model,
            "run": {"directory": folder, "name": "run", "chat_template": template},
            "training": {**rate, **training},
        }
    )
    config.run.folder.mkdir()
    made_with.write(config.run.folder, config.made_with())
    keep_template(config.run.folder, config.run.template_text)
    trainer = Trainer(
        model,
        algorithm=config.algo,
        config=config.training,
        ranks=Ranks(),
        commands=commands,
        chat_template=config.run.template_text,
    )
    for version in (1, 2):
        trainer.train_step(random_sequences(8, seed=version), version=version - 1)
        Checkpoints(config.run.folder, keep=2).write(version=version, save_trainer=trainer.save)
    trainer.export(config.exported_model)
    logprobs = trainer.probe_logprobs([TEXT])
    trainer.close()
    return config, logprobs


def logprobs_of(model: torch.nn.Module) -> list[float]:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([TEXT])).logits[0].float()
    return torch.log_softmax(logits, dim=1)[torch.arange(len(TEXT) - 1), TEXT[1:]].tolist()


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"zero_stage": 3},
        {"zero_stage": 2, "publish_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "zero_stage": 3},
        {"lora": LORA},
        {"lora": LORA, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_newest_checkpoint_is_exported_as_the_run_itself_exports_it(
    training: dict[str, Any], model: Path, tmp_path: Path, commands: CommandChannel, capsys: pytest.CaptureFixture[str]
) -> None:
    config, logprobs = trained(tmp_path, model, commands, **training)

    assert export_checkpoint([str(config.run.folder), "--to", str(tmp_path / "out"), "--merged"]) == 0

    assert "checkpoint-00000002" in capsys.readouterr().out
    theirs, ours = (load_file(each / "model.safetensors") for each in (config.exported_model, tmp_path / "out"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) and theirs[name].dtype == ours[name].dtype for name in theirs)
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        each.name for each in config.exported_model.iterdir()
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert logprobs_of(loaded) == pytest.approx(logprobs, abs=1e-5 if "dtype" not in str(training) else 0.1)


@pytest.mark.parametrize("training", [{}, {"lora": LORA}], ids=str)
def test_the_chat_template_that_a_run_was_given_is_in_what_is_exported_of_it(
    training: dict[str, Any], model: Path, tmp_path: Path, commands: CommandChannel
) -> None:
    source, file = shutil.copytree(model, tmp_path / "with-template"), tmp_path / "mine.jinja"
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "of the model"}))
    file.write_text("{{ messages }} — of the run")

    config, _ = trained(tmp_path, source, commands, template=file, **training)
    file.unlink()  # the run has kept it
    for words in (["--merged"], []):
        assert export_checkpoint([str(config.run.folder), "--to", str(tmp_path / "out"), *words]) == 0
        assert chat_template(tmp_path / "out") == "{{ messages }} — of the run"
        shutil.rmtree(tmp_path / "out")

    assert chat_template(config.exported_model) == "{{ messages }} — of the run"
    settings = json.loads((config.exported_model / "tokenizer_config.json").read_text())
    assert settings == {"eos_token": "</s>"}, "another template beside it would be taken by some"
    assert chat_template(source) == "of the model"


def piece(start: int, numel: int) -> object:
    return fragment_address(start=start, numel=numel)


def test_pieces_of_two_ranks_in_bfloat16_are_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed"
    folder.mkdir()
    shapes = [{"a": torch.Size([2, 2]), "b": torch.Size([2])}]
    torch.save({"param_shapes": shapes, "dp_world_size": 2}, folder / "mp_rank_00_model_states.pt")
    # Rank 0 has three numbers of a; rank 1 its last one and b.
    pieces = (
        ([1.0, 2.0, 3.0], {"a": piece(0, 3)}),
        ([4.0, 5.0, 6.0], {"a": piece(0, 1), "b": piece(1, 2)}),
    )
    for rank, (flat, places) in enumerate(pieces):
        if rank == 1:
            with pytest.raises(ValueError, match="parts of 1 ranks, and 2 wrote it"):
                saved_weights(tmp_path)
        states = {"base_optimizer_state": {"state": {}}, "single_partition_of_fp32_groups": [torch.tensor(flat)]}
        torch.save(
            {"optimizer_state_dict": {**states, "param_slice_mappings": [places]}},
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    saved = saved_weights(tmp_path)
    assert {name: value.tolist() for name, value in saved.items()} == {"a": [[1.0, 2.0], [3.0, 4.0]], "b": [5.0, 6.0]}


@pytest.mark.parametrize("targets", [["all-linear"], ["v_proj", "layers.1.mlp.up_proj"]], ids=["all", "some"])
def test_adapters_by_themselves_are_loaded_by_peft(
    targets: list[str], model: Path, tmp_path: Path, commands: CommandChannel
) -> None:
    config, logprobs = trained(tmp_path, model, commands, lora={**LORA, "targets": targets})

    assert export_checkpoint([str(config.run.folder), "--to", str(tmp_path / "out")]) == 0

    assert {each.name for each in (tmp_path / "out").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "out" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(model)
    assert logprobs_of(base) != pytest.approx(logprobs, abs=1e-3)
    assert logprobs_of(peft.PeftModel.from_pretrained(base, tmp_path / "out")) == pytest.approx(logprobs, abs=1e-5)
    settings = peft.PeftConfig.from_pretrained(str(tmp_path / "out"))
    assert settings.base_model_name_or_path == str(model)


@pytest.mark.parametrize("name", ["qwen3 moe", "gpt-oss"])
def test_adapters_of_experts_are_loaded_by_peft_and_merged_by_export(
    name: str, tmp_path: Path, commands: CommandChannel
) -> None:
    model = write_tiny_model(name, tmp_path / "model")
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    config, logprobs = trained(tmp_path, model, commands, lora=LORA)

    for folder, words in (("adapters", []), ("merged", ["--merged"])):
        assert export_checkpoint([str(config.run.folder), "--to", str(tmp_path / folder), *words]) == 0

    assert any("experts" in each for each in load_file(tmp_path / "adapters/adapter_model.safetensors"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert logprobs_of(merged) == pytest.approx(logprobs, abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model)
    assert logprobs_of(base) != pytest.approx(logprobs, abs=1e-3)
    assert logprobs_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapters")) == pytest.approx(logprobs, abs=1e-5)


_MIXTURES = [
    name
    for name, (_, traits) in ARCHITECTURES.items()
    if any("expert" in trait for trait in traits) and name != "phimoe"  # which is refused
]


@pytest.mark.parametrize(
    ("name", "lora"),
    [(name, LORA) for name in _MIXTURES]
    + [("qwen3-next", {**LORA, "dropout": 0.1}), ("deepseek v3", {**LORA, "targets": ["gate_proj", "o_proj"]})],
    ids=str,
)
def test_peft_computes_of_the_adapters_of_each_mixture_what_is_published(
    name: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    model = write_tiny_model(name, tmp_path / "model")
    config = LearnerConfig.model_validate(
        {"model": model, "run": {"directory": tmp_path, "name": "run"}, "training": {"lora": lora}}
    )
    policy = new_policy(model, config=config.training, entropy=(False, False), adapted=True)
    factors = {each: value for each, value in policy.named_parameters() if value.requires_grad}
    torch.manual_seed(1)
    for value in factors.values():
        torch.nn.init.normal_(value, std=0.1)
    (tmp_path / "out").mkdir()
    write_adapters(SavedModel(policy, factors), policy, config=config, folder=tmp_path / "out")

    published, base = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    for weight in merged_weights(policy.causal_lm):
        if weight.adapter is not None:
            published.get_parameter(weight.name).data.copy_(weight.adapter.merged(weight.parameter).detach())
    expected = logprobs_of(published)
    assert logprobs_of(base) != pytest.approx(expected, abs=1e-2)
    assert logprobs_of(peft.PeftModel.from_pretrained(base, tmp_path / "out")) == pytest.approx(expected, abs=1e-4)


def test_a_checkpoint_is_exported_by_its_folder_also_while_the_run_goes_on_and_after_its_model_was_moved(
    model: Path, tmp_path: Path, commands: CommandChannel, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = trained(tmp_path, write_tiny_llama(tmp_path / "model", tied=True), commands)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    first = config.run.folder / "checkpoint-00000001"
    to = ["--to", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"initial model of the run, .*model, is not there.*--model"):
        export_checkpoint([str(first), *to])

    assert export_checkpoint([str(first), *to, "--model", str(tmp_path / "elsewhere")]) == 0

    assert "checkpoint-00000001" in capsys.readouterr().out
    theirs, ours = (load_file(each / "model.safetensors") for each in (config.exported_model, tmp_path / "out"))
    assert not torch.equal(theirs["model.norm.weight"], ours["model.norm.weight"])


async def test_what_cannot_be_exported_is_said_with_what_to_do(
    model: Path, tmp_path: Path, commands: CommandChannel
) -> None:
    config, _ = trained(tmp_path, model, commands)
    run = config.run.folder

    def refused(source: Path, to: str = "out") -> str:
        with pytest.raises(ConfigError) as caught:
            export_checkpoint([str(source), "--to", str(tmp_path / to)])
        assert {each.name for each in tmp_path.iterdir()} == {"run", "there"}, "something was left behind"
        return str(caught.value)

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert "there exists already, and is not overwritten" in refused(run, to="there")
    assert "nothing is no folder" in refused(tmp_path / "nothing")
    assert "made_with.json is missing" in refused(tmp_path / "there")
    with await RunLock.held(run):
        assert "still trains" in refused(run)
        assert "export a checkpoint by its folder, such as" in refused(run)
    newest = checkpoints_of(run)[-1].path
    next((newest / "trainer").glob("random_state_0*")).unlink()
    assert "random_state_0.safetensors is missing" in refused(newest)
    for each in checkpoints_of(run):
        (each.path / "manifest.json").unlink()
    assert f"holds no whole checkpoint to export; its model at the end is in {run / 'model'}" in refused(run)
    with pytest.raises(ConfigError, match="headway export needs a run's folder"):
        export_checkpoint([str(run)])


def test_a_weight_that_the_published_type_cannot_hold_is_not_exported(
    model: Path, tmp_path: Path, commands: CommandChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Trainer.save

    def save_with_a_great_weight(trainer: Trainer, directory: Path) -> None:
        parameter = next(trainer._models.trained.parameters())
        before = parameter.data[5, 0].item()
        parameter.data[5, 0] = torch.finfo(torch.float32).max
        save(trainer, directory)
        parameter.data[5, 0] = before

    monkeypatch.setattr(Trainer, "save", save_with_a_great_weight)
    config, _ = trained(tmp_path, model, commands, publish_dtype="bfloat16")
    with pytest.raises(WrongSettings, match="is not finite as bfloat16"):
        export(config, config.run.folder, tmp_path / "out", merged=True)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_the_run_s_is_refused(model: Path, tmp_path: Path, commands: CommandChannel) -> None:
    config, _ = trained(tmp_path, model, commands)
    other = write_tiny_llama(tmp_path / "other", tied=True, intermediate=48)

    with pytest.raises(ConfigError, match="other is not the initial model of the run"):
        export_checkpoint([str(config.run.folder), "--to", str(tmp_path / "out"), "--model", str(other)])


def test_a_reward_model_is_exported_with_how_it_is_asked(model: Path, tmp_path: Path, commands: CommandChannel) -> None:
    tables = {
        "model": model, "run": {"directory": tmp_path, "name": "run"}, "algo": {"type": "rm"},
        "data": {"path": "pairs.jsonl"}, "training": {"lora": LORA},
    }  # fmt: skip
    config = LearnerConfig.model_validate(tables)
    config.run.folder.mkdir()
    made_with.write(config.run.folder, config.made_with())
    trainer = Trainer(model, algorithm=config.algo, config=config.training, ranks=Ranks(), commands=commands)
    Checkpoints(config.run.folder, keep=1).write(version=1, save_trainer=trainer.save)
    trainer.export(config.exported_model)
    trainer.close()
    write_reward_input(config.run.folder, RewardInput(format="plain", tokenize="apart"))
    to = ["--to", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="head is trained beside its adapters: export it with --merged"):
        export_checkpoint([str(config.run.folder), *to])

    assert export_checkpoint([str(config.run.folder), *to, "--merged"]) == 0

    theirs, ours = (load_file(each / "model.safetensors") for each in (config.exported_model, tmp_path / "out"))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert (tmp_path / "out" / "headway_reward.json").is_file()


def test_the_command_says_what_it_wrote(model: Path, tmp_path: Path, commands: CommandChannel) -> None:
    config, _ = trained(tmp_path, model, commands)
    (config.run.folder / "summary.json").write_text('{"steps": 3}', encoding="utf-8")
    headway = Path(sys.executable).with_name("headway")

    ended = subprocess.run(
        [str(headway), "export", str(config.run.folder), "--to", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=250, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == (
        f"{config.run.folder / 'checkpoint-00000002'} is in {tmp_path / 'out'}, as a model of Hugging Face\n"
        f"note: the run ended at step 3; its whole model of then is in {config.run.folder / 'model'}\n"
    )
    assert ended.stderr == ""
