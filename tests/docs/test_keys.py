"""Settings that the docs name by their whole key, such as `learner.max_lag`, are there."""

import re
from pathlib import Path

import pytest

from docs.reference.settings_pages import MODELS
from services.config.options import schema_of
from tests.docs.test_blocks import FENCE, PAGES, ROOT

NAMED = re.compile(rf"`(?:--)?((?:{'|'.join(MODELS)}|run)\.[\w.-]+)")
NO_SETTINGS = {
    "run.toml",
    "run.lock",
    "learner.data.distillation.write_top_logprobs",
    "learner.startupSeconds",
    "learner.maxUnavailable",
    "generator.tensorParallelSize",
    "generator.replicas",
    "run.demo",
}
"""Files, a function, and values of the Helm chart."""


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Each key, and each table that holds keys."""
    keys = {f"{name}.{key}" for name, model in MODELS.items() for key in schema_of(model).options}
    keys |= {key.partition(".")[2] for key in keys if ".run." in key}
    return keys | {".".join(key.split(".")[:depth]) for key in keys for depth in (2, 3)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_settings_that_a_page_names_are_there(page: Path, known: set[str]) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = {found[1].strip(".-") for found in NAMED.finditer(text)} - NO_SETTINGS
    plain = {key: ".".join([process, rest.replace("-", "_")]) for key in named for process, rest in [key.split(".", 1)]}

    assert [key for key, name in plain.items() if name not in known and ".extra." not in key] == []
