"""A server of the Tinker API with two ranks, as processes of their own, and the unmodified SDK as its client."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from learner.tenants.keys import first_key_path
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_operations import AdamStep, AdapterShape, ClientDatum, ForwardBackward, OperationResult
from tests.e2e.processes import Launcher, marked, until
from tests.e2e.run_files import free_ports
from tests.e2e.tinker_serving import NAME, client, is_ready
from tests.learner.tenants.tiny import make_tiny_model
from tests.protocol.tinker.sdk import sdk_python

STEPS = 6
KILLED_AFTER = 2


@pytest.mark.timeout(900)
def test_a_client_hears_of_two_ranks_what_one_says_though_one_of_them_is_killed(
    launcher: Launcher, tmp_path: Path
) -> None:
    sdk_python()
    make_tiny_model(tmp_path / NAME)
    token = tmp_path / "token"
    token.write_text("of-the-generators")
    token.chmod(0o600)
    (port,) = free_ports(1)
    learner = launcher(
        "learner", "--model", str(tmp_path / NAME), "--tinker.enabled", "true", "--tinker.base-model", NAME,
        "--http.port", str(port), "--http.token-file", str(token), "--run.directory", str(tmp_path / "runs"),
        "--run.name", "r", "--ranks", "2",
    )  # fmt: skip
    told = {"TINKER_BASE_URL": f"http://127.0.0.1:{port}"}
    until(lambda: is_ready(told), what="the learner", timeout_s=600, during=(learner,))
    told["TINKER_API_KEY"] = first_key_path(tmp_path / "runs" / "r" / "tinker-keys.json").read_text().strip()
    with client("trained.py", told, told["TINKER_BASE_URL"], NAME, str(STEPS)) as running:
        assert running.stdout is not None
        while running.stdout.readline() != f"step {KILLED_AFTER}\n":
            assert running.poll() is None, learner.text()
        (other,) = set(marked(launcher.mark)) - {learner.pid}
        os.kill(other, signal.SIGKILL)
        said, complaints = running.communicate(timeout=600)
    assert running.returncode == 0, complaints[-3000:]
    assert "rank 1 was killed by SIGKILL" in learner.text()
    assert "starting again (1 of 5)" in learner.text()

    report = json.loads(said.splitlines()[-1])
    for name, rank in report["ranks"].items():
        losses, norms = on_one_rank(tmp_path / NAME, report["tokens"], rank=rank)
        np.testing.assert_allclose(report["losses"][name], losses, rtol=1e-6)
        np.testing.assert_allclose(report["norms"][name], norms, rtol=1e-5)

    learner.send(signal.SIGINT)
    assert learner.wait() == 0, learner.text()
    until(lambda: not marked(launcher.mark), what="all ranks to be gone")


def on_one_rank(model: Path, tokens: list[list[int]], *, rank: int) -> tuple[list[float], list[float]]:
    """Losses and norms of a client's model, alone in this process."""
    trainer = AdapterTrainer.open(model)
    trainer.create("alone", AdapterShape(rank=rank, seed=rank))
    whole = [np.array(each, dtype=np.int64) for each in tokens]
    data = tuple(
        ClientDatum(each[:-1], {"target_tokens": each[1:], "weights": np.ones(len(each) - 1, dtype=np.float32)})
        for each in whole
    )
    losses, norms = list[float](), list[float]()
    for _ in range(STEPS):
        (result,) = trainer.run_round([ForwardBackward("alone", data, "cross_entropy")])
        assert isinstance(result, OperationResult)
        losses.append(result.metrics["loss:sum"])
        norms.append(trainer.step(AdamStep("alone", learning_rate=1e-2))["grad_norm:mean"])
    return losses, norms
