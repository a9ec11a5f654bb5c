"""Demonstrations that are trained beside what is sampled: read from a file, and drawn for each step.

Which of them a step is given follows from the seed and the step's number alone: a resumed run and a replay draw the
same, as long as the file is the same.
"""

from collections.abc import Sequence
from pathlib import Path

from learner.data.examples import DataTokenizer, batches, check_lengths, read_examples
from learner.training.batch import TrainSequence


class Demonstrations:
    """The examples of a file, `per_step` of them for each step."""

    def __init__(self, examples: Sequence[TrainSequence], *, per_step: int, seed: int) -> None:
        self._examples = examples
        self._per_step = per_step
        self._seed = seed

    @classmethod
    def read(cls, path: Path, tokenizer: DataTokenizer, *, model: Path, per_step: int, seed: int) -> "Demonstrations":
        """Reads whatever `sft` does, for the model in a folder. Raises RecordError, FileNotFoundError."""
        examples = read_examples(path, tokenizer)
        check_lengths(examples, path=path, model=model)
        return cls(examples, per_step=per_step, seed=seed)

    def __len__(self) -> int:
        return len(self._examples)

    def of_step(self, version: int) -> list[TrainSequence]:
        """The examples of the step at the learner's `version`: each comes once before any comes again."""
        return next(batches(self._examples, size=self._per_step, seed=self._seed, first=version))
