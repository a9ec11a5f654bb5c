"""A promotion that is killed at any of its calls of the disk leaves one of two releases, whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_a_kill_at_any_call_of_a_promotion_leaves_the_release_before_or_the_one_after(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.learner.releases.promoting", str(tmp_path)]
    ended = subprocess.run(words, check=True, capture_output=True, text=True, timeout=500)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert len(found) > 15
    assert [one for one in found if one["fault"] or one["loaded"] != one["released"]] == []
    assert {one["released"] for one in found} == {"1.10", "1.20"}
    assert [one["released"] for one in found if not one["killed"]] == ["1.20"]
    versions = [one["released"] for one in found]
    assert versions == sorted(versions), "there is one call by which it is decided"
    assert {one["after"] for one in found if one["released"] == "1.10"} == {"1.30"}
    assert [one["drafts"] for one in found if one["drafts"]] == []
