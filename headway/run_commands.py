"""`headway diff` and `headway fetch`: what two runs were made with, and models and data sets of the hub."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.own_options import own_options
from services.config import made_with
from services.config.run_paths import HubKind, hub_cache, is_hub_name
from services.config.sources import ConfigError


def compare_runs(folders: Sequence[str]) -> int:
    """`headway diff RUN RUN`: 0 if nothing differs, else 1. Raises ConfigError for a folder without a record."""
    if len(folders) != 2 or any(each.startswith("-") for each in folders):
        raise ConfigError(["headway diff needs the folders of two runs: headway diff runs/ONE runs/OTHER"])
    before, after = (_made(Path(each)) for each in folders)
    found = [
        *made_with.differences(before["settings"], after["settings"]),
        *made_with.differences(_apart("version", before.get("versions")), _apart("version", after.get("versions"))),
        *made_with.differences(_apart("git", before.get("git")), _apart("git", after.get("git"))),
        *made_with.differences(_apart("host", before.get("host")), _apart("host", after.get("host"))),
    ]
    shown = [each for each in found if each.key not in ("resume", "accept_changes")]
    sys.stdout.write("".join(f"{each}\n" for each in shown) or "no difference\n")
    return 1 if shown else 0


def _made(folder: Path) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise ConfigError([f"{folder} is no folder; expected that of a run, such as runs/addition"])
    found = made_with.read(folder)
    if not isinstance(found.get("settings"), dict):
        raise ConfigError([f"{folder} holds no {made_with.FILE}: it is no run's folder, or of an earlier release"])
    return found


def _apart(name: str, given: object) -> dict[str, Any]:
    return {f"{name} {key}": value for key, value in given.items()} if isinstance(given, dict) else {}


def fetch(arguments: Sequence[str]) -> int:
    """`headway fetch NAME ...`: downloads each into the hub's cache. Raises ConfigError if one cannot be had."""
    own, names = own_options(arguments, {"--dataset": False, "--revision": True})
    wrong = [name for name in names if not is_hub_name(name)]
    if wrong or not names:
        got = f", got {', '.join(wrong)}" if wrong else ""
        raise ConfigError([f"headway fetch needs names on the hub, such as Qwen/Qwen2.5-0.5B-Instruct{got}"])
    kind: HubKind = "dataset" if "--dataset" in own else "model"
    for name in names:
        folder = _fetched(name, kind, own.get("--revision", ["main"])[-1])
        sys.stdout.write(f"{name}: {folder}\n")
    return 0


def _fetched(name: str, kind: HubKind, revision: str) -> str:
    try:
        # Deferred: an environment service of its own machine has it, a reward service may not.
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise ConfigError([f"{error.name} is missing; pip install 'headway[learner]'"]) from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError([f"{name}: HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or copy the folder"])
    try:
        # Weights in other formats than the one that is read would only take room.
        return huggingface_hub.snapshot_download(
            name, repo_type=kind, revision=revision, cache_dir=hub_cache(),
            ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"] if kind == "model" else None,
        )  # fmt: skip
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            [f"{name}: cannot be fetched: {text:.300}; is the name right, and the hub reachable?"]
        ) from error
