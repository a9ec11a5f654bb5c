"""The settings that pods give their processes, as `headway check` sees them on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models

from tests.deploy.manifest_checks import Manifests

ALL = ("learner", "generator", "reward-service", "env-service")


def run_at(folder: Path, words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with these variables, and none of ours."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return subprocess.run(
        words, cwd=folder, env={**clean, **environment}, capture_output=True, text=True, timeout=200, check=False
    )


def check_settings(
    manifests: Manifests, folder: Path, *, hosts: tuple[str, ...], processes: Sequence[str] = ALL
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `headway check` sees them: all variables, the ConfigMap's file, and keys made as the notes say.

    Returns what checks once more, with further variables.
    """
    headway = str(Path(sys.executable).with_name("headway"))
    keys = [headway, "keys", "keys", "--env-service", "environments", *(("--host", *hosts) if hosts else ())]
    assert run_at(folder, keys).returncode == 0
    if hosts:
        (folder / "keys/tls").rename(folder / "tls")
    run_file = manifests.find("ConfigMap", "headway-run")
    assert run_file is not None
    (folder / "run.toml").write_text(run_file["data"]["run.toml"])
    for model in {"models/addition", "models/base"}:
        _make_model(folder / model)
    task = {"prompt": "1+1=", "verifier": "math", "arguments": {"answer": "2"}}
    (folder / "models/mathematics.jsonl").write_text(json.dumps(task) + "\n")
    variables: dict[str, str] = {}
    for load in manifests.workloads():
        for env in (env for one in load.serving for env in one["env"] if env["name"].startswith("HEADWAY_")):
            value = env["value"].replace("/headway/", f"{folder}/").replace("$(POD_NAME)", "pod-0")
            assert variables.setdefault(env["name"], value) == value, f"two pods differ in {env['name']}"

    def check(**more: str) -> subprocess.CompletedProcess[str]:
        return run_at(folder, [headway, "check", "run.toml", "--elsewhere"], **{**variables, **more})

    checked = check()
    assert (checked.returncode, checked.stderr) == (0, "")
    assert f"good for {', '.join(processes)}\n" in checked.stdout
    return check


def _make_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 6144, "vocab_size": 16}))
    vocabulary = {"<unk>": 0, "1": 1, "<eos>": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    words = {"chat_template": "{{ messages[0].content }}", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "model.safetensors").write_bytes(b"\0" * 16)
