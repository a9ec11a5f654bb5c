"""Paths in a run.toml, names on the hub, and code beside the file."""

import subprocess
import sys
from pathlib import Path

import pytest

from env_service.config import EnvServiceConfig
from env_service.environments.task_configs import ClassTasks
from learner.config import LearnerConfig
from services.config.models import load_config
from services.config.run_paths import import_code_beside, in_hub_cache, is_hub_name, run_name
from services.config.sources import ConfigError, read_tables


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    (folder / "tasks.jsonl").touch()
    return folder


def _learner(project: Path, text: str, *words: str) -> LearnerConfig:
    (project / "run.toml").write_text(f"[learner]\n{text}")
    argv = ["--config", str(project / "run.toml"), *words]
    return load_config(LearnerConfig, process="learner", argv=argv, environ={})


def test_a_path_of_the_file_counts_from_its_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.parent)
    config = _learner(project, 'model = "model"\noutput = "made/model"\n[run]\ndirectory = "runs"')

    assert config.model == project / "model"
    assert config.output == project / "made/model"
    assert config.run.folder == project / "runs" / "project"


def test_a_run_that_says_neither_is_beside_its_file_and_called_as_the_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.parent / "runs").mkdir()
    monkeypatch.chdir(project.parent)
    (project / "run.toml").write_text("[learner]\n")

    argv = ["--config", "project/run.toml", "--model", "m"]
    run = load_config(LearnerConfig, process="learner", argv=argv, environ={}).run
    named = load_config(
        LearnerConfig,
        process="learner",
        argv=argv,
        environ={"HEADWAY_RUN__DIRECTORY": "kept", "HEADWAY_RUN__NAME": "x"},
    ).run
    without = load_config(LearnerConfig, process="learner", argv=argv[2:], environ={}).run

    assert run.folder == project / "runs" / "project"
    assert named.folder == project.parent / "kept" / "x", "what is said elsewhere counts from the current folder"
    assert without.folder == project.parent / "runs" / "default"


@pytest.mark.parametrize(
    ("folder", "name"), [("sums", "sums"), ("my run!", "my-run-"), ("_x", "x"), ("日本", ""), ("a" * 120, "a" * 100)]
)
def test_a_run_is_called_as_its_folder_as_far_as_names_go(folder: str, name: str, tmp_path: Path) -> None:
    assert run_name(tmp_path / folder) == name


def test_paths_in_lists_of_tables_count_from_it_too(project: Path) -> None:
    (project / "run.toml").write_text(
        '[env-service]\nmodel = "model"\n[[env-service.environments]]\nname = "sums"\nsource = "jsonl"\n'
        'verifier = "tasks.jsonl"\ntrain_file = "tasks.jsonl"\n'
    )

    argv = ["--config", str(project / "run.toml")]
    config = load_config(EnvServiceConfig, process="env-service", argv=argv, environ={})

    (entry,) = config.environments
    assert getattr(entry, "train_file", None) == project / "tasks.jsonl"
    assert getattr(entry, "verifier", None) == "tasks.jsonl", "a text that is no path stays as it is"


def test_an_entry_with_options_knows_the_folder_that_paths_in_them_count_from(project: Path) -> None:
    entry = '[[env-service.environments]]\nname = "{}"\nsource = "mine:World"\n{}\n'
    (project / "run.toml").write_text(
        '[env-service]\nmodel = "model"\n'
        + entry.format("one", 'options = { maps = "maps" }')
        + entry.format("two", 'options = { maps = "maps" }\nfolder = "model"')
        + entry.format("three", "")
    )

    argv = ["--config", str(project / "run.toml")]
    config = load_config(EnvServiceConfig, process="env-service", argv=argv, environ={})

    folders = [entry.folder for entry in config.environments if isinstance(entry, ClassTasks)]
    assert folders == [project, project / "model", None]


def test_what_is_not_beside_the_file_is_looked_for_in_the_current_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere/models/one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")

    assert _learner(project, 'model = "models/one"').model == tmp_path / "elsewhere/models/one"


def test_what_is_to_be_written_goes_beside_the_file_whatever_the_current_folder_has(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere/runs").mkdir(parents=True)
    (tmp_path / "elsewhere/trained").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    config = _learner(project, 'model = "model"\noutput = "trained"\n[run]\ndirectory = "runs"')

    assert config.run.folder == project / "runs" / "project"
    assert config.output == project / "trained"
    assert _learner(project, "", "--model", "m", "--run.directory", "runs").run.directory == Path("runs")


def test_a_path_of_the_command_line_counts_from_the_current_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    assert _learner(project, "", "--model", "project/model").model == Path("project/model")


def test_a_name_on_the_hub_is_the_snapshot_that_was_fetched(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    kept = tmp_path / "hub/models--Some--Model"
    (kept / "snapshots/abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text("abc\n")

    assert _learner(project, 'model = "Some/Model"').model == kept / "snapshots/abc"
    assert in_hub_cache("Some/Other", "model") is None


@pytest.mark.parametrize("text", ["models/../x", "/a/b", "a", "a/b/c", "a--b/c", "./a"])
def test_a_path_is_no_name_on_the_hub(text: str) -> None:
    assert not is_hub_name(text)


def test_code_beside_the_file_can_be_imported_and_hides_nothing_else(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (project / "json.py").write_text("raise AssertionError")
    (project / "a_reward_of_mine.py").write_text("")

    import_code_beside(project / "run.toml")

    import a_reward_of_mine  # type: ignore[import-not-found]

    assert a_reward_of_mine.__file__ == str(project / "a_reward_of_mine.py")
    assert sys.path[-1] == str(project)


@pytest.mark.parametrize("name", ["learner", "protocol", "reward_service"])
def test_a_file_beside_it_hides_no_package_of_ours(project: Path, name: str) -> None:
    (project / f"{name}.py").touch()
    code = (
        "from pathlib import Path; from services.config.run_paths import import_code_beside; "
        f"import_code_beside(Path('run.toml')); import {name}; print({name}.__file__)"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", code], cwd=project, capture_output=True, text=True, check=False)

    assert ran.stdout.strip().endswith(f"{name}/__init__.py"), ran.stdout + ran.stderr


@pytest.mark.parametrize("given", ["project", "project/runn.toml", "project/settings.toml"])
def test_the_file_that_may_be_meant_by_a_path_that_is_none_is_named(
    given: str, project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (project / "run.toml").write_text("")

    with pytest.raises(ConfigError, match=r"cannot read project.*; did you mean project/run\.toml\?"):
        read_tables(Path(given))


def test_the_mark_with_which_some_editors_begin_a_file_is_no_part_of_it(project: Path) -> None:
    (project / "run.toml").write_text('\ufeff[learner]\nmodel = "model"')

    assert read_tables(project / "run.toml") == {"learner": {"model": "model"}}
