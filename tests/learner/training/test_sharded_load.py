import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ApertusConfig, ApertusForCausalLM, AutoModelForCausalLM

from learner.training.policy import TextFiles, load_causal_lm
from learner.training.score_model import load_score_model, save_score_model
from tests.learner.training.test_score_model import snapshot
from tests.learner.training.tiny_model import VOCABULARY, write_tiny_llama
from tests.learner.training.tiny_models import write_tiny_model

SCRIPT = Path(__file__).parent / "two_ranks_of_a_load.py"
ROOT = Path(__file__).parents[3]
WEIGHTS = "model.safetensors"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(out), *arguments],
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def untied_by_its_numbers(path: Path) -> Path:
    """A folder whose config ties the head to the embeddings, and whose file has both, with other numbers."""
    weights = load_file(write_tiny_llama(path, tied=True) / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1.0
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    return path


def in_several_files(path: Path, source: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def in_pickled_files(path: Path, source: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.save_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    return path


def with_single_numbers(path: Path) -> Path:
    """A model whose file has tensors without dimensions: numbers of its activation functions."""
    config = ApertusConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        pad_token_id=None,
    )
    ApertusForCausalLM(config).save_pretrained(path)
    assert any(not value.dim() for value in load_file(path / WEIGHTS).values())
    return path


def reward_model(path: Path, source: Path) -> Path:
    model = load_score_model(source, dtype=torch.float32, head_seed=3)
    save_score_model(snapshot(model), model=model, source=TextFiles(source), destination=path)
    return path


@pytest.mark.timeout(300)
def test_a_model_in_parts_has_the_numbers_of_the_whole_one_bit_by_bit(tmp_path: Path) -> None:
    tied, untied = write_tiny_llama(tmp_path / "tied", tied=True), write_tiny_llama(tmp_path / "untied", tied=False)
    cases = (
        (tied, "policy", "float32", "0"),
        (tied, "policy", "bfloat16", "4"),
        (untied, "policy", "bfloat16", "0"),
        (untied_by_its_numbers(tmp_path / "by numbers"), "policy", "float32", "0"),
        (in_several_files(tmp_path / "several", untied), "policy", "float32", "0"),
        (in_pickled_files(tmp_path / "pickled", tied), "policy", "float32", "0"),
        (write_tiny_model("qwen3 moe", tmp_path / "experts"), "policy", "float32", "0"),
        (write_tiny_model("deepseek v3", tmp_path / "buffers"), "policy", "bfloat16", "0"),
        (write_tiny_model("gpt2", tmp_path / "unpacked"), "policy", "float32", "0"),
        (with_single_numbers(tmp_path / "single numbers"), "policy", "float32", "0"),
        (tied, "scores", "float32", "0"),
        (reward_model(tmp_path / "scores", untied), "scores", "bfloat16", "4"),
    )
    out = tmp_path / "out"
    out.mkdir()
    ended = run(out, *(str(each) for case in cases for each in case))
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for number, (path, kind, dtype, lora) in enumerate(cases):
        first, second = seen[0][number], seen[1][number]
        assert first["wrong"] == second["wrong"] == [], (path, kind)
        # No number is on both ranks, but for adapters and a new head, which are made and not loaded.
        assert first["kept"] + second["kept"] == first["whole"]
        assert (first["whole"] == first["of"]) == (lora == "0" and (kind == "policy" or path.name == "scores"))
        if kind == "policy":
            exported = out / path.name / dtype / lora
            assert_same_model(exported, path, dtype=getattr(torch, dtype))
            given = path / "generation_config.json"
            if given.exists():
                assert (exported / given.name).read_text("utf-8") == given.read_text("utf-8")


def assert_same_model(found: Path, expected: Path, *, dtype: torch.dtype) -> None:
    values, wanted = (load_causal_lm(path, dtype=dtype).state_dict() for path in (found, expected))
    assert list(values) == list(wanted)
    for name, value in values.items():
        assert torch.equal(value, wanted[name]), (expected, name)


def test_no_rank_waits_for_one_that_cannot_read_the_model(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model", tied=True)
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-1000])
    ended = run(tmp_path, str(path), "policy", "float32", "0")
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))[0] for rank in range(2))
    assert "incomplete metadata" in first["error"]
    assert second == {"error": f"rank 0 could not load the model in {path}: its own log says why"}
