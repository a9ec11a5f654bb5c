"""Files that hold secrets, which only their owner may read, or a public key: a line of text for each."""

import os
import secrets
import stat
from pathlib import Path

_SECRET_MODE, _PUBLIC_MODE = 0o600, 0o644
_MOUNTED_MODE = 0o640
_LONGEST = 4096


class SecretFileError(ValueError):
    """The file cannot be used. The text names it, and what to do; it never shows what the file holds."""


def read_secret(path: Path) -> str:
    """The only line of a file that nobody but its owner can read. Raises SecretFileError.

    A file of root's, as containers find mounted secrets, may be readable by its group, too.
    """
    text, status = _read(path)
    _refuse_open(path, status)
    return _only_line(text, path)


def read_secret_lines(path: Path) -> tuple[str, ...]:
    """The lines of such a file that may have several, one word in each; empty ones are left out.

    Raises SecretFileError.
    """
    text, status = _read(path)
    _refuse_open(path, status)
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines or len(text) > _LONGEST or any(len(line.split()) > 1 for line in lines):
        got = "an empty file" if not lines else "more"
        raise SecretFileError(f"{path} is no key or token: expected one word on a line, got {got}")
    return lines


def file_state(path: Path) -> tuple[int, int, int] | None:
    """A mark that another one takes the place of when the file changes; None while it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def check_only_ours(path: Path) -> None:
    """Raises SecretFileError for a file that cannot be read, or that others can read, as `read_secret` does."""
    try:
        with path.open("rb") as file:
            _refuse_open(path, os.fstat(file.fileno()))
    except OSError as error:
        raise SecretFileError(f"cannot read {path}: {error.strerror}") from error


def read_public(path: Path) -> str:
    """The only line of a file that everybody may read. Raises SecretFileError."""
    return _only_line(_read(path)[0], path)


def write_secret(path: Path, text: str) -> None:
    """Write a file of mode 0600, in the place of any that is there. Raises OSError."""
    _write(path, text, _SECRET_MODE)


def write_public(path: Path, text: str) -> None:
    """Write a file of mode 0644, in the place of any that is there. Raises OSError."""
    _write(path, text, _PUBLIC_MODE)


def _read(path: Path) -> tuple[str, os.stat_result]:
    """The text, and the status of the very file that it was read from."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            return file.read(_LONGEST + 1).decode("ascii"), status
    except OSError as error:
        raise SecretFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SecretFileError(f"{path} is no key or token: expected ASCII text") from None


def _only_line(text: str, path: Path) -> str:
    lines = text.split()
    if len(lines) != 1 or len(text) > _LONGEST:
        got = "none" if not lines else "more"
        raise SecretFileError(f"{path} is no key or token: expected one word on one line, got {got}")
    return lines[0]


def _refuse_open(path: Path, status: os.stat_result) -> None:
    if _is_open_to_others(status):
        mode = stat.S_IMODE(status.st_mode)
        raise SecretFileError(
            f"{path} holds a secret, and its mode {mode:04o} lets others use it: chmod 600 {path}; "
            "for a mounted secret set its mode (in Kubernetes defaultMode) to 0400"
        )


def _is_open_to_others(status: os.stat_result) -> bool:
    mounted = status.st_uid == 0 and os.geteuid() != 0
    allowed = _MOUNTED_MODE if mounted else _SECRET_MODE
    return bool(stat.S_IMODE(status.st_mode) & 0o077 & ~allowed)


def _write(path: Path, text: str, mode: int) -> None:
    """Beside it, then renamed: nobody reads half of it, or reads it before it has its mode."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(handle, "w", encoding="ascii") as file:
            os.fchmod(handle, mode)  # whatever the umask
            file.write(f"{text}\n")
            file.flush()
            os.fsync(handle)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
