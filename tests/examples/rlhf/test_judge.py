import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from examples.rlhf.judge import Judge, read_prompts
from examples.rlhf.language import Language
from examples.rlhf.make_data import END, VOCABULARY, make_model, make_tokenizer

PROMPTS = ["abcde:", "vwxyz:", "hello:"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SFT model, one that always writes an end token in all likelihood, and a reward model; all untrained."""
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


def judge(folder: Path) -> Judge:
    return Judge(
        sft=folder / "sft",
        reward_model=folder / "scores",
        prompts=PROMPTS,
        language=Language.of_seed(0),
        seed=0,
    )


def test_a_model_has_no_kl_to_itself(folder: Path) -> None:
    assert judge(folder).sft.kl == pytest.approx(0.0, abs=1e-6)


def test_the_kl_is_summed_over_the_positions_of_the_samples_and_averaged_over_samples(
    folder: Path, tmp_path: Path
) -> None:
    """Of a model of logits 0 but for the end token's, against one whose logits are all 0.

    With p the probability of the end token and V tokens, each position has the KL
    d = p log(p V) + (1 - p) log((1 - p) V / (V - 1)). At p = 1 - 1e-6 or more every sample is one end token, so that the
    sum has one position and the mean is d.
    """
    sft = AutoModelForCausalLM.from_pretrained(folder / "sft")
    with torch.no_grad():
        sft.model.embed_tokens.weight.zero_()
    make_tokenizer().save_pretrained(tmp_path / "flat")
    sft.save_pretrained(tmp_path / "flat")
    (tmp_path / "scores").symlink_to(folder / "scores")
    (tmp_path / "sft").symlink_to(tmp_path / "flat")
    assert VOCABULARY[1] == END
    with torch.no_grad():
        sft.model.embed_tokens.weight[:, 0] = 1.0  # tied: every token's state and every token's logit
        sft.model.norm.weight.fill_(1.0)
        sft.model.embed_tokens.weight[:, 0] = 0.0
        sft.model.embed_tokens.weight[3:, 1] = 1.0
        sft.model.embed_tokens.weight[1, 1] = 40.0
    sft.save_pretrained(tmp_path / "ends")
    found = judge(tmp_path).judge(tmp_path / "ends")
    assert found.kl == pytest.approx(torch.log(torch.tensor(float(len(VOCABULARY)))).item(), rel=1e-3)
    assert found.length == 0.0


def test_prompts_are_read_from_tasks(tmp_path: Path) -> None:
    tasks = [{"prompt": prompt, "verifier": "reward_model"} for prompt in PROMPTS]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, tasks)) + "\n", encoding="utf-8")
    assert read_prompts(file) == PROMPTS
