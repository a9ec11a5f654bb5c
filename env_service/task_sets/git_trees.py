"""Files of a git repository at a commit, and what a patch makes of files; by this machine's git, in no work tree."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from env_service.runtimes.interface import RuntimeFile
from env_service.task_sets.records import TaskUnfit

_NAMED = re.compile(
    r"^(?:--- a/|\+\+\+ b/|rename from |rename to |copy from |copy to |diff --git a/(?=.* b/))(.+?)(?:\t.*)?$",
    re.MULTILINE,
)
_TIMEOUT_S = 120.0


def git(folder: Path, *words: str, given: bytes = b"") -> bytes:
    """Output of git in a folder. Raises TaskUnfit with what it complains of."""
    told = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    told |= {"GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "safe.directory=*", "-c", "core.quotepath=off", *words]
    try:
        ended = subprocess.run(
            command, cwd=folder, input=given, capture_output=True, check=False, env=told, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TaskUnfit(f"git cannot be run in {folder}: {error}") from error
    if ended.returncode != 0:
        raise TaskUnfit(f"git {words[0]} in {folder}: {ended.stderr.decode(errors='replace').strip()[-500:]}")
    return ended.stdout


@lru_cache(maxsize=4)
def files_at(repository: Path, commit: str) -> Mapping[str, RuntimeFile]:
    """Files of a repository at a commit, by path. Raises TaskUnfit."""
    if not repository.is_dir():
        raise TaskUnfit(f"there is no repository {repository}; clone it there, or set repositories")
    listed = git(repository, "ls-tree", "-r", "-z", f"{commit}^{{commit}}").decode(errors="surrogateescape")
    entries = []
    for line in filter(None, listed.split("\0")):
        told, _, path = line.partition("\t")
        mode, kind, name = told.split()
        if kind == "blob":  # others are modules of their own
            entries.append((path, mode, name))
    contents = _contents(repository, [name for _, _, name in entries])
    return {
        path: RuntimeFile(link=os.fsdecode(content))
        if mode == "120000"
        else RuntimeFile(content, 0o755 if mode == "100755" else 0o644)
        for (path, mode, _), content in zip(entries, contents, strict=True)
    }


def _contents(repository: Path, names: Sequence[str]) -> list[bytes]:
    answer = git(repository, "cat-file", "--batch", given="".join(f"{name}\n" for name in names).encode())
    found, at = [], 0
    for _ in names:
        end = answer.index(b"\n", at)
        size = int(answer[at:end].split()[2])
        found.append(answer[end + 1 : end + 1 + size])
        at = end + 2 + size
    return found


def patched(files: Mapping[str, RuntimeFile], patch: str) -> dict[str, RuntimeFile | None]:
    """The files that a patch changes, as they are then; None for those that go. Raises TaskUnfit."""
    if not patch.strip():
        return {}
    text = patch if patch.endswith("\n") else f"{patch}\n"
    named = {name for line in _NAMED.findall(text) for name in (line, *line.split(" b/"))} - {"/dev/null"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in named & files.keys():
            _write(folder / name, files[name])
        git(folder, "apply", "--whitespace=nowarn", "-", given=text.encode())
        return {name: after for name in sorted(named) if (after := _read(folder / name)) != files.get(name)}


def _write(path: Path, file: RuntimeFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.link:
        path.symlink_to(file.link)
    else:
        path.write_bytes(file.content)
        path.chmod(file.mode)


def _read(path: Path) -> RuntimeFile | None:
    if path.is_symlink():
        return RuntimeFile(link=os.readlink(path))
    return RuntimeFile(path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644) if path.is_file() else None
