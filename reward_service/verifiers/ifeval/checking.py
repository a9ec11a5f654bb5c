"""The verifier `ifeval`. Loaded only in worker processes, for langdetect."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from reward_service.verifier.submission import Score, Submission
from reward_service.verifiers.extraction import strip_thinking
from reward_service.verifiers.ifeval.arguments import IfevalArguments
from reward_service.verifiers.ifeval.instruction import Instruction, Response, detect_language


def ifeval(submission: Submission, arguments: IfevalArguments) -> Score:
    """The share of IFEval's instructions that the completion follows, or whether it follows all."""
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    text = text.replace("\r\n", "\n")
    variants = _variants(text) if arguments.strictness == "loose" else (text,)
    responses = [Response(text=variant, detect=detect_language) for variant in variants if variant.strip()]
    followed = [_followed(instruction, responses) for instruction in arguments.instructions()]
    fraction = sum(followed) / len(followed)
    components = dict(zip(_names(arguments.instruction_id_list), map(float, followed), strict=True))
    reward = fraction if arguments.reward == "fraction" else float(all(followed))
    return Score(reward=reward, components={"fraction": fraction, "all": float(all(followed)), **components})


def _followed(instruction: Instruction, responses: Sequence[Response]) -> bool:
    """True if any form of the response follows. A blank one follows nothing, not even to have no comma."""
    return any(instruction.followed(response) for response in responses)


def _variants(text: str) -> tuple[str, ...]:
    """The text with and without its first line, its last line and its asterisks: eight forms, the text itself first."""
    lines = text.split("\n")
    spans = [text, *("\n".join(lines[first:last]).strip() for first, last in ((1, None), (None, -1), (1, -1)))]
    return tuple(dict.fromkeys(span.replace("*", "") if bare else span for bare, span in product((False, True), spans)))


def _names(instruction_ids: Sequence[str]) -> Iterator[str]:
    """The ids, and `#2` after the second of one id: some rows of the dataset name one twice."""
    seen = Counter[str]()
    for instruction_id in instruction_ids:
        seen[instruction_id] += 1
        yield instruction_id if seen[instruction_id] == 1 else f"{instruction_id}#{seen[instruction_id]}"
