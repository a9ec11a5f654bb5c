"""Judges a trained model by the gold reward, which no part of the training knows.

    python -m examples.rlhf.judge MODEL [--sft MODEL] [--reward-model MODEL] [--held-out FILE] [--seed N]

For each held-out prompt it samples one continuation by the trained model and one by the SFT model at temperature 1, and
says how often the trained one is better by the gold reward and by the reward model, and how far the model has come.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.rlhf.language import LetterLanguage, win_rate

MAX_TOKENS = 32


class Tokenizer(Protocol):
    """The used part of a Hugging Face tokenizer."""

    eos_token_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str: ...


class Model(Protocol):
    """The used part of a Hugging Face model; its output's `logits` are [B, T, V], or of a reward model [B, 1]."""

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor) -> "LogitsOutput": ...

    def generate(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        max_new_tokens: int,
        do_sample: bool,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> Tensor: ...


class LogitsOutput(Protocol):
    """A model's output."""

    logits: Tensor


@dataclass(frozen=True)
class Judgement:
    """A model against the SFT model. Rates are shares of the prompts, rewards have no unit, lengths are in letters.

    `kl`: of the model to the SFT model in nats per continuation: at each position of the model's own samples exactly,
    over the vocabulary, summed over positions, and averaged over samples.
    """

    gold_win_rate: float
    proxy_win_rate: float
    kl: float
    gold: float
    proxy: float
    length: float


class WinRateJudge:
    """Holds the SFT model's samples, which every judged model is compared with. All models run on the CPU."""

    def __init__(
        self, *, sft: Path, reward_model: Path, prompts: Sequence[str], language: LetterLanguage, seed: int
    ) -> None:
        self._tokenizer = cast(Tokenizer, AutoTokenizer.from_pretrained(sft))
        self._sft = _policy(sft)
        loaded = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
        self._reward_model = cast(Model, loaded.eval())
        self._prompts = prompts
        self._language = language
        self._seed = seed
        written = self._written(self._sft, seed=seed)
        self._gold, self._proxy = self._golds(written), self._proxies(written)

    @property
    def sft(self) -> Judgement:
        """The SFT model against other samples of its own: win rates of about a half, and no KL."""
        return self._judge(self._sft)

    def judge(self, model: Path) -> Judgement:
        """Of a Hugging Face directory."""
        return self._judge(_policy(model))

    @torch.inference_mode()
    def _judge(self, model: Model) -> Judgement:
        written = self._written(model, seed=self._seed + 1)
        gold, proxy = self._golds(written), self._proxies(written)
        return Judgement(
            gold_win_rate=win_rate(gold, self._gold),
            proxy_win_rate=win_rate(proxy, self._proxy),
            kl=self._kl(model, written),
            gold=statistics.fmean(gold),
            proxy=statistics.fmean(proxy),
            length=statistics.fmean(len(self._text(tokens)) for tokens in written),
        )

    @torch.inference_mode()
    def _written(self, model: Model, *, seed: int) -> list[list[int]]:
        """A continuation for each prompt: its tokens, with the end token unless it was cut."""
        rows = torch.tensor([self._tokenizer.encode(prompt) for prompt in self._prompts])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = model.generate(
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=MAX_TOKENS,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
        return [_until(row, self._tokenizer.eos_token_id) for row in made[:, rows.shape[1] :].tolist()]

    def _kl(self, model: Model, written: Sequence[list[int]]) -> float:
        rows, mask = self._rows([*map(self._tokenizer.encode, self._prompts)], written)
        start = rows.shape[1] - max(map(len, written))
        ours, theirs = (each(input_ids=rows, attention_mask=mask).logits.log_softmax(-1) for each in (model, self._sft))
        per_position = (ours.exp() * (ours - theirs)).sum(dim=-1)[:, start - 1 : -1]
        return float((per_position * mask[:, start:]).sum() / len(rows))

    def _rows(self, prompts: Sequence[list[int]], written: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """[B, T] token ids padded on the right, and 1 where they are no padding. All prompts are of one length."""
        longest = max(map(len, written))
        rows = [[*p, *w, *[0] * (longest - len(w))] for p, w in zip(prompts, written, strict=True)]
        mask = [[1] * (len(p) + len(w)) + [0] * (longest - len(w)) for p, w in zip(prompts, written, strict=True)]
        return torch.tensor(rows), torch.tensor(mask)

    def _golds(self, written: Sequence[list[int]]) -> list[float]:
        return [self._language.gold(self._text(tokens)) for tokens in written]

    @torch.inference_mode()
    def _proxies(self, written: Sequence[list[int]]) -> list[float]:
        """The reward model's scores, each at the end token, as it was trained."""
        end = self._tokenizer.eos_token_id
        ended = [tokens if tokens[-1] == end else [*tokens, end] for tokens in written]
        rows, mask = self._rows([*map(self._tokenizer.encode, self._prompts)], ended)
        scores: list[float] = self._reward_model(input_ids=rows, attention_mask=mask).logits[:, 0].tolist()
        return scores

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file of tasks."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def _policy(path: Path) -> Model:
    return cast(Model, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


def _until(row: list[int], end: int) -> list[int]:
    return row[: row.index(end) + 1] if end in row else row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sft", type=Path, default=Path("models/rlhf-sft"))
    parser.add_argument("--reward-model", type=Path, default=Path("models/rlhf-rm"))
    parser.add_argument("--held-out", type=Path, default=Path("models/rlhf-init/held_out.jsonl"))
    parser.add_argument("--seed", type=int, default=0, help="of the language; default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    judge = WinRateJudge(
        sft=arguments.sft,
        reward_model=arguments.reward_model,
        prompts=read_prompts(arguments.held_out),
        language=LetterLanguage.of_seed(arguments.seed),
        seed=arguments.seed,
    )
    for name, judgement in (("SFT model", judge.sft), (str(arguments.model), judge.judge(arguments.model))):
        numbers = "  ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in asdict(judgement).items())
        print(f"{name}: {numbers}")


if __name__ == "__main__":
    main()
