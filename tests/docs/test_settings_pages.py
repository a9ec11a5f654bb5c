"""The reference pages of settings hold what the config models hold now."""

import re

import pytest

from docs.reference.__main__ import FOLDER
from docs.reference.settings_pages import MODELS, settings_page
from env_service.environments.imported import class_at, options_model
from env_service.environments.task_configs import BUILT_IN, ClassTasks
from learner.algorithms.presets.registry import ALGORITHMS
from services.config.options import schema_of


@pytest.mark.parametrize("process", MODELS)
def test_the_page_is_that_of_the_present_models(process: str) -> None:
    committed = (FOLDER / f"{process}.md").read_text(encoding="utf-8")

    assert committed == settings_page(process), "run `.venv/bin/python -m docs.reference settings` and commit"


@pytest.mark.parametrize("process", MODELS)
def test_every_option_of_the_command_is_on_the_page(process: str) -> None:
    page = settings_page(process)
    options = [option for option in schema_of(MODELS[process]).options.values() if not option.key.endswith("_file")]

    missing = [option.key for option in options if f"| `{option.key.rpartition('.')[2]}` |" not in page]

    # Lists of tables have a section for their entries instead of a row.
    assert [key for key in missing if f"`[[{process}.{key}]]`" not in page] == []


@pytest.mark.parametrize("process", MODELS)
def test_every_key_but_that_which_picks_a_table_has_a_meaning(process: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\|  \|$", settings_page(process), flags=re.MULTILINE)

    assert set(rows) <= {"source", "kind"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_option_of_a_built_in_environment_is_on_the_page(name: str) -> None:
    page = (FOLDER / "env-service.md").read_text(encoding="utf-8")
    entry = ClassTasks(source=name, name=name)
    model = options_model(class_at(entry), entry)

    _, _, rest = page.partition(f'`[env-service.environments.options]`, `source = "{name}"`')
    part, _, _ = rest.partition("`[env-service.environments.options]`, `source = ")

    fields = model.model_fields if model else ()
    assert part
    assert [field for field in fields if f"| `{field}` |" not in part and f".options.{field}" not in part] == []


@pytest.mark.parametrize("process", MODELS)
def test_the_bounds_of_whole_numbers_are_not_rounded(process: str) -> None:
    assert re.findall(r"integer[^|]*? [≥≤<>] [\d.]+e\+\d+", settings_page(process)) == []


def _algorithm_rows() -> list[list[str]]:
    """The cells of each row of the table of algorithms, as a reader sees them."""
    page = (FOLDER / "learner.md").read_text(encoding="utf-8")
    section = page.partition("## `[learner.algo]`")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_table_of_algorithms_names_each_algorithm_and_whose_each_setting_is() -> None:
    models = ALGORITHMS
    (kind,), rows = [row for row in _algorithm_rows() if row[0] == "`type`"], _algorithm_rows()[1:]
    assert set(re.findall(r"`(\w+)`", kind[3])) == models.keys()

    said: dict[str, set[str]] = {name: set() for name in models}
    for key, _, whose, _ in rows:
        named = set(re.findall(r"`(\w+)`", whose))
        owners = models.keys() - named if whose.startswith("all") else named
        assert owners, f"{key} is nobody's"
        for name in owners:
            said[name].add(key.strip("`"))

    assert said == {name: set(model.model_fields) - {"type"} for name, model in models.items()}


def test_the_table_of_algorithms_has_the_bounds_of_the_numbers() -> None:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for name, model in ALGORITHMS.items():
        for key, info in model.model_fields.items():
            limits = [
                f"{sign} {getattr(mark, at):g}"
                for mark in info.metadata
                for at, sign in signs.items()
                if hasattr(mark, at)
            ]
            values = [value for row, value, whose, _ in _algorithm_rows() if row == f"`{key}`" and _is_of(name, whose)]
            assert [limit for limit in limits if not any(limit in value for value in values)] == [], (name, key)


def _is_of(name: str, whose: str) -> bool:
    return (f"`{name}`" in whose) != whose.startswith("all")
