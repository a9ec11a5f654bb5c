"""A plain sampler of the addition task, in place of vLLM, the services and the rewards: what a benchmark of the trainer
alone trains on.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protocol.trajectories import Purpose

if TYPE_CHECKING:
    from torch import Tensor

    from learner.training.batch import TrainSequence
    from learner.training.trainer import Trainer

MODEL = Path("models/addition")
MAX_TOKENS = 5
_MOST_ROUNDS = 12


class PlainSampler:
    """Completions of addition tasks by a copy of the trainer's weights, with their rewards; float32, temperature 1."""

    def __init__(self, *, seed: int, model: Path = MODEL) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model).eval()
        self._train, self._held_out = (_Tasks(purpose, self._tokenizer) for purpose in ("train", "evaluate"))
        self._order = self._indices(np.random.default_rng(seed))

    def _indices(self, draw: np.random.Generator) -> Iterator[int]:
        while True:
            yield from draw.permutation(len(self._train.answers)).tolist()

    def load(self, trainer: "Trainer") -> None:
        """The trainer's weights as of now."""
        import torch

        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for tensor in trainer.host_copy().tensors:
                own[tensor.name].copy_(tensor.value)

    def batch(
        self, *, groups: int, group_size: int, with_spread: bool = False, with_greedy: bool = False
    ) -> "list[TrainSequence]":
        """A step's: the next tasks of the training set, several completions of each.

        `with_spread`: groups of equal rewards are left out, and others are sampled in their place; raises RuntimeError
        if hardly any has spread. `with_greedy`: each has the reward of the greedy answer to its task.
        """
        made: list[TrainSequence] = []
        for _ in range(_MOST_ROUNDS):
            indices = list(islice(self._order, groups))
            sampled = self._sampled(self._train, indices, group_size)
            if with_greedy:
                greedy = [each.reward for each in self._sampled(self._train, indices, 1, greedy=True)]
                sampled = [replace(each, greedy_reward=greedy[each.group]) for each in sampled]
            if not with_spread:
                return sampled
            made += _with_spread(sampled, group_size)
            if len(made) >= groups * group_size:
                return [replace(each, group=row // group_size) for row, each in enumerate(made[: groups * group_size])]
        raise RuntimeError(
            f"of {_MOST_ROUNDS * groups} groups {len(made) // group_size} have rewards that differ: the policy solves "
            "nothing any more, or everything"
        )

    def accuracy(self) -> float:
        """On all held-out tasks, a completion each."""
        held_out = self._sampled(self._held_out, range(len(self._held_out.answers)), 1)
        return float(np.mean([sequence.reward for sequence in held_out]))

    def _sampled(
        self, tasks: "_Tasks", indices: Sequence[int], size: int, *, greedy: bool = False
    ) -> "list[TrainSequence]":
        from learner.training.batch import TrainSequence

        prompts = tasks.prompts[list(indices)]
        tokens, logprobs, lengths = self._completed(prompts, size, greedy=greedy)
        first, made = prompts.shape[1], []
        for row, length in enumerate(lengths.tolist()):
            index = indices[row // size]
            own = tokens[row, :length]
            text = self._tokenizer.decode(own, skip_special_tokens=True)
            mask = np.arange(first + length) >= first
            made.append(
                TrainSequence(
                    token_ids=np.concatenate([prompts[row // size], own]),
                    loss_mask=mask,
                    behavior_logprobs=np.concatenate([np.zeros(first, np.float32), logprobs[row, :length]]),
                    lags=np.zeros(len(mask), dtype=np.int32),
                    reward=float(text == tasks.answers[index]),
                    group=row // size,
                )
            )
        return made

    def _completed(
        self, prompts: NDArray[np.int32], size: int, *, greedy: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
        """`size` completions of each prompt [P, L]: tokens [B, T], logprobs [B, T], and lengths [B], EOS counted. The
        prompts are computed once each, and their keys and values taken by all of their completions.
        """
        import torch

        columns: list[Tensor] = []
        logprobs: list[Tensor] = []
        with torch.no_grad():
            seen = self._model(torch.from_numpy(prompts).long(), use_cache=True, logits_to_keep=1)
            cache, logits = seen.past_key_values, seen.logits.repeat_interleave(size, dim=0)
            if size > 1:
                cache.batch_repeat_interleave(size)
            for place in range(MAX_TOKENS):
                if place:
                    logits = self._model(columns[-1], past_key_values=cache, use_cache=True).logits
                spread = torch.log_softmax(logits[:, -1].float(), dim=-1)
                chosen = spread.argmax(dim=-1, keepdim=True) if greedy else torch.multinomial(spread.exp(), 1)
                columns.append(chosen)
                logprobs.append(spread.gather(1, chosen))
        tokens = torch.cat(columns, dim=1)
        ended = (tokens == self._tokenizer.eos_token_id).int()
        lengths = torch.where(ended.any(dim=1), ended.argmax(dim=1) + 1, MAX_TOKENS)
        return tokens.int().numpy(), torch.cat(logprobs, dim=1).numpy(), lengths.numpy()


class _Tasks:
    """Tasks of one purpose: `prompts` int32 [N, L], all of one length, and their `answers`."""

    def __init__(self, purpose: Purpose, tokenizer: Any) -> None:
        from env_service.environments.jsonl import Addition

        source = Addition()
        count = source.train_tasks if purpose == "train" else source.evaluation_tasks
        tasks = [source.task(purpose, index) for index in range(count)]
        prompts = tokenizer([str(task.prompt) for task in tasks], add_special_tokens=False)["input_ids"]
        self.prompts = np.asarray(prompts, dtype=np.int32)
        self.answers = [task.verification.arguments["answer"] for task in tasks if task.verification]


def _with_spread(sampled: "Sequence[TrainSequence]", size: int) -> "list[TrainSequence]":
    groups = [sampled[start : start + size] for start in range(0, len(sampled), size)]
    return [each for group in groups if len({member.reward for member in group}) > 1 for each in group]


class LagQueue:
    """Batches that wait until each of their tokens is exactly `lag` versions old."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._waiting = deque["list[TrainSequence]"]()

    def put(self, batch: "list[TrainSequence]") -> "list[TrainSequence] | None":
        """The batch that is now to be trained on, with the lags of its tokens; None while the queue fills up."""
        self._waiting.append(batch)
        return aged(self._waiting.popleft(), lag=self._lag) if len(self._waiting) > self._lag else None


def aged(batch: "Sequence[TrainSequence]", *, lag: int) -> "list[TrainSequence]":
    """The same, sampled so many versions ago."""
    return [replace(each, lags=np.where(each.loss_mask, lag, 0).astype(np.int32)) for each in batch]
