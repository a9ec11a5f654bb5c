"""The verifier `similarity`. It runs in worker processes: two long texts take seconds."""

import re

from reward_service.extraction import strip_thinking
from reward_service.verifier import Score, Submission
from reward_service.verifiers.similarity.alignment import edit_ratio, rouge_l
from reward_service.verifiers.similarity.arguments import SimilarityArguments
from reward_service.verifiers.similarity.ngrams import bleu, chrf, jaccard

_WORD = re.compile(r"\w+|[^\w\s]")


def similarity(submission: Submission, arguments: SimilarityArguments) -> Score:
    """How close the completion is to references, from 0 to 1, by n-grams or edits."""
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    values = [_compare(_folded(text, arguments), _folded(each, arguments), arguments) for each in arguments.references]
    parts = {"max": max(values), "mean": sum(values) / len(values)}
    return Score(reward=parts[arguments.aggregate], components=parts)


def _compare(text: str, reference: str, arguments: SimilarityArguments) -> float:
    """Words are runs of letters and digits; a punctuation mark is a word of its own."""
    if arguments.metric == "chrf":
        return chrf(text, reference)
    if arguments.metric == "edit":
        return edit_ratio(text, reference)
    given, wanted = _WORD.findall(text), _WORD.findall(reference)
    if arguments.metric == "jaccard":
        return jaccard(given, wanted, n=arguments.n)
    return bleu(given, wanted) if arguments.metric == "bleu" else rouge_l(given, wanted)


def _folded(text: str, arguments: SimilarityArguments) -> str:
    return text.strip() if arguments.case else text.strip().casefold()
