"""Checks of commands and files before they go into a runtime of any kind."""

import os
from collections.abc import Mapping

from env_service.runtimes.config import RuntimeLimits
from env_service.runtimes.interface import RuntimeCommand, RuntimeFile, RuntimeRefused
from env_service.runtimes.tree import FILE, FOLDER, LINK, TreeEntry


def bounds(command: RuntimeCommand, limits: RuntimeLimits) -> tuple[float, int]:
    """Seconds that a command may take, and bytes that are kept of what it prints."""
    wall_s = limits.command_s if command.wall_s is None else command.wall_s
    output_bytes = limits.output_bytes if command.output_bytes is None else command.output_bytes
    if command.trusted:
        return wall_s, output_bytes
    return min(wall_s, limits.command_s), min(output_bytes, limits.output_bytes)


def check_command(command: RuntimeCommand, *, length: int, most: int) -> None:
    """Raises RuntimeRefused for a command that is none, or longer than `most`."""
    words = [*command.argv, command.cwd, *command.environment, *command.environment.values()]
    if not command.argv or not all(map(_is_plain, words)):
        raise RuntimeRefused("a command needs a program, and no null characters and no half characters (surrogates)")
    if length > most:
        raise RuntimeRefused(f"a command of more than {most} bytes: write it into a file first")


def entry_of(path: str, file: RuntimeFile | bytes) -> TreeEntry:
    """A file as it goes in. Raises RuntimeRefused for a path that leads upwards."""
    if ".." in path.split("/") or "\0" in path or not path.strip("/"):
        raise RuntimeRefused(f"a path without '..' was expected, got {path!r}")
    given = RuntimeFile(file) if isinstance(file, bytes) else file
    if given.link:
        return TreeEntry(LINK, path, given.mode, os.fsencode(given.link))
    return TreeEntry(FILE, path, given.mode, given.content)


def files_of(entries: list[TreeEntry]) -> Mapping[str, RuntimeFile]:
    """Files and links among entries, by their paths."""
    return {
        entry.path: RuntimeFile(
            b"" if entry.kind == LINK else entry.content,
            entry.mode,
            os.fsdecode(entry.content) if entry.kind == LINK else "",
        )
        for entry in entries
        if entry.kind != FOLDER
    }


def _is_plain(word: str) -> bool:
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False
