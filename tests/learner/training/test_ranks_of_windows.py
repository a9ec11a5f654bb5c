import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.learner.training.tiny_models import WINDOW, write_tiny_model
from tests.learner.training.two_ranks_of_windows import SEQUENCES

SCRIPT = Path(__file__).parent / "two_ranks_of_windows.py"
ROOT = Path(__file__).parents[3]
STAGES = ("0", "2", "3")


def test_two_ranks_check_a_model_with_windows_and_compute_its_logprobs_as_each_sequence_alone(tmp_path: Path) -> None:
    # The MLP's matrices are above the 100,000 elements up to which ZeRO-3 keeps a parameter whole.
    model = write_tiny_model("gemma3", tmp_path / "model", intermediate_size=4096)
    argv = [sys.executable, str(SCRIPT), str(model), str(tmp_path), *STAGES]
    subprocess.run(argv, check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    assert max(len(each.token_ids) for each in SEQUENCES) > 2 * WINDOW
    expected = []
    for sequence in SEQUENCES:
        ids = torch.from_numpy(sequence.token_ids).long()
        places = torch.from_numpy(sequence.loss_mask).nonzero()[:, 0]
        with torch.no_grad():
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, places - 1]
        expected.append(logits.log_softmax(dim=-1).gather(1, ids[places][:, None])[:, 0])
    for stage in STAGES:
        seen = load_file(tmp_path / f"{stage}.safetensors")
        torch.testing.assert_close(seen["logprobs"], torch.cat(expected), rtol=0, atol=1e-4)
        assert 0 < float(seen["gap"]) < 1e-4
