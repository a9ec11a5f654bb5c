"""A reward model from preferences to scores: the learner trains it, and the reward service serves what it wrote."""

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Launcher, until
from tests.e2e.run_files import free_ports

pytestmark = pytest.mark.e2e

PAIRS = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"} for n in range(10, 40)]
ITEMS = [("12+30=", "42"), ("99+99=", "1"), ("40+02=", "0777")]


def test_a_trained_reward_model_is_served_without_a_word_about_its_input(
    launcher: Launcher, untrained_model: Path, tmp_path: Path
) -> None:
    trained = train(launcher, untrained_model, tmp_path)
    url = serve(launcher, trained)
    items = [
        {"id": str(number), "verifier": "reward_model", "prompt": prompt, "completion": completion}
        for number, (prompt, completion) in enumerate(ITEMS)
    ]
    results = httpx.post(f"{url}/v1/score", json={"items": items}, timeout=60).json()["results"]
    assert [result["reward"] for result in results] == pytest.approx(expected(trained), abs=1e-5)


def train(launcher: Launcher, model: Path, folder: Path) -> Path:
    data, output = folder / "pairs.jsonl", folder / "rewards"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS), encoding="utf-8")
    words = {
        "--algo": "rm",
        "--model": model,
        "--output": output,
        "--data.path": data,
        "--data.batch-size": 8,
        "--data.held-out-share": 0.2,
        "--steps": 3,
        "--run.directory": folder / "runs",
    }
    process = launcher("learner", *(word for name, value in words.items() for word in (name, str(value))))
    assert process.wait() == 0, process.text()
    return output


def serve(launcher: Launcher, model: Path) -> str:
    (port,) = free_ports(1)
    served = json.dumps([{"path": str(model)}])
    process = launcher("reward-service", "--http.port", str(port), "--reward-models", served)
    url = f"http://127.0.0.1:{port}"
    until(lambda: ready(url), what="the reward model to be loaded", during=[process])
    return url


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def expected(model: Path) -> list[float]:
    """By transformers alone: each text with the end token, one by one; the score is that of the end token."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    scores = AutoModelForSequenceClassification.from_pretrained(model)
    with torch.inference_mode():
        rows = [[*tokenizer.encode(prompt + completion), tokenizer.eos_token_id] for prompt, completion in ITEMS]
        return [scores(input_ids=torch.tensor([row])).logits.item() for row in rows]
