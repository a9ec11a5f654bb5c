"""The form that all sets of tasks are read into.

setup ─▶ a computer ─▶ the agent works ─▶ what it changed in `carried` ─▶ a fresh computer ─▶ tests laid over ─▶ judged
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from env_service.runtimes.interface import RuntimeFile

# By the name of a file or folder anywhere below a carried folder; with a slash, by the path from there on. They change
# how tests run, in ways that no repair needs: they stay as they were before the agent came.
GUARDED = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml",
    "sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-info", "*.dist-info", "__pycache__", "*.pyc",
    "pytest.py", "pytest", "_pytest", "pluggy.py", "pluggy", ".bashrc", ".bash_profile", ".profile", ".git",
    ".pytest_cache",
)  # fmt: skip
IMAGE_PATH = "${PATH}"
"""Stands in a variable's value for the image's own PATH, which is known when its computer is made."""
TEST_FILES = ("test_*.py", "*_test.py", "tests", "test")
"""Guarded as well where the tests are those of a repository."""


class TaskUnfit(ValueError):
    """A task that cannot be had here; the text says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class SetupStep:
    """Files by absolute path that are laid down, or a command of the shell that is run; before any agent is there."""

    files: Mapping[str, RuntimeFile] = field(default_factory=dict)
    run: tuple[str, ...] = ()
    cwd: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class ComputerSetup:
    """An image, and what is done to it: the computer as the agent finds it. `cwd` is where its commands run."""

    image: str
    steps: tuple[SetupStep, ...] = ()
    cwd: str = "/work"
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def key(self) -> str:
        """A hash of all of it."""
        whole = hashlib.sha256()
        for step in self.steps:
            for path, file in sorted(step.files.items()):
                whole.update(f"\0{path}\0{file.mode}\0{file.link}\0{len(file.content)}\0".encode())
                whole.update(file.content)
            whole.update(repr((step.run, step.cwd, sorted(step.environment.items()))).encode())
        whole.update(repr((self.image, self.cwd, sorted(self.environment.items()))).encode())
        return whole.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ScriptTests:
    """A script that writes the reward into /logs/verifier, over `files` by absolute path. `programs`: a folder whose
    programs it finds before the image's.
    """

    script: str
    place: str = "/tests/test.sh"
    files: Mapping[str, RuntimeFile] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    programs: str = ""
    wall_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class NamedTests:
    """Tests by pytest's ids, all of which have to pass, from files by absolute path; None takes a file away. An id
    without what is in brackets stands for all that have it. Ids count from `folder`, that of the task if it is empty.

    `must_change`: those that fail before the task is done; the others are to go on passing. `altered`: among the
    controls are the former with other values expected.
    """

    files: Mapping[str, RuntimeFile | None]
    must_change: tuple[str, ...]
    must_stay: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    altered: bool = True
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    wall_s: float | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Both kinds, those that must change first."""
        return (*self.must_change, *self.must_stay)


@dataclass(frozen=True, kw_only=True)
class PublishedSolution:
    """Files by absolute path, None for one that goes, and then a script, with `programs` as for those of tests."""

    files: Mapping[str, RuntimeFile | None] = field(default_factory=dict)
    script: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    programs: str = ""


@dataclass(frozen=True, kw_only=True)
class JudgedTask:
    """A task on a computer, with the tests that judge it and the solution that shows that it can be done.

    `carried` are the folders of which changes go into the fresh computer, but for names that are `guarded` and not
    `allowed`.
    """

    name: str
    prompt: str
    setup: ComputerSetup
    tests: ScriptTests | NamedTests
    solution: PublishedSolution | None = None
    carried: tuple[str, ...] = ("/work",)
    guarded: tuple[str, ...] = GUARDED
    allowed: tuple[str, ...] = ()
