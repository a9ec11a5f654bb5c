"""The reference pages of settings hold what the config models hold now."""

import pytest

from docs.reference.__main__ import FOLDER
from docs.reference.settings_pages import MODELS, settings_page
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
