"""Operations of clients, and the same computed in the plainest way: each sequence alone, by transformers itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.training.adapter_ranks import RankedAdapters
from learner.training.adapter_trainer import AdapterTrainer
from learner.training.client_operations import AdapterShape, ClientDatum, ForwardBackward
from tests.learner.algorithms.preset_totals import preset_total
from tests.learner.training.tiny_model import VOCABULARY

Arrays = Mapping[str, np.ndarray]
LENGTHS = (3, 17, 9, 1, 12)


def datum(seed: int, length: int, *, width: int | None = None) -> ClientDatum:
    """A sequence with the inputs of every loss; the first third is a prompt, without advantages."""
    random = np.random.default_rng(seed)
    shape = (length,) if width is None else (length, width)

    def drawn() -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    advantages = drawn()
    advantages[: length // 3] = 0.0
    return ClientDatum(
        token_ids=random.integers(0, VOCABULARY, length),
        inputs={
            "target_tokens": random.integers(0, VOCABULARY, shape),
            "weights": drawn(),
            "logprobs": drawn() - 3.5,
            "advantages": advantages,
            "sequence_ratio_mask": (np.abs(advantages) > 0).astype(np.float32),
        },
    )


def operation(
    model_id: str,
    seed: int,
    *,
    loss: str = "cross_entropy",
    lengths: Sequence[int] = LENGTHS,
    width: int | None = None,
    forward_only: bool = False,
    **config: float | str,
) -> ForwardBackward:
    data = tuple(datum(100 * seed + number, length, width=width) for number, length in enumerate(lengths))
    return ForwardBackward(model_id, data, loss, config, forward_only=forward_only)


def shape_of(number: int) -> AdapterShape:
    """Mixed ranks, scales and layers; most with the output projection."""
    return AdapterShape(
        rank=4 + 4 * (number % 3),
        alpha=16.0 + number,
        seed=number,
        attention=number % 4 != 3,
        mlp=number % 5 != 4,
        unembed=number % 3 != 2,
    )


def with_models(trainer: AdapterTrainer | RankedAdapters, count: int) -> list[str]:
    """New training models whose `up` is no longer 0, so that every factor has a gradient."""
    names = [f"model-{number}" for number in range(count)]
    for number, name in enumerate(names):
        trainer.create(name, shape_of(number))
        state = trainer.state(name)
        random = np.random.default_rng(number)
        for key, value in state.items():
            if key.endswith(".up"):
                state[key] = random.normal(scale=0.05, size=value.shape).astype(np.float32)
        trainer.restore(name, shape_of(number), state)
    return names


def gradients_of(state: Arrays) -> dict[str, np.ndarray]:
    return {name: value for name, value in state.items() if name.endswith(".gradient")}


@dataclass(frozen=True)
class PlainModel:
    """The base model as transformers computes it, with an adapter merged into its weights."""

    model: torch.nn.Module

    @classmethod
    def load(cls, path: Path) -> "PlainModel":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        assert isinstance(model, torch.nn.Module)
        return cls(model.eval().requires_grad_(False))

    def factors(self, state: Arrays) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(np.array(value)).requires_grad_()
            for name, value in state.items()
            if name.endswith((".up", ".down"))
        }

    def logprobs(self, factors: Mapping[str, Tensor], given: ClientDatum, *, scale: float) -> Tensor:
        """Of the datum's targets, shaped as these are."""
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        merged = {}
        for name in factors:
            layer, _, side = name.rpartition(".")
            if side == "up":
                merged[f"{layer}.weight"] = (
                    weights[f"{layer}.weight"] + scale * factors[name] @ factors[f"{layer}.down"]
                )
        ids = torch.from_numpy(given.token_ids)[None]
        output = torch.func.functional_call(
            self.model, merged, kwargs={"input_ids": ids, "use_cache": False}, tie_weights=False
        )
        targets = torch.from_numpy(given.inputs["target_tokens"])
        every = output.logits[0].float().log_softmax(dim=-1)
        found: Tensor = every.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
        return found


def plain_loss(name: str, p: Tensor, given: ClientDatum) -> Tensor:
    """The loss of a datum by its formula, with the defaults as numbers; in float64."""
    of = {key: torch.from_numpy(value).double() for key, value in given.inputs.items()}
    p, q, gain = p.double(), of["logprobs"], of["advantages"]
    r = (p - q).exp()
    if name == "cross_entropy":
        return -(of["weights"] * p).sum()
    if name == "importance_sampling":
        return -(r * gain).sum()
    if name == "cispo":
        return -(r.detach().clamp(0.0, 4.0) * p * gain).sum()
    if name == "dro":
        return -(p * gain - 0.025 * (p - q) ** 2).sum()
    if name == "stable_reinforce":
        pull = ((p - q) ** 2 / 2).clamp(max=10.0)
        return (-(r.detach().clamp(max=1.0) * p * gain) + 0.1 * pull)[gain != 0].sum()
    if name == "gspo":
        inside = of["sequence_ratio_mask"] > 0
        mean = (p.detach() - q)[inside].mean() if inside.any() else p.new_zeros(())
        r = mean.exp() * (p - p.detach()).exp()
    return -torch.minimum(r * gain, r.clamp(0.8, 1.2) * gain).sum()


def preset_loss(name: str, logprobs: Sequence[Tensor], data: Sequence[ClientDatum]) -> Tensor:
    """The loss of one of our algorithms; in float64."""
    behavior, gains = (
        torch.cat([torch.from_numpy(datum.inputs[key]).double() for datum in data])
        for key in ("logprobs", "advantages")
    )
    lengths = torch.tensor([len(each) for each in logprobs])
    sequences = torch.repeat_interleave(torch.arange(len(data)), lengths)
    policy = torch.cat(list(logprobs)).double()
    return preset_total(name, policy=policy, behavior=behavior, advantages=gains, sequences=sequences)
