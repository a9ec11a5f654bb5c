"""A generator's answers are compared with a model on disk: those of other weights are complained of."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.chaos.weights_check import Answer, differences
from tests.e2e.mixture import write_mixture


def answer_of(model: Path) -> Answer:
    prompt, tokens = (3, 4, 13), (5, 6)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([[*prompt, *tokens]])).logits[0]
    rows = logits.log_softmax(-1)
    logprobs = tuple(float(rows[len(prompt) - 1 + n, token]) for n, token in enumerate(tokens))
    return Answer(prompt=prompt, tokens=tokens, logprobs=logprobs, versions=frozenset({"1.5"}))


def test_answers_of_other_weights_are_complained_of(tmp_path: Path) -> None:
    model = write_mixture(tmp_path / "model")
    answer = answer_of(model)
    assert differences("g1", [answer], model=model) == []
    policy = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        policy.model.layers[0].mlp.experts.down_proj.mul_(2.0)
    policy.save_pretrained(model)
    (complaint,) = differences("g1", [answer], model=model)
    assert complaint.startswith("g1 gives logprobs that differ by ")
    assert len(differences("g1", [replace(answer, logprobs=(float("nan"),) * 2)], model=model)) == 1
