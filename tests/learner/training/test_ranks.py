import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistError

from learner.training import ranks as ranks_module
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.ranks import (
    CommandChannel,
    RankCommand,
    Ranks,
    open_process_group,
    ranks_from_environment,
    say_begun,
)
from learner.training.saved_parts import saved_weights
from tests.learner.training.plain_adamw import plain_training
from tests.learner.training.tiny_model import random_sequences
from tests.process_ends import all_end

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, max_grad_norm=0.5)
TWO_RANKS = Path(__file__).parent / "two_ranks.py"
ROOT = Path(__file__).parents[3]
STAGES = (0, 1, 2, 3)


def test_two_ranks_train_save_and_load_like_one_at_every_zero_stage(tied_llama: Path, tmp_path: Path) -> None:
    # The last step has a single sequence, so that one of the ranks has nothing to do in it. One more step comes before
    # them, with a gradient that is not finite: as if it had not been.
    expected = plain_training(
        tied_llama, [random_sequences(20, seed=1), random_sequences(1, seed=2)], optimizer=OPTIMIZER
    )
    configs = [TrainingConfig(optimizer=OPTIMIZER, microbatch_tokens=64, zero_stage=stage) for stage in STAGES]
    texts = [config.model_dump_json(exclude_none=True) for config in configs]
    argv = [sys.executable, str(TWO_RANKS), str(tied_llama), str(tmp_path), *texts]
    subprocess.run(argv, check=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for stage in STAGES:
        seen = json.loads((tmp_path / f"{stage}.json").read_text(encoding="utf-8"))
        assert seen["losses"] == pytest.approx(expected.losses, abs=1e-5)
        assert seen["skipped"] == [1, 0, 0]
        assert seen["grad_norms"] == pytest.approx(expected.grad_norms, rel=1e-4)
        for folder in ("trained", "resumed"):
            weights = load_file(tmp_path / f"{folder}_{stage}" / "model.safetensors")
            for name, value in expected.weights.items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
        saved = saved_weights(tmp_path / f"checkpoint_{stage}")  # without the ranks that wrote it
        for name, value in load_file(tmp_path / f"saved_{stage}" / "model.safetensors").items():
            assert torch.equal(saved[f"causal_lm.{name}"], value), (stage, name)


def test_a_folder_that_is_not_shared_is_noticed_and_a_full_disk_of_one_rank_is_an_oserror_of_all(
    tied_llama: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, str(TWO_RANKS.with_name("two_ranks_on_disks.py")), str(tied_llama), str(tmp_path)]
    subprocess.run(argv, check=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)})
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert (seen["apart"], seen["together"]) == (False, True)
    assert seen["full"].startswith("[Errno 5] rank 1 could not write its part of ")
    assert seen["beside"].startswith("[Errno 5] rank 1 could not write its part of ")
    assert seen["unread"].startswith("[Errno 5] rank 1 could not read its part of ")
    assert sum("optim_states" in name for name in seen["files"]) == 2
    assert not list(tmp_path.glob("*/ranks-*")) + list(tmp_path.glob("ranks-*"))


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
    process.kill()
    process.communicate()
    assert all_end([follower]), "the follower still lives"


def test_a_place_is_read_from_the_environment_or_there_is_none() -> None:
    assert ranks_from_environment({}) is None
    ranks = ranks_from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "5"})
    assert ranks is not None
    assert (ranks.rank, ranks.count, ranks.port, ranks.leads) == (1, 2, 5, False)
    assert ranks.on_host == 2, "as the learner starts them"
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_PORT": "5", "LOCAL_WORLD_SIZE": "4"}
    of_torchrun = ranks_from_environment(place)
    assert of_torchrun is not None
    assert (of_torchrun.count, of_torchrun.on_host) == (8, 4)


def test_a_rank_that_is_behind_still_reads_every_command_and_leaves_none() -> None:
    store = HashStore()
    leader, *others = (CommandChannel(store, ranks=Ranks(rank=rank, count=3)) for rank in range(3))
    for version in range(6):  # none of them waits for anybody
        leader.send(RankCommand(action="train_step", version=version))
    for other in others:
        assert [other.receive().version for _ in range(6)] == list(range(6))
    assert store.num_keys() == 0


def test_under_torchrun_a_rank_waits_for_no_rank_0_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torchrun met one that was about to end: what it joins is the store of the next, which waits for torchrun."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(ranks_module, "_BEGINS_WITHIN", timedelta(seconds=1))

    with pytest.raises(DistError, match="rank 0 has not begun within 1 s: this host's torchrun met one that has ended"):
        open_process_group(Ranks(rank=1, count=2, port=store.port), timeout_s=30)


def test_under_torchrun_rank_0_says_that_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(ranks_module, "_BEGINS_WITHIN", timedelta(seconds=20))

    say_begun(Ranks(rank=0, count=2, port=store.port))

    # So it is past that wait, and waits for rank 0 as it always does; in a process that has no group yet.
    join = f"open_process_group(Ranks(rank=1, count=2, port={store.port}), timeout_s=1)"
    argv = [sys.executable, "-c", f"from learner.training.ranks import Ranks, open_process_group\n{join}"]
    found = subprocess.run(argv, check=False, stderr=subprocess.PIPE, text=True, timeout=100)
    assert "DistError" in found.stderr or "DistStoreError" in found.stderr
    assert "begun" not in found.stderr
