import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from examples.addition.make_model import END, make_model
from examples.rlhf.judge import WinRateJudge, read_prompts
from examples.rlhf.language import LetterLanguage
from examples.rlhf.make_data import VOCABULARY, make_tokenizer

PROMPTS = ["abcde:", "vwxyz:", "hello:"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SFT model and a reward model, both untrained."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("judged")
    tokenizer = make_tokenizer()
    sft = make_model(tokenizer, seed=0)
    for name in ("sft", "scores"):
        tokenizer.save_pretrained(root / name)
    sft.save_pretrained(root / "sft")
    sft.config.num_labels = 1
    LlamaForSequenceClassification(sft.config).save_pretrained(root / "scores")
    return root


def judge(folder: Path) -> WinRateJudge:
    return WinRateJudge(
        sft=folder / "sft",
        reward_model=folder / "scores",
        prompts=PROMPTS,
        language=LetterLanguage.of_seed(0),
        seed=0,
    )


def test_a_model_has_no_kl_to_itself(folder: Path) -> None:
    assert judge(folder).sft.kl == pytest.approx(0.0, abs=1e-6)


def test_the_kl_is_summed_over_the_positions_of_a_sample(folder: Path, tmp_path: Path) -> None:
    """Against a uniform model, for one that writes nothing but the end token.

    With embeddings of 0, tied to the output, all of the V logits are 0. With letters and colon at e_1 and the end token
    at 40 e_1, the normalised state is sqrt(H) e_1, to the small random layers, so the end token's logit is some 39
    sqrt(128) = 441 above all others: its probability is 1. A sample has that one position, of the KL log 1 - log 1/V.
    """
    model = AutoModelForCausalLM.from_pretrained(folder / "sft")
    embeddings = model.model.embed_tokens.weight
    with torch.no_grad():
        embeddings.zero_()
    model.save_pretrained(tmp_path / "sft")
    make_tokenizer().save_pretrained(tmp_path / "sft")
    with torch.no_grad():
        embeddings[VOCABULARY.index("a") :, 1] = 1.0
        embeddings[VOCABULARY.index(END), 1] = 40.0
    model.save_pretrained(tmp_path / "ends")
    (tmp_path / "scores").symlink_to(folder / "scores")
    found = judge(tmp_path).judge(tmp_path / "ends")
    assert found.kl == pytest.approx(math.log(len(VOCABULARY)), rel=1e-4)
    assert found.length == 0.0


def test_prompts_are_read_from_tasks(tmp_path: Path) -> None:
    tasks = [{"prompt": prompt, "verifier": "reward_model"} for prompt in PROMPTS]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, tasks)) + "\n", encoding="utf-8")
    assert read_prompts(file) == PROMPTS
