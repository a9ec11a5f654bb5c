"""Similarities by n-grams: BLEU, chrF, Jaccard. All give 1 for equal texts and 0 for texts with nothing in common."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

BLEU_ORDER = 4
CHRF_ORDER = 6
CHRF_BETA = 2.0


def bleu(candidate: Sequence[str], reference: Sequence[str]) -> float:
    """Sentence BLEU-4 with one reference (Papineni et al. 2002), smoothed.

    BLEU = BP * (p1 p2 p3 p4)^(1/4), with BP = 1 if c >= r, else exp(1 - r / c), c and r being the lengths in words;
    pn = (m + s) / (l + s), where m of the candidate's l n-grams match, each at most as often as the reference has it,
    and s is 0 for n = 1, else 1 (Lin and Och 2004). So a text without a common word has 0, and one that is shorter
    than four words can still have 1.
    """
    if not candidate or not reference:
        return float(len(candidate) == len(reference))
    log_mean = 0.0
    for n in range(1, BLEU_ORDER + 1):
        smoothing = 0 if n == 1 else 1
        precision = (matches(candidate, reference, n=n) + smoothing) / (_count(candidate, n=n) + smoothing)
        if precision == 0.0:
            return 0.0
        log_mean += math.log(precision) / BLEU_ORDER
    return math.exp(log_mean + min(0.0, 1.0 - len(reference) / len(candidate)))


def chrf(candidate: str, reference: str) -> float:
    """Character n-gram F-score (Popović 2015): n up to 6, beta 2, white space left out.

    chrF = (1 + beta^2) P R / (beta^2 P + R), where P and R are the means over n of precision and recall. An n for which
    either text is too short does not count.
    """
    candidate, reference = "".join(candidate.split()), "".join(reference.split())
    orders = range(1, min(CHRF_ORDER, len(candidate), len(reference)) + 1)
    if not orders:
        return float(candidate == reference)
    common = {n: matches(candidate, reference, n=n) for n in orders}
    precision = sum(common[n] / _count(candidate, n=n) for n in orders) / len(orders)
    recall = sum(common[n] / _count(reference, n=n) for n in orders) / len(orders)
    if precision == 0.0:
        return 0.0
    return (1 + CHRF_BETA**2) * precision * recall / (CHRF_BETA**2 * precision + recall)


def jaccard(candidate: Sequence[str], reference: Sequence[str], *, n: int) -> float:
    """Distinct n-grams in common over distinct n-grams in either (Jaccard 1901); texts without any are equal or not."""
    given, wanted = set(_ngrams(candidate, n=n)), set(_ngrams(reference, n=n))
    if not given and not wanted:
        return float(list(candidate) == list(reference))
    return len(given & wanted) / len(given | wanted)


def matches(candidate: Sequence[str], reference: Sequence[str], *, n: int) -> int:
    """How many of the candidate's n-grams the reference has, each at most as often as there.

    Only the reference's are kept in memory: the candidate may be much longer.
    """
    left = Counter(_ngrams(reference, n=n))
    found = 0
    for ngram in _ngrams(candidate, n=n):
        if left.get(ngram, 0) > 0:
            left[ngram] -= 1
            found += 1
    return found


def _ngrams(units: Sequence[str], *, n: int) -> Iterator[object]:
    """Strings of a string, tuples of a list of words."""
    if isinstance(units, str):
        return (units[index : index + n] for index in range(_count(units, n=n)))
    return zip(*(islice(units, start, None) for start in range(n)), strict=False)


def _count(units: Sequence[str], *, n: int) -> int:
    return max(0, len(units) - n + 1)
