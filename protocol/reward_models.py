"""How a reward model wants its input: the file `headway_reward.json` in its directory.

The learner writes it beside a reward model that it has trained; for another one it is written by hand:

    {"format": "chat", "tokenize": "whole", "max_tokens": 4096}
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from protocol.model import WireModel

REWARD_INPUT_FILE = "headway_reward.json"

RewardFormat = Literal["chat", "plain"]
Tokenize = Literal["apart", "whole"]


class RewardInput(WireModel):
    """`format`: `chat` is the model's chat template over the conversation, `plain` the prompt and the completion as
    they stand.

    `tokenize`: `apart` is what the learner trains on: prompt and completion are tokenized apart, as the policy samples
    them, the end token of the tokenizer comes last, and the score is taken there. `whole` is what most published reward
    models were trained on: all of the text in one piece, with what the chat template writes after the completion; of
    plain text also with the tokens that the tokenizer adds by itself. `max_tokens`: the longest input; the model's own
    limit if left out.
    """

    format: RewardFormat
    tokenize: Tokenize = "whole"
    max_tokens: int | None = Field(default=None, ge=1)


def read_reward_input(model: Path) -> RewardInput | None:
    """What the model's directory says; None if it says nothing. Raises ValueError that names the file."""
    file = model / REWARD_INPUT_FILE
    if not file.exists():
        return None
    try:
        return RewardInput.model_validate_json(file.read_bytes())
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{file}: {faults} (expected {', '.join(RewardInput.model_fields)})") from error


def write_reward_input(model: Path, given: RewardInput) -> None:
    """Writes the file into the model's directory."""
    (model / REWARD_INPUT_FILE).write_text(given.model_dump_json(indent=2) + "\n", encoding="utf-8")
