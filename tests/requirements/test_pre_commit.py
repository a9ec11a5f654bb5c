"""`.pre-commit-config.yaml`: pre-commit takes it, and it runs what `make check` runs."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / ".pre-commit-config.yaml"


def made_by(target: str) -> list[str]:
    """The tools of .venv that a target of the Makefile calls, with their arguments; those of `make TARGET` included."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(rf"^{target}: [^\n]*\n((?:\t[^\n]*\n)+)", text, flags=re.MULTILINE)
    (checks,) = re.findall(r"^CHECKS := (.*)$", text, flags=re.MULTILINE)
    recipe = recipe.replace("$(CHECKS)", checks)
    words = " ".join(re.findall(r"\$\(MAKE\)(.*)", recipe)).split()
    inner = [one for name in words if re.fullmatch(r"[a-z][a-z-]*", name) for one in made_by(name)]
    return [*re.findall(r"\$\(BIN\)/(.*)", recipe), *inner]


def tools_of(entry: str) -> list[str]:
    """The tools that a hook calls: those of a target, or one of .venv."""
    name, _, target = entry.partition(" --no-print-directory ")
    return made_by(target) if name == "make" else [re.sub(r"^.*\.venv/bin/", "", entry)]


def test_pre_commit_takes_the_file() -> None:
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(CONFIG)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_it_runs_what_make_check_runs() -> None:
    hooks = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["repos"][0]["hooks"]
    entries = [one for hook in hooks for one in tools_of(hook["entry"])]

    assert sorted(entries) == sorted(made_by("check"))
    assert any(entry.startswith("deno fmt --check") for entry in entries)
