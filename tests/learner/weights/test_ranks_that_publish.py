import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learner.training.tiny_model import write_tiny_llama

SCRIPT = Path(__file__).parent / "ranks_that_publish.py"
ROOT = Path(__file__).parents[3]
CASES = (
    {"zero_stage": 3},
    {"zero_stage": 3, "dtype": "bfloat16", "publish_dtype": "bfloat16"},
    {"zero_stage": 1, "dtype": "bfloat16"},
)


@pytest.mark.timeout(400)
def test_two_ranks_publish_what_each_has_and_the_death_of_one_midway_takes_nobody_out_of_service(
    tmp_path: Path,
) -> None:
    # The MLP's matrices are 64 x 1600: above the 100,000 elements up to which ZeRO-3 keeps a parameter whole.
    model = write_tiny_llama(tmp_path / "model", tied=True, intermediate=1600)
    argv = [sys.executable, str(SCRIPT), str(model), str(tmp_path), *map(json.dumps, CASES), "dies"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(argv, env=environment, check=False, timeout=380, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for number, case in enumerate(CASES):
        seen = json.loads((tmp_path / f"{number}.json").read_text())
        assert seen["differs"] == [], case
        assert (seen["joined"], seen["pulls"]) == (2, ["1.2"]), "the late one got what the first one serves"
        mine, theirs = seen["received"]["0"], seen["received"]["1"]
        assert mine + theirs >= 2 * 2 * seen["bytes"], "two broadcasts to two workers"
        assert 0.4 < mine / (mine + theirs) < 0.6, "each sends about half"
        assert seen["kept"] < 0.6 * seen["bytes"], "rank 0 holds no more than what it sends"
    seen = json.loads((tmp_path / f"{len(CASES)}.json").read_text())
    assert seen == {
        "serving": {"a": "1.1", "b": "1.1"}, "versions": ["1.1", "1.1"], "changed": [[], []], "expelled": 0,
        "reports": [0, 1],
    }  # fmt: skip
