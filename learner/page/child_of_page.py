"""A what-if that the page starts: a process of its own, which ends with the page and takes only what others leave."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from services.process import parent_death_signal

_PAGE = "HEADWAY_PAGE"
_OF_LEARNER = ("HEADWAY_PARENT", "HEADWAY_RANK_RESTARTS", "_HEADWAY_STARTED_BY")
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GROUPS_OF_TORCHRUN = ("GROUP_", "ROLE_", "TORCHELASTIC_")
_LEAST = 19


def replay_words(
    folder: Path, changes: Sequence[str], *, to: Path, groups: bool = True, version: int | None = None
) -> list[str]:
    """The command line of a what-if of the run in `folder`, whose result is written `to` a new folder."""
    return [
        sys.executable, "-P", "-m", "learner.command", "replay", str(folder), "--to", str(to),
        *(f"--set={change}" for change in changes),
        *([] if groups else ["--groups=0"]),
        *([] if version is None else [f"--from={version}"]),
    ]  # fmt: skip


def environment_of_child(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process for its child: without what would make it a rank or a resumed learner."""
    left_out = {*_OF_LEARNER, *_OF_TORCHRUN}
    kept = {
        name: value
        for name, value in environ.items()
        if name not in left_out and not name.startswith(_GROUPS_OF_TORCHRUN)
    }
    return {**kept, _PAGE: str(os.getpid())}


def yield_to_page() -> None:
    """In the child: has the kernel end it with the page's process, and gives way to all others. Nothing elsewhere."""
    page = os.environ.pop(_PAGE, None)
    if page is None:
        return
    parent_death_signal()
    if os.getppid() != int(page):
        raise SystemExit("the page that asked for it has ended")
    os.nice(_LEAST)
    with suppress(OSError):  # where memory runs out, the kernel ends this one, and not the learner beside it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
