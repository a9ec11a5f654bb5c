"""Packed rows against single sequences in plain transformers, over the tiny architectures of tests/learner/training.

In float32 both must agree, logprobs and gradients. In bfloat16 rounding is told: how far a packed row is from the
float32 logprobs, beside how far plain transformers in bfloat16 is, one sequence at a time.
"""

import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.gpu.rows import rehearses, say
from learner.training.batch import TrainSequence
from learner.training.logprobs import Chunking
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm
from tests.learner.training.test_architectures import RIGHT, gradients, row_of, sequences_with_a_shared_prompt
from tests.learner.training.tiny_models import write_tiny_model

SETTINGS = LogprobSettings(temperature=0.7, chunking=Chunking(tokens=16, vocabulary=13), with_entropy=False)
TOLERANCE = 1e-3
"""Of float32: convolutions of a GPU may round to TF32."""
_TIMES_PLAIN = 3.0
_REHEARSED = ("llama", "gpt-oss", "qwen3.5 moe")


@dataclass(frozen=True)
class PackedGaps:
    """Largest absolute differences in float32; means of absolute differences to float32 in bfloat16."""

    logprobs: float
    gradients: float
    packed: float
    plain: float

    @property
    def wrong(self) -> bool:
        """True if rounding does not explain them."""
        exact = self.logprobs <= TOLERANCE and self.gradients <= TOLERANCE
        return not (exact and self.packed <= max(_TIMES_PLAIN * self.plain, 0.01))

    @property
    def told(self) -> str:
        """For the table."""
        return (
            f"float32: logprobs {self.logprobs:.1e}, gradients {self.gradients:.1e}; bfloat16: packed "
            f"{self.packed:.4f}, plain {self.plain:.4f} nats from float32"
        )


def gaps_of(name: str, folder: Path, *, device: torch.device) -> PackedGaps:
    """Of one architecture."""
    write_tiny_model(name, folder)
    sequences = sequences_with_a_shared_prompt()
    exact, slopes = _plain(folder, sequences, torch.float32, device)
    packed, packed_slopes = _packed(folder, sequences, torch.float32, device)
    halved, _ = _plain(folder, sequences, torch.bfloat16, device)
    packed_halved, _ = _packed(folder, sequences, torch.bfloat16, device)
    return PackedGaps(
        logprobs=float((packed - exact).abs().max()),
        gradients=max(
            float((packed_slopes[key] - slope).abs().max() / slope.abs().max().clamp(min=1.0))
            for key, slope in slopes.items()
        ),
        packed=float((packed_halved - exact).abs().mean()),
        plain=float((halved - exact).abs().mean()),
    )


def _packed(
    folder: Path, sequences: list[TrainSequence], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    policy = PolicyModel(load_causal_lm(folder, dtype=dtype), settings=SETTINGS).to(device)
    found: Tensor = policy(row_of(sequences).to(device))[0]
    return found.detach().float(), gradients(policy.causal_lm, found)


def _plain(
    folder: Path, sequences: Sequence[TrainSequence], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    plain: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    plain = plain.to(device).eval()
    parts = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids).long().to(device)
        places = torch.from_numpy(sequence.loss_mask).nonzero()[:, 0].to(device)
        logits = plain(input_ids=ids[None], use_cache=False).logits[0][places - 1]
        logprobs = (logits.float() / SETTINGS.temperature).log_softmax(dim=-1)
        parts.append(logprobs.gather(1, ids[places][:, None])[:, 0])
    found = torch.cat(parts)
    return found.detach(), gradients(plain, found)


def main() -> int:
    """1 if an architecture is wrong."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = _REHEARSED if rehearses() else RIGHT
    wrong = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = gaps_of(name, Path(folder), device=device)
            except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:  # others go on
                wrong += 1
                say(name, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", "failed")
                continue
        wrong += found.wrong
        say(name, found.told, "failed" if found.wrong else "measured")
    say(f"{len(names)} architectures", f"{len(names) - wrong} right", "failed" if wrong else "passed")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
