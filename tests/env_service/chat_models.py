"""Model directories with chat templates shaped like those of real model families, and a byte-level tokenizer."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|\[/?(?:INST|TOOL_RESULTS|SYSTEM_PROMPT|TOOL_CALLS|AVAILABLE_TOOLS)\]"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start_of_turn|end_of_turn|sop)>|\[\|[a-z]+\|\]|\[gMASK\]"
)
ENDS = {
    "headers_stripped": ["<|eot_id|>"],
    "headers_with_date": ["<|eot_id|>", "<|eom_id|>"],
    "model_is_the_assistant": ["<end_of_turn>"],
    "system_joins_the_first_user": ["<end_of_turn>"],
    "tool_messages_vanish": ["<|end|>"],
    "end_of_sentence": ["<｜end▁of▁sentence｜>"],
    "headers_end_turns": ["<|user|>", "<|observation|>"],
    "channels": ["<|return|>", "<|call|>"],
    "responses_wrapped": ["<|END_OF_TURN_TOKEN|>"],
    "roles_between_tokens": ["<|end_of_text|>"],
    "bracketed_roles": ["[|endofturn|]"],
    "turns_in_brackets_of_their_own": ["<|eot|>", "<|eom|>"],
    "results_within_calls": ["<turn|>", "<|tool_response>"],
}
"""Tokens that end a turn; of other templates `<|im_end|>` where they have it, else `</s>`."""

WITHOUT_TOOL_ROLE = {
    "instructions_with_spaces": "Conversation roles must alternate",
    "instructions_without_tools": "Only user, system and assistant roles",
    "model_is_the_assistant": "Conversation roles must alternate",
    "plain_headers": "role tool is not known",
    "roles_between_tokens": "it loses a message of role tool",
    "separators": "it loses a message of role tool",
    "system_joins_the_first_user": "Conversation roles must alternate",
    "tool_messages_vanish": "it loses a message of role tool",
    "words_as_headers": "Only user and assistant roles",
}
"""Templates that refuse or lose tool messages, with what is said of them."""

PREFILLED = {
    "bracketed_roles": "<think>\n",
    "end_of_sentence": "<think>\n",
    "results_within_calls": "<|channel>thought\n<channel|>",
    "thinking_prefilled": "<think>\n",
}
"""Text that a template puts before an answer to a question, and takes for a part of it."""

_TEXT = ["the quick brown fox", " jumps over\nthe lazy dog", "user\nassistant\nsystem tool 0123456789", '{"a": 2}\n\n']


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def ends_of(name: str) -> list[str]:
    return ENDS.get(name, ["<|im_end|>"] if "<|im_end|>" in text_of(name) else ["</s>"])


@cache
def _bytes() -> str:
    """A byte-level BPE tokenizer with a few hundred merges, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    return str(tokenizer.to_str())


def make_model(folder: Path, template: str, *, ends: list[str], more: Sequence[str] = ()) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json, generation_config.json and config.json. `more` are
    special tokens beside those that are known by how they are written.
    """
    tokenizer = Tokenizer.from_str(_bytes())
    names = sorted({*SPECIAL.findall(template), *ends, *more, "<s>", "</s>"})
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": ends[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = [tokenizer.token_to_id(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    return folder


def model_with(name: str, folder: Path) -> Path:
    """The directory of a model with one of the templates."""
    return make_model(folder, text_of(name), ends=ends_of(name))
