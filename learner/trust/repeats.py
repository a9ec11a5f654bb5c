"""Trajectories that come twice, token for token, and how improbable that is of a policy that samples.

An honest sample is one of n former completions of its prompt with a probability of sum(p). So 1 / (n p), paid when one
of them comes again and nothing otherwise, is worth 1 on average, whatever the policy: it needs no record of what the
former ones were worth. Short answers that a policy is sure of come again all the time, and pay nothing.
"""

import math
from collections import OrderedDict

from learner.trust.tokens import WholeText

_STAKE = 1e-3
_SELECTION = math.log(100.0)
"""Groups are chosen by their rewards: what is rare among all samples may be so many times as common in those."""
_MOST_PAID = 14.0
"""Nats for one repeat. Three of them are needed to be sure: a request that was sent twice by mistake is not enough."""
_MOST_OF_PROMPT = 1024


class RepeatMemory:
    """Remembers the newest `most` different trajectories, by prompt."""

    def __init__(self, *, most: int = 65_536) -> None:
        self._most = most
        self._count = 0
        self._prompts: OrderedDict[int, dict[int, None]] = OrderedDict()

    def bet(self, text: WholeText) -> float:
        """log growth of the bet that this one repeats another, and remembers it; 0 for the first of its prompt."""
        former = self._prompts.setdefault(text.prompt, {})
        self._prompts.move_to_end(text.prompt)
        growth = _growth(text, former) if former else 0.0
        self._remember(text, former)
        return growth

    def _remember(self, text: WholeText, former: dict[int, None]) -> None:
        if text.whole in former:
            return
        former[text.whole] = None
        self._count += 1
        if len(former) > _MOST_OF_PROMPT:
            del former[next(iter(former))]
            self._count -= 1
        while self._count > self._most:
            _, gone = self._prompts.popitem(last=False)
            self._count -= len(gone)


def _growth(text: WholeText, former: dict[int, None]) -> float:
    if text.whole not in former:
        return math.log1p(-_STAKE)
    paid = min(-text.logprob - math.log(len(former)) - _SELECTION, _MOST_PAID)
    return math.log1p(_STAKE * math.expm1(paid)) if paid > 0 else math.log1p(-_STAKE)
