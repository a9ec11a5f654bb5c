"""Files that a `.dockerignore` beside a Dockerfile leaves out of what COPY copies, by Docker's rules.

    tests          that file or folder, with all that is in it
    **/*.pyc       at whatever depth; `*` and `?` stand for no slash
    !tests/data    not left out after all: the last pattern that fits a path, or a folder that it is in, decides

https://docs.docker.com/build/concepts/context/#dockerignore-files
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from env_service.task_sets.records import TaskUnfit
from services.lines import lines_of


def left_out(dockerfile: Path) -> Callable[[str], bool]:
    """Tells of a path, counted from the Dockerfile's folder, whether it is left out. The Dockerfile may have a file of
    patterns for itself (`Dockerfile.dockerignore`). Raises TaskUnfit for patterns that cannot be read.
    """
    own = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    patterns = _patterns(own if own.is_file() else dockerfile.with_name(".dockerignore"))

    def is_left_out(path: str) -> bool:
        # The folder itself is none of its files.
        places = [each for each in (path, *map(str, PurePosixPath(path).parents)) if each != "."]
        fit = [leaves_out for pattern, leaves_out in patterns if any(map(pattern.fullmatch, places))]
        return fit[-1] if fit else False

    return is_left_out


def _patterns(path: Path) -> list[tuple[re.Pattern[str], bool]]:
    """The patterns in order, and whether what fits is left out."""
    if not path.is_file():
        return []
    found = []
    try:
        for line in lines_of(path.read_text(encoding="utf-8-sig")):
            told = line.strip()
            if line.startswith("#") or not told:
                continue
            pattern = posixpath.normpath(told.removeprefix("!").strip())
            found.append((_expression(pattern.lstrip("/")), not told.startswith("!")))
    except (OSError, UnicodeDecodeError, re.error) as error:
        raise TaskUnfit(f"cannot read {path}: {error}") from error
    return found


def _expression(pattern: str) -> re.Pattern[str]:
    told = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]*\]|\\.|.", pattern)
    return re.compile("".join(told.get(each) or _literal(each) for each in pieces))


def _literal(piece: str) -> str:
    if piece.startswith("[") and piece.endswith("]"):
        return piece
    return re.escape(piece.removeprefix("\\") or piece)
