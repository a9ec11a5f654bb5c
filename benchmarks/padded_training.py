"""The plain way to train: transformers' own forward pass over padded microbatches, whole logits, torch's AdamW."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.training.batch import TrainSequence


class PaddedTraining:
    """Weights and optimizer states are of `dtype`; no master weights are kept, which favours it."""

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        learning_rate: float,
        microbatch_tokens: int,
        attention: str = "sdpa",
        fused: bool = False,
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
        self._model = model.to(device).train()
        self._device = device
        self._microbatch_tokens = microbatch_tokens
        self._adamw = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused or None
        )

    def step(self, batch: Sequence[TrainSequence]) -> float:
        """Makes an update by the mean negative log-likelihood of the trained tokens, and returns that."""
        trained = sum(int(sequence.loss_mask.sum()) for sequence in batch)
        total = torch.zeros((), device=self._device)
        for rows in padded_microbatches(batch, most_tokens=self._microbatch_tokens):
            loss = self._loss(rows) / trained
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._adamw.step()
        self._adamw.zero_grad()
        return float(total)

    def _loss(self, rows: Sequence[TrainSequence]) -> Tensor:
        longest = max(len(row.token_ids) for row in rows)
        token_ids, present, trained = (np.zeros((len(rows), longest), dtype=np.int64) for _ in range(3))
        for index, row in enumerate(rows):
            token_ids[index, : len(row.token_ids)] = row.token_ids
            present[index, : len(row.token_ids)] = 1
            trained[index, : len(row.token_ids)] = row.loss_mask
        inputs = torch.from_numpy(token_ids).to(self._device)
        mask = torch.from_numpy(trained[:, 1:]).to(self._device).bool()
        logits: Tensor = self._model(input_ids=inputs, attention_mask=torch.from_numpy(present).to(self._device)).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), inputs[:, 1:].flatten(), reduction="none"
        )
        return losses[mask.flatten()].sum()


def padded_microbatches(batch: Sequence[TrainSequence], *, most_tokens: int) -> Iterator[list[TrainSequence]]:
    """The sequences in the order given, in as few rectangles as have at most `most_tokens` with their padding."""
    rows: list[TrainSequence] = []
    for sequence in batch:
        longest = max(len(row.token_ids) for row in (*rows, sequence))
        if rows and longest * (len(rows) + 1) > most_tokens:
            yield rows
            rows = []
        rows.append(sequence)
    yield rows
