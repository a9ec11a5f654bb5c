"""Algorithms that learn from files, as commands; and what is said of settings and files that do not fit."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from protocol.rewards import RewardInput, read_reward_input
from tests.e2e.processes import Launched, Launcher, marked, until
from tests.e2e.run_files import RunFolder, free_ports

pytestmark = pytest.mark.e2e

PAIRS = 200
QUANTILES = ("p5", "p25", "p50", "p75", "p95")


@dataclass(frozen=True)
class Offline:
    """Starts learners on files of `folder`."""

    launch: Launcher
    folder: Path

    def start(self, name: str, model: Path, *words: str) -> Launched:
        run = ("--run.directory", str(self.folder / "runs"), "--run.name", name)
        return self.launch("learner", "--model", str(model), *run, *words)

    def trained(self, name: str, model: Path, *words: str) -> tuple[RunFolder, str]:
        """The folder of a run that has ended well, and what it said."""
        learner = self.start(name, model, *words)
        assert learner.wait() == 0, learner.text()
        return RunFolder(self.folder / "runs" / name), learner.text()

    def write(self, name: str, records: Sequence[dict[str, str]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path


@pytest.fixture(scope="module")
def offline(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Offline:
    return Offline(launch=launcher, folder=tmp_path_factory.mktemp("offline"))


def preferences() -> list[dict[str, str]]:
    """Of two answers to a sum the one with the larger digits is the better one, right or wrong."""
    numbers = np.random.default_rng(0)

    def answer(low: int) -> str:
        return "".join(str(digit) for digit in numbers.integers(low, low + 5, 3))

    return [
        {"prompt": f"{left}+{right}=", "chosen": answer(5), "rejected": answer(0)}
        for left, right in numbers.integers(10, 100, (PAIRS, 2))
    ]


@pytest.fixture(scope="module")
def pairs(offline: Offline) -> Path:
    return offline.write("pairs.jsonl", preferences())


REWARD_MODEL = (
    "--algo", "rm", "--steps", "40", "--data.held-out-share", "0.25", "--data.batch-size", "32",
    "--training.optimizer.learning-rate", "1e-3",
)  # fmt: skip


@pytest.fixture(scope="module")
def reward_model(offline: Offline, pairs: Path, model: Path) -> RunFolder:
    run, said = offline.trained("rm", model, *REWARD_MODEL, "--data.path", str(pairs))
    assert "REPORT" not in said
    return run


def test_a_reward_model_tells_pairs_apart_that_it_was_not_trained_on(reward_model: RunFolder) -> None:
    summary = reward_model.summary()
    before, after = summary["before"], summary["after"]
    assert after["accuracy"] > 0.8
    assert after["accuracy"] > before["accuracy"]
    assert after["chosen_mean"] - after["rejected_mean"] == pytest.approx(after["margin_mean"], abs=1e-4)
    for side in ("chosen", "rejected"):
        spread = [after[f"{side}_{quantile}"] for quantile in QUANTILES]
        assert spread == sorted(spread)
        assert after[f"{side}_deviation"] > 0
    assert {line["step"] for line in reward_model.metrics("held_out")} == {0, 40}
    assert all("pair_accuracy" in line["means"] for line in reward_model.metrics("step"))


def test_the_reward_service_serves_it_and_ranks_the_pairs_as_the_learner_did(
    launcher: Launcher, offline: Offline, reward_model: RunFolder, pairs: Path
) -> None:
    assert read_reward_input(reward_model.path / "model") == RewardInput(
        format="plain", tokenize="apart", special_tokens=True
    )
    scores = np.array(served_scores(launcher, offline.folder, reward_model.path / "model"))
    held_out = scores[held_out_rows(reward_model, pairs)]
    after = reward_model.summary()["after"]
    assert (held_out[:, 0] > held_out[:, 1]).mean() == pytest.approx(after["accuracy"], abs=0.5 / len(held_out))
    assert held_out.mean(axis=0).tolist() == pytest.approx([after["chosen_mean"], after["rejected_mean"]], abs=1e-3)


def served_scores(launcher: Launcher, folder: Path, model: Path) -> list[tuple[float, float]]:
    """The rewards of chosen and rejected, pair after pair, by a reward_service of its own."""
    (port,) = free_ports(1)
    file = folder / "reward.toml"
    file.write_text(
        f'[reward-service]\nsandbox = "off"\nhttp = {{ port = {port} }}\n'
        f'[[reward-service.reward_models]]\npath = "{model}"\n'
    )
    service = launcher("reward-service", "--config", str(file))
    url = f"http://127.0.0.1:{port}"
    until(lambda: ready(url), what="the reward model", during=[service])
    items = [
        {"id": f"{number}, {side}", "verifier": "reward_model", "prompt": pair["prompt"], "completion": pair[side]}
        for number, pair in enumerate(preferences())
        for side in ("chosen", "rejected")
    ]
    answer = httpx.post(f"{url}/v1/score", json={"items": items, "deadline_s": 60}, timeout=90)
    service.end()
    rewards = [result["reward"] for result in answer.json()["results"]]
    return list(zip(rewards[::2], rewards[1::2], strict=True))


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def held_out_rows(run: RunFolder, pairs: Path) -> list[int]:
    """Indices of the pairs that the learner has held out, by their prompts."""
    from transformers import AutoTokenizer

    from learner.config import LearnerConfig
    from learner.offline_examples import read_units

    folder = run.path / "model"
    config = LearnerConfig.model_validate(
        {"model": folder, "algo": {"type": "rm"}, "data": {"path": pairs, "held_out_share": 0.25}}
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {tokenizer.decode(unit[0].token_ids[:6].tolist()) for unit in read_units(config, tokenizer).held_out}
    rows = [row for row, pair in enumerate(preferences()) if pair["prompt"] in texts]
    assert 0.15 * PAIRS < len(rows) < 0.35 * PAIRS
    return rows


def test_dpo_keeps_the_references_logprobs_and_takes_them_the_next_time(
    offline: Offline, pairs: Path, model: Path
) -> None:
    words = (
        "--algo", "dpo", "--steps", "20", "--data.held-out-share", "0.25", "--data.batch-size", "16",
        "--training.optimizer.learning-rate", "3e-4", "--data.path", str(pairs),
    )  # fmt: skip
    first, said = offline.trained("dpo", model, *words)
    assert f"computing the reference's logprobs of {2 * PAIRS} sequences" in said
    (cache,) = pairs.parent.glob("reference-*.safetensors")
    written = cache.stat().st_mtime_ns
    second, said = offline.trained("dpo-again", model, *words)
    assert "computing the reference" not in said
    assert "WARNING" not in said
    assert cache.stat().st_mtime_ns == written
    assert second.summary()["after"] == pytest.approx(first.summary()["after"], abs=1e-4)
    before, after = first.summary()["before"], first.summary()["after"]
    assert before["margin_mean"] == pytest.approx(0, abs=1e-5), "the policy is its own reference yet"
    assert after["accuracy"] > 0.8
    assert after["margin_mean"] > 0
    assert loads(first.path / "model") > 0


def test_a_killed_run_on_files_is_taken_up_and_a_fresh_one_leaves_it_alone(
    offline: Offline, pairs: Path, model: Path
) -> None:
    words = (
        "--algo", "dpo", "--steps", "400", "--data.batch-size", "16", "--checkpoint.every-steps", "3",
        "--data.path", str(pairs),
    )  # fmt: skip
    run = RunFolder(offline.folder / "runs" / "killed")
    learner = offline.start("killed", model, *words)
    until(lambda: (run.path / "checkpoint-00000006").exists(), what="a checkpoint", during=[learner])
    second = offline.start("killed", model, *words)
    assert second.wait() == 1
    assert re.search(r"the run in .*/killed is that of process \d+ on .*: stop it first", second.text())
    learner.send(signal.SIGKILL)
    learner.wait()
    done = max(line["step"] for line in run.metrics("step"))
    run, said = offline.trained("killed", model, *words[:3], f"{done + 5}", *words[4:], "--resume", "true")
    assert re.search(r"resuming at step \d+", said)
    assert [line["step"] for line in run.metrics("step")] == list(range(1, done + 6)), "each step is there once"
    offline.trained("killed", model, *words[:3], "2", *words[4:])
    assert [line["step"] for line in run.metrics("step")] == [1, 2]
    assert len(list(run.path.parent.glob("killed*"))) == 2, "the run before is kept beside it"


def test_a_student_is_distilled_from_a_teacher_in_a_folder(
    offline: Offline, model: Path, untrained_model: Path
) -> None:
    teacher = json.dumps([{"name": "adder", "path": str(model)}])
    run, _ = offline.trained(
        "distill", untrained_model, "--algo", "distill", "--steps", "30", "--data.batch-size", "32", "--teachers",
        teacher, "--data.path", str(untrained_model / "sft.jsonl"), "--data.held-out-share", "0.01",
        "--training.optimizer.learning-rate", "3e-3",
    )  # fmt: skip
    divergences = [line["means"]["teacher_divergence"] for line in run.metrics("step")]
    assert 0 <= divergences[-1] < 0.5 * divergences[0]
    assert run.summary()["after"]["nll"] < run.summary()["before"]["nll"]
    assert loads(run.path / "model") > 0


def loads(folder: Path) -> int:
    """The number of parameters of an exported model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())


BAD_SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "a misspelled knob": (
        ("--algo", "ppo", "--algo.clip-lo", "0.1"),
        "command line: unknown flag --algo.clip-lo; did you mean --algo.clip-low?",
    ),
    "a knob of another algorithm": (("--algo", "ppo", "--algo.tau", "0.1"), "an option of algo kimi, but algo is ppo"),
    "a knob without effect": (("--algo", "gspo", "--algo.kl-form", "k2"), "--algo.kl-form is set but has no effect"),
    "no teachers": (("--algo", "opd"), "algo opd needs a teacher, and none is set"),
    "no data": (("--algo", "rm"), "algo rm learns from a file and none is set: set data.path"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_do_not_fit_are_refused_in_one_line(offline: Offline, model: Path, name: str) -> None:
    words, message = BAD_SETTINGS[name]
    learner = offline.start("bad", model, *words)
    assert learner.wait() == 2
    (line,) = learner.text().splitlines()
    assert line.startswith("learner: ")
    assert message in line
    assert not (offline.folder / "runs" / "bad").exists()
    assert marked(offline.launch.mark) == {}


def test_a_broken_line_is_named(offline: Offline, model: Path) -> None:
    file = offline.write("broken.jsonl", preferences()[:3])
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"prompt": "1+1=", "chosen": \n')
    says = rf"stopped by an error: {file}, line 4: "
    assert_stopped(offline, model, "--algo", "dpo", "--data.path", str(file), says=says)


def test_an_algorithm_that_cannot_be_imported_is_named(offline: Offline, model: Path) -> None:
    leases = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    words = (
        "--algo", "custom", "--algo.path", "no.such.module:build", "--leases.address", leases, "--http.port", "0",
    )  # fmt: skip
    says = r"stopped by an error: algo.path is 'no.such.module:build' .*ModuleNotFoundError.*expected a function"
    assert_stopped(offline, model, *words, says=says)


def assert_stopped(offline: Offline, model: Path, *words: str, says: str) -> None:
    """It ends as with wrong settings, one line says why, and nothing is left."""
    learner = offline.start("stopped", model, *words)
    assert learner.wait() == 78
    found = [line for line in learner.text().splitlines() if re.search(says, line)]
    assert len(found) == 1, learner.text()
    assert "Traceback" not in learner.text()
    assert marked(offline.launch.mark) == {}
