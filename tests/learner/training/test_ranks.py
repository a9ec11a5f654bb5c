import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.algorithms.config import GrpoConfig
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.ranks import close_process_group, open_process_group, ranks_from_environment, start_followers
from learner.training.trainer import Trainer
from tests.learner.training.plain_adamw import plain_training
from tests.learner.training.tiny_model import random_sequences

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, max_grad_norm=0.5)
FOLLOWER = Path(__file__).parent / "follower.py"


def test_two_ranks_train_like_one_at_every_zero_stage(tied_llama: Path, tmp_path: Path) -> None:
    # The last step has a single sequence, so that one of the ranks has nothing to do in it.
    steps = [random_sequences(20, seed=1), random_sequences(1, seed=2)]
    expected = plain_training(tied_llama, steps, optimizer=OPTIMIZER)
    stages = (0, 1, 2, 3)
    configs = [TrainingConfig(optimizer=OPTIMIZER, microbatch_tokens=64, zero_stage=stage) for stage in stages]
    texts = [config.model_dump_json(exclude_none=True) for config in configs]
    followers = start_followers([sys.executable, str(FOLLOWER), str(tied_llama), *texts], count=2)
    commands = open_process_group(followers.ranks, timeout_s=60, listener=followers.listener)
    for config in configs:
        made = Trainer(tied_llama, algorithm=GrpoConfig(), config=config, ranks=followers.ranks, commands=commands)
        first = made.train_step(steps[0], version=0)
        made.save(tmp_path / str(config.zero_stage))
        second = made.train_step(steps[1], version=1)
        _assert_trained(made, expected.weights)
        assert [first.loss, second.loss] == pytest.approx(expected.losses, abs=1e-5)
        assert [first.grad_norm, second.grad_norm] == pytest.approx(expected.grad_norms, rel=1e-4)
        made.load(tmp_path / str(config.zero_stage))
        made.train_step(steps[1], version=1)
        _assert_trained(made, expected.weights)
        made.export(tmp_path / f"export_{config.zero_stage}")
        made.close()
    close_process_group()
    followers.close()
    assert [child.returncode for child in followers.processes] == [0]


def _assert_trained(made: Trainer, expected: dict[str, torch.Tensor]) -> None:
    for tensor in made.host_copy().tensors:
        torch.testing.assert_close(tensor.value, expected[tensor.name], rtol=0, atol=1e-5)


def test_a_follower_does_not_outlive_rank_0() -> None:
    # The middle process starts a follower that would sleep for a minute, tells its number, and ends.
    leader = (
        "import sys; from learner.training.ranks import start_followers;"
        "code = 'from learner.training.ranks import die_with_parent; die_with_parent();"
        " print(1, flush=True); import time; time.sleep(60)';"
        "followers = start_followers([sys.executable, '-c', code], count=2);"
        "print(followers.processes[0].pid, flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", leader], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    follower = int(next(line for line in lines if line != "1"))
    handle = os.pidfd_open(follower)
    process.kill()
    process.communicate()
    import select

    poller = select.poll()
    poller.register(handle, select.POLLIN)
    assert poller.poll(10_000), "the follower still lives"
    os.close(handle)


def test_a_place_is_read_from_the_environment_or_there_is_none() -> None:
    assert ranks_from_environment({}) is None
    ranks = ranks_from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "5"})
    assert ranks is not None
    assert (ranks.rank, ranks.count, ranks.port, ranks.leads) == (1, 2, 5, False)
