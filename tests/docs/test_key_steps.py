"""The shell by which docs/deploy.md exchanges keys and tokens, with a `kubectl` that notes a token."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.secret_files import write_secret
from tests.docs.test_blocks import ROOT

STAND_INS = f"""
headway() {{ {sys.executable} -c 'import sys; from headway.command import main; sys.exit(main())' "$@" > /dev/null; }}
kubectl() {{ [ "$1" = apply ] && cat > /dev/null && cat keys/learner.token >> told || :; }}
helm() {{ :; }}
sleep() {{ :; }}
set -e
"""


def shell_of(number: int) -> str:
    section = (ROOT / "docs" / "deploy.md").read_text().partition("### New keys and tokens\n")[2]
    return section.split("\n```\n")[2 * number + 1]


def run(text: str, folder: Path) -> None:
    done = subprocess.run(["bash", "-c", STAND_INS + text], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    run("headway keys keys --env-service environments", tmp_path)
    write_secret(tmp_path / "keys" / "of-mine.token", "a-token-that-the-command-does-not-make")
    return tmp_path / "keys"


def held(keys: Path) -> dict[str, str]:
    return {str(path.relative_to(keys)): path.read_text() for path in keys.rglob("*") if path.is_file()}


def test_three_steps_exchange_the_tokens_of_the_command_alone_and_leave_no_copies(keys: Path) -> None:
    before = held(keys)
    run(shell_of(0), keys.parent)
    after = held(keys)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f"{name}.token" for name in ("learner", "generator", "reward-service", "env-service")}
    assert sorted(path.name for path in keys.parent.iterdir()) == ["keys", "told"]
    former, new = before["learner.token"], after["learner.token"]
    put = (keys.parent / "told").read_text().splitlines(keepends=True)
    assert [line for line in put if line in (former, new)] == [former, new, new, former, new]
    assert {path.stat().st_mode & 0o777 for path in keys.glob("*.token")} == {0o600}


def test_new_keys_of_leases_leave_the_tokens(keys: Path) -> None:
    before = held(keys)
    run(shell_of(1), keys.parent)
    after = held(keys)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"learner.key", "learner.pub", "environments.key", "authorized/environments.pub"}
    assert sorted(path.name for path in keys.parent.iterdir()) == ["keys", "told"]
