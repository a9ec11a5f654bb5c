"""Lives of training runs, each on other ranks: `ranks_of_a_resume.py FOLDER COUNTS CONFIGS...`.

COUNTS is the number of ranks in each life, as `1,2,4`. CONFIGS is for each life a list of configs in JSON, one for each
run. In a life every rank takes up what the one before wrote, to FOLDER/life/run, and goes on; rank 0 writes what there
was, and what came of it. The ranks are forked from one process, which has imported everything and does nothing else.
"""

import gc
import json
import multiprocessing
import socket
import sys
from multiprocessing.connection import wait
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from learner.algorithms.presets.ppo import PpoConfig
from learner.journal.manifest import write_manifest
from learner.training.config import LoraConfig, TrainingConfig
from learner.training.deepspeed_setup import deepspeed
from learner.training.policy import host_copy
from learner.training.ranks import CommandChannel, Ranks, close_process_group, die_with_parent, open_process_group
from learner.training.reference import Reference, open_reference
from learner.training.trainer import Trainer
from tests.learner.training.engine_parts import Parts, config_with, frozen_policy, microbatch, open_parts, update
from tests.learner.training.tiny_model import VOCABULARY, random_sequences

ROW = microbatch(random_sequences(8, seed=9))
SEEN = "seen.safetensors"
TRAINER = config_with(zero_stage=3, lora={"rank": 4, "alpha": 8.0, "dropout": 0.5})


def write_uneven_llama(path: Path) -> Path:
    """Norms of 10 weights and matrices of 100010, which neither 4 ranks share evenly nor ZeRO-3 keeps whole."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=10,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=10001,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def live(model: Path, *, config: TrainingConfig, ranks: Ranks, start: Path | None, folder: Path) -> None:
    """Two steps, or what a former life wrote to `start`; that is written to `folder`, and two more steps follow."""
    parts = open_parts(model, config)
    plain = config.model_copy(update={"lora": LoraConfig()})
    reference = open_reference(
        parts.policy, engine=parts.engine, config=config, load=lambda: frozen_policy(model, plain)
    )
    if start is None:
        steps(parts, reference, ranks, seeds=(1, 2))
    else:
        parts.engine.load(start)
        reference.load(start)
    seen = state_of(parts, ranks)
    if config.reference.mode != "initial":
        seen["logprobs"] = reference.logprobs(ROW)
    folder.mkdir(parents=True, exist_ok=True)
    parts.engine.save(folder)
    reference.save(folder, leads=ranks.leads)
    steps(parts, reference, ranks, seeds=(3, 4))
    seen |= {f"trained.{name}": value for name, value in weights_of(parts, ranks).items()}
    if ranks.leads:
        save_file(seen, folder / SEEN)
        write_manifest(folder, version=2, journal="")
    parts.engine.close()


def live_as_a_trainer(folder: Path, *, ranks: Ranks, commands: CommandChannel, life: int) -> None:
    """A policy with dropout and its critic: two steps, or what the life before wrote; that is written."""
    trainer = Trainer(folder / "model", algorithm=PpoConfig(), config=TRAINER, ranks=ranks, commands=commands)
    if not ranks.leads:
        trainer.follow()
        return
    if life:
        trainer.load(folder / str(life - 1) / "trainer")
    else:
        for version in range(2):
            trainer.train_step(random_sequences(8, seed=version), version=version)
    trainer.save(folder / str(life) / "trainer")
    trainer.train_step(random_sequences(8, seed=2), version=2)
    trainer.close()


def steps(parts: Parts, reference: Reference, ranks: Ranks, *, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        reference.logprobs(ROW)
        update(parts, random_sequences(8, seed=seed)[ranks.rank :: ranks.count])
        reference.after_step()


def weights_of(parts: Parts, ranks: Ranks) -> dict[str, Tensor]:
    copy = host_copy(parts.engine, dtype="float32", keep=ranks.leads)
    return {f"weights.{tensor.name}": tensor.value for tensor in copy.tensors}


def state_of(parts: Parts, ranks: Ranks) -> dict[str, Tensor]:
    """The weights as they are published, and the optimizer's state of each as DeepSpeed itself puts it together."""
    found = weights_of(parts, ranks)
    link = getattr(parts.engine._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:  # the optimizer of bfloat16 finds its means by weight from its first step on
        link()
    for name, parameter in parts.policy.named_parameters():
        if parameter.requires_grad:
            with parts.engine.gathered([parameter]):
                found[f"master.{name}"] = parts.engine.master_weight(parameter).clone()
            found |= {f"{kind}.{name}": value.clone() for kind, value in means_of(parts, parameter).items()}
    steps = {float(state["step"]) for state in parts.engine._engine.basic_optimizer.state.values() if "step" in state}
    return {**found, "updates": torch.tensor(sorted(steps))}


def means_of(parts: Parts, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    if parts.engine.zero_stage == 0:
        state = parts.engine._engine.basic_optimizer.state[parameter]
        return {kind: value for kind, value in state.items() if value.dim()}
    whole = deepspeed.utils.safe_get_full_optimizer_state
    return {kind: whole(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}


def rank_of_a_life(ranks: Ranks, listener: socket.socket, folder: Path, life: int, texts: list[str]) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    commands = open_process_group(ranks, timeout_s=300, listener=listener if ranks.leads else None)
    live_as_a_trainer(folder, ranks=ranks, commands=commands, life=life)
    for run, text in enumerate(texts):
        live(
            folder / "model",
            config=TrainingConfig.model_validate_json(text),
            ranks=ranks,
            start=folder / str(life - 1) / str(run) if life else None,
            folder=folder / str(life) / str(run),
        )
    close_process_group()


def main() -> None:
    folder, counts = Path(sys.argv[1]), list(map(int, sys.argv[2].split(",")))
    fork = multiprocessing.get_context("fork")
    gc.freeze()  # DeepSpeed collects garbage several times an engine, among all that was imported
    for life, (count, texts) in enumerate(zip(counts, map(json.loads, sys.argv[3:]), strict=True)):
        listener = socket.create_server(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        places = [Ranks(rank=rank, count=count, local_rank=rank, port=port, on_host=count) for rank in range(count)]
        children = [
            fork.Process(target=rank_of_a_life, args=(place, listener, folder, life, texts)) for place in places
        ]
        for child in children:
            child.start()
        listener.close()
        left = list(children)
        while left:
            wait([child.sentinel for child in left])
            if any(child.exitcode for child in children):
                for child in children:
                    child.kill()  # it would wait for the one that is gone
                sys.exit(f"a rank of life {life} failed")
            left = [child for child in left if child.exitcode is None]


if __name__ == "__main__":
    main()
