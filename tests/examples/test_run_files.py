"""Every run.toml of the examples passes `headway check`, and the Makefile's targets name files that there are."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from examples.swe.repairs import repair_of, task_of
from headway import checking
from headway import command as umbrella
from headway.doctor import before
from tests.headway.mistakes.small_model import TEMPLATE, small_model

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "examples").glob("*/run.toml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NAMED = re.compile(r"(?<![\w./-])((?:examples|deploy|benchmarks|requirements|tests)/[\w./-]+\.\w+)")
MODULES = re.compile(r"-m ((?:examples|benchmarks|tests|docs)(?:\.\w+)+)")


def models_of(path: Path) -> set[str]:
    """The model folders that a run file names, of those that somebody makes before."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    named = re.findall(r'"(models/[\w./-]+)"', str(tables).replace("'", '"'))
    return {name for name in named if not name.endswith(".jsonl")}


@pytest.mark.parametrize("run", RUNS, ids=[path.parent.name for path in RUNS])
def test_the_run_of_each_example_passes_its_check(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model in each place that the example's own commands would fill."""
    for name in models_of(run):
        config = small_model(tmp_path / name, positions=8192, template=TEMPLATE) / "config.json"
        if name.endswith("-rm"):
            judge = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
            config.write_text(json.dumps({**json.loads(config.read_text()), **judge}))
    if run.parent.name == "verifiers":  # its server writes it
        (tmp_path / "tasks.jsonl").write_text('{"idx": 0, "prompt": "1+1="}\n')
    if run.parent.name == "rlhf":  # examples/rlhf/make_data.py does
        (tmp_path / "models" / "rlhf-init").mkdir()
        for name in ("tasks.jsonl", "held_out.jsonl"):
            (tmp_path / "models" / "rlhf-init" / name).write_text('{"prompt": "abc", "verifier": "reward_model"}\n')
    if run.parent.name == "swe":  # examples/swe/make_model.py does
        (tmp_path / "models" / "swe-init").mkdir()
        for name, held_out in (("train", False), ("held_out", True)):
            line = json.dumps(task_of(repair_of(0, held_out=held_out)))
            (tmp_path / "models" / "swe-init" / f"{name}.jsonl").write_text(f"{line}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(run.parent))
    monkeypatch.setattr(before, "available_memory", lambda: 64 << 30)
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))
    monkeypatch.setattr(sys, "argv", ["headway", "check", str(run), "--run.directory", str(tmp_path / "runs")])

    with pytest.raises(SystemExit) as ended:
        umbrella.main()
    said = capsys.readouterr()
    assert (ended.value.code or 0, said.err) == (0, "")
    assert "good for learner, generator" in said.out


def test_the_makefile_names_files_that_there_are() -> None:
    files = set(NAMED.findall(MAKEFILE))
    modules = {f"{name.replace('.', '/')}" for name in MODULES.findall(MAKEFILE)}
    assert len(files) > 5
    assert {name for name in files if not (ROOT / name).exists()} == set()
    assert {name for name in modules if not ((ROOT / f"{name}.py").exists() or (ROOT / name).is_dir())} == set()


def test_every_example_that_a_target_runs_has_a_model_that_a_target_makes() -> None:
    for name in re.findall(r"headway up (examples/\w+/run\.toml)", MAKEFILE):
        makes = {
            str(value)
            for file in (ROOT / name).parent.glob("*")
            if file.suffix in (".toml", ".py", ".sh")
            for value in re.findall(r"models/[\w.-]+", file.read_text(encoding="utf-8"))
        } | set(re.findall(r"models/[\w.-]+", MAKEFILE))
        assert models_of(ROOT / name) <= makes, name
