"""Forward and backward pass of a policy over 8192 trained tokens and a vocabulary of 150,000: `head_memory.py FOLDER`.

Prints the bytes by which the peak of this process's resident memory rose meanwhile.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.training.batch import Candidates, TrainSequence, flatten
from learner.training.logprobs import Chunking
from learner.training.packing import Microbatch, pack, shared_prefixes
from learner.training.policy import LogprobSettings, PolicyModel, load_causal_lm

VOCABULARY = 150_000
SEQUENCES, LENGTH = 64, 128
CHUNKING = Chunking()


def peak_bytes() -> int:
    """The most memory that this program had resident.

    `getrusage` would count what the parent had when it started this process, too.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def small_policy(folder: Path) -> PolicyModel:
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=16,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    settings = LogprobSettings(temperature=0.7, chunking=CHUNKING, with_entropy=True, entropy_gradient=True)
    return PolicyModel(load_causal_lm(folder, dtype=torch.float32), settings=settings)


def microbatch() -> Microbatch:
    draw = np.random.default_rng(0)
    length = LENGTH + 1  # nothing predicts the first token
    sequences = [
        TrainSequence.supervised(
            token_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            candidates=Candidates(
                token_ids=draw.integers(0, VOCABULARY, (length, 8)).astype(np.int32),
                logprobs=np.zeros((length, 8), dtype=np.float32),
            ),
        )
        for _ in range(SEQUENCES)
    ]
    batch = flatten(sequences)
    return pack(batch, np.arange(SEQUENCES), prefixes=shared_prefixes(batch))


def main() -> None:
    torch.set_num_threads(1)
    policy, row = small_policy(Path(sys.argv[1])), microbatch()
    before = peak_bytes()
    logprobs, entropy, candidates, *_ = policy(row)
    assert len(logprobs) == SEQUENCES * LENGTH
    (logprobs.mean() + entropy.mean() + candidates.mean()).backward()
    print(peak_bytes() - before)


if __name__ == "__main__":
    main()
