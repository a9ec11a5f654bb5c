"""The TOML that the docs show goes through `headway check`, in a folder where what it names is there.

The Python is in test_python_blocks.py.
"""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_service.environments.jsonl import JsonlTaskSource
from env_service.environments.task_configs import JsonlTasks
from headway import checking, command
from headway.doctor import before
from headway.own_options import split_options
from reward_service.included import INCLUDED
from reward_service.verifier.submission import validate_arguments
from services.config.sources import TABLES, ConfigError, read_tables
from tests.headway.mistakes.small_model import TEMPLATE, small_model

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
FENCE = re.compile(r"^([ ]*)```(\w+)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
TASK = {"prompt": "27+82=", "verifier": "exact_match", "arguments": {"answer": "109"}}
MODULES = ("own_reward", "guess", "adder", "mine")
REST_OF_THE_FILE = {
    "maze-3": "".join(f'[[env-service.environments]]\nname = "maze-{n}"\nsource = "maze"\n' for n in (3, 4, 5)),
    "chat.jinja": '[learner]\nmodel = "models/addition"\n',
    "trace_url": '[learner]\nmodel = "models/addition"\n',
}
"""Rest of a file of which a page shows a part, by a word in that part."""
LEFT = {
    "10.0.0.1": ("no token is set|no keys are set", "`headway keys` prints the tokens and keys"),
    "127.0.0.1:7340": ("no host of environments|cannot be reached|cannot be made", "the host is another machine's"),
    'source = "harness"': ("is not in harnesses", "packages of others, which the page installs"),
    'priors = "rates.jsonl"': (r"rates\.jsonl cannot be read", "the user's own file, of lines that the page shows"),
    'device = "cuda:0"': ("cuda:0", "the GPU of this machine, if it has one, has other work"),
}
"""Messages that a check may still have about a block, by a word in it, and why it may."""


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Place and text of each block of the language."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            if found[2] == language:
                line = text[: found.start()].count("\n") + 1
                yield f"{page.relative_to(ROOT)}:{line}", textwrap.dedent(found[3])


def settings() -> list[tuple[str, str]]:
    """Blocks that hold tables of a run.toml."""
    return [(place, text) for place, text in blocks("toml") if re.search(rf"^\[+({'|'.join(TABLES)})\b", text, re.M)]


THINKING = "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, tasks, code and secrets that blocks name."""
    folder = tmp_path_factory.mktemp("shown")
    for name in ("addition", "policy", "helpful"):
        small_model(folder / "models" / name, template=TEMPLATE + THINKING)
    scores = folder / "models" / "helpful" / "config.json"
    kind = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    scores.write_text(json.dumps({**json.loads(scores.read_text()), **kind}))
    for example in ("own_task", "own_environment", "own_agent", "branches"):
        for file in (ROOT / "examples" / example).glob("*.*"):
            shutil.copy(file, folder / file.name)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("prose.jsonl", "prose-held-out.jsonl", "tasks.jsonl"):
        (folder / name).write_text(json.dumps(TASK) + "\n")
    shown = ({"prompt": f"{number}+82=", "completion": str(number + 82)} for number in range(40))
    (folder / "shown.jsonl").write_text("".join(json.dumps(each) + "\n" for each in shown))
    for name in ("token", "sandboxes.token", "provers.token"):
        (folder / name).write_text("secret\n")
        (folder / name).chmod(0o600)
    (folder / "chat.jinja").write_text(TEMPLATE)
    mine = [text for _, text in blocks("python") if text.startswith("# mine.py")]
    (folder / "mine.py").write_text("\n".join(mine))
    return folder


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same, on a machine with GPUs and free ports, where a user works in that folder."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    monkeypatch.setattr(checking, "check_port", lambda what, host, port: before.good(what, host))
    monkeypatch.setattr(checking, "resources", lambda configs: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("JUDGE_KEY", "key")
    former = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield project
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(former)


@pytest.mark.parametrize(("place", "text"), settings(), ids=[place for place, _ in settings()])
def test_a_check_has_nothing_to_say_of_the_settings_that_the_docs_show(
    place: str, text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "run.toml"
    path.write_text(text + "".join(f"\n{rest}" for word, rest in REST_OF_THE_FILE.items() if word in text))
    tables = read_tables(path)
    bare = [name for name in ("learner", "generator", "env-service") if name in tables and "model" not in tables[name]]
    words = [word for name in bare for word in (f"--{name}.model", "models/addition")]

    said: list[str] = []
    try:
        command.check(path, split_options(words))
        assert "good for" in capsys.readouterr().out
    except ConfigError as error:
        said = list(error.problems)

    allowed = "|".join(pattern for word, (pattern, _) in LEFT.items() if word in text)
    assert [problem for problem in said if not allowed or not re.search(allowed, problem)] == []


def test_the_docs_show_settings_and_code() -> None:
    assert len(settings()) >= 20
    assert len([*blocks("python")]) >= 10
    shown = "\n".join(text for _, text in settings())
    assert [word for word in (*REST_OF_THE_FILE, *LEFT) if word not in shown] == []


def tasks() -> Iterator[tuple[str, str]]:
    """Place and text of each line of tasks that the docs show; one of two lines is joined."""
    for place, text in [*blocks("json"), *blocks("jsonl")]:
        for line in re.split(r"\n(?=\{)", text):
            if '"verifier"' in line and ('"prompt"' in line or '"messages"' in line) and '"id"' not in line:
                yield place, " ".join(line.split())


def test_the_lines_of_tasks_that_the_docs_show_are_read_and_their_arguments_fit(tmp_path: Path) -> None:
    shown = [*tasks()]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{line}\n" for _, line in shown))
    config = {"name": "shown", "source": "jsonl", "train_file": tmp_path / "tasks.jsonl"}
    source = JsonlTaskSource(JsonlTasks.model_validate(config))
    offered = {one.name: one.arguments for one in INCLUDED}
    read = [source.task("train", index).verification for index in range(source.train_tasks)]
    for one in read:
        if one.verifier in offered:
            validate_arguments(model=offered[one.verifier], arguments=one.arguments)

    assert len(read) == len(shown) >= 10
    assert {one.verifier for one in read} - offered.keys() == {"mentions", "helpful"}, "of the pages' own"
