"""The process of one model: `python -m reward_service.models.worker MODEL_AS_JSON PARENT_PID`.

It answers batches from its standard input on its standard output, in order. What goes wrong in the model itself ends
the process: after a fault of a GPU nothing that it computes can be trusted. Only this process loads torch.
"""

import sys
from typing import Protocol

from reward_service.models.loaded_models import load_encoder, load_reward_model
from reward_service.models.process import EncoderToLoad, ModelToLoad, read_model_to_load
from services.worker_process import serve_lines


class Loaded(Protocol):
    """A model that is loaded."""

    def answer(self, line: bytes) -> bytes:
        """The answer to a batch, both as JSON in one line."""
        ...


def main() -> None:
    """Load the model, say whether that went well, then answer batches until the input ends."""
    given, parent = read_model_to_load(sys.argv[1]), int(sys.argv[2])
    serve_lines(parent=parent, load=lambda: _load(given), answer=lambda model, line: model.answer(line))


def _load(given: ModelToLoad) -> Loaded:
    return load_encoder(given) if isinstance(given, EncoderToLoad) else load_reward_model(given)


if __name__ == "__main__":
    main()
