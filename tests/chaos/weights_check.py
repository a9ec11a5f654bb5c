"""Whether a generator serves the weights that the learner exported: its logprobs against those of the model on disk."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.chaos.system import System

_TOLERANCE = 1e-3
_PROMPTS = ((3, 4, 13, 5, 6, 14), (7, 8, 13, 9, 3, 14))


def serves_exported_weights(system: "System", generator: str) -> list[str]:
    """Complaints about a generator that should serve the run's last version."""
    state = system.state(generator)
    version = str(state.get("policy_version"))
    if not state.get("serving") or not version.endswith(f".{system.size.steps}"):
        return [f"{generator} does not serve version {system.size.steps}: {state}"]
    found = []
    for prompt in _PROMPTS:
        parts = _generated(system, generator, prompt)
        tokens = [token for part in parts for token in part["token_ids"]]
        logprobs = [logprob for part in parts for logprob in part["behavior_logprobs"]]
        ours = _logprobs(system.run.path / "model", prompt, tokens)
        gap = max(abs(one - other) for one, other in zip(logprobs, ours, strict=True))
        if not gap < _TOLERANCE:
            found.append(f"{generator}'s logprobs differ by {gap:.3g} nats from the exported model's")
    return found


def _generated(system: "System", generator: str, prompt: tuple[int, ...]) -> list[dict[str, Any]]:
    body = {"request_id": "chaos", "prompt_token_ids": list(prompt), "purpose": "train", "sampling": {"max_tokens": 4}}
    answer = system.ask(generator, "/v1/generate", json=body)
    return [json.loads(line) for line in answer.text.splitlines()]


def _logprobs(model: Path, prompt: tuple[int, ...], tokens: list[int]) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        rows = policy(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    return [float(rows[len(prompt) - 1 + index, token]) for index, token in enumerate(tokens)]
