"""The console scripts as they are installed: quick answers, exit codes, nothing heavy loaded."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

ROOT = Path(__file__).parents[2]
PROCESSES = ("learner", "generator", "reward-service", "env-service")
EXAMPLES = sorted(ROOT.glob("examples/*/*.toml"))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEAVY = {"torch", "vllm", "deepspeed", "transformers", "sympy", "reasoning_gym", "matplotlib", "fastapi", "zmq"}


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def run(*words: str, cwd: Path, environ: Mapping[str, str] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=cwd, env={**clean, **environ})


def check(
    example: Path, *, cwd: Path, environ: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """As for another machine: a run of somebody's may hold the ports of this one."""
    return run(script("headway"), "check", str(example), "--elsewhere", cwd=cwd, environ=environ)


def loaded_by(*words: str, cwd: Path) -> tuple[set[str], str]:
    """The top-level packages that a console script loads, and what it prints; it must end with 0."""
    ended = run(sys.executable, "-X", "importtime", *words, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    lines = [line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")]
    return {line.partition(".")[0] for line in lines}, ended.stdout


@pytest.mark.parametrize("name", [*PROCESSES, "headway"])
def test_help_answers_and_loads_nothing_heavy(name: str, tmp_path: Path) -> None:
    loaded, text = loaded_by(script(name), "--help", cwd=tmp_path)
    assert "services" in loaded
    assert not HEAVY & loaded
    assert text.startswith(f"usage: {name}")
    loaded, whole = loaded_by(script(name), "--help", "--all", cwd=tmp_path)
    assert not HEAVY & loaded
    assert all(flag in whole for flag in ("--http.port", "--run.name", "--log.level")) or name == "headway"
    assert name == "headway" or len(whole) > len(text)


@pytest.mark.parametrize("name", PROCESSES)
def test_misspelled_settings_are_refused_with_the_nearest_ones(name: str, tmp_path: Path) -> None:
    prefix = f"HEADWAY_{name.replace('-', '_').upper()}__"
    ended = run(script(name), "--http.prot", "1", cwd=tmp_path, environ={f"{prefix}LOG__LEVELL": "info"})
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        f"{name}: environment: unknown variable {prefix}LOG__LEVELL; did you mean {prefix}LOG__LEVEL?",
        f"{name}: command line: unknown flag --http.prot; did you mean --http.port?",
    ]


def prepared(example: Path, folder: Path) -> None:
    """Stand-ins for the models and the server's tasks that an example names, relative to `folder`."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "1+1=": 1, "2": 2, "3": 3}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tables = tomllib.loads(example.read_text())
    for environment in tables.get("env-service", {}).get("environments", ()):
        row: dict[str, object] = {"prompt": "1+1=", "answer": "2"}
        if environment["source"] == "computer":
            row = {"name": "one", "prompt": "1+1=", "checks": [{"run": "echo 2", "prints": "2"}]}
        for key in ("train_file", "evaluation_file"):
            if file := environment.get("options", {}).get(key):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(json.dumps(row) + "\n")
    if data := tables.get("learner", {}).get("data"):
        row = {"chosen": "2", "rejected": "3"} if "preferences" in data["path"] else {"completion": "2"}
        (folder / data["path"]).parent.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps({"prompt": f"{number}+1=", **row}) for number in range(100))
        (folder / data["path"]).write_text("\n".join(rows))
    for environment in tables.get("env-service", {}).get("environments", ()):
        for file in (environment[key] for key in ("train_file", "evaluation_file") if key in environment):
            if not (example.parent / file).exists():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text('{"prompt": "1+1=", "verifier": "reward_model"}\n')
    scored = tables.get("reward-service", {}).get("reward_models", ())
    judges = [{"model": one["path"]} for one in scored]
    for table in (*tables.values(), *judges):
        model = folder / table.get("model", "model")
        model.mkdir(parents=True, exist_ok=True)
        kind = "LlamaForSequenceClassification" if table in judges else "LlamaForCausalLM"
        (model / "config.json").write_text(
            json.dumps({"hidden_size": 8, "architectures": [kind], **({"num_labels": 1} if table in judges else {})})
        )
        (model / "model.safetensors").write_bytes(b"")
        (model / "tokenizer.json").write_text(tokenizer.to_str())
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_examples_are_good(example: Path, tmp_path: Path) -> None:
    prepared(example, tmp_path)
    ended = check(example, cwd=tmp_path, environ={"PYTHONPATH": str(example.parent)})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "good for " in ended.stdout


def test_an_example_without_the_tasks_that_its_server_writes_says_what_is_missing(tmp_path: Path) -> None:
    example = ROOT / "examples/verifiers/run.toml"
    prepared(example, tmp_path)
    (tmp_path / "tasks.jsonl").unlink()
    ended = check(example, cwd=tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "environment sums" in line
    assert "tasks.jsonl" in line


def test_a_check_loads_nothing_heavy_and_leaves_nothing(tmp_path: Path) -> None:
    example = ROOT / "examples/addition/run.toml"
    prepared(example, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert not HEAVY & loaded_by(script("headway"), "check", str(example), "--elsewhere", cwd=tmp_path)[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_example_without_its_models_is_refused_before_anything_starts(tmp_path: Path) -> None:
    example = ROOT / "examples/addition/run.toml"
    ended = run(script("headway"), "up", str(example), cwd=tmp_path)
    assert ended.returncode == 2
    model = example.parent / "models/addition"
    assert ended.stderr.splitlines() == [
        f"headway: [{process}] model: {model} is not a folder; expected a Hugging Face model directory"
        for process in ("learner", "generator", "env-service")
    ]


def test_up_starts_what_the_file_names_and_an_interrupt_ends_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[reward-service]\nsandbox = 'off'\nhttp.port = 0\n")
    with subprocess.Popen(
        [script("headway"), "up", "run.toml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "reward-service" in lines[0]
    assert "headway        stopping: SIGINT" in rest
    assert "killed" not in rest
    assert "Traceback" not in rest
