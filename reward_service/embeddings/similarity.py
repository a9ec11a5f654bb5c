"""The similarity of a completion to references, whoever makes the embeddings."""

import statistics
from dataclasses import dataclass

from protocol.rewards import ScoreItem
from reward_service.embeddings.arguments import SimilarityArguments
from reward_service.embeddings.vectors import Vectors, cosine
from reward_service.extraction import strip_thinking
from reward_service.verifier import Outcome, Score


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """`keep_thinking`: the completion's thought is compared, too."""

    vectors: Vectors
    keep_thinking: bool

    async def judge(self, item: ScoreItem, arguments: SimilarityArguments, deadline: float) -> Outcome:
        """The cosine, from -1 to 1. Of a completion without text 0, since nothing has no direction."""
        completion = item.completion if self.keep_thinking else strip_thinking(item.completion)
        if not completion.strip():
            return Outcome(result=Score(reward=0.0, components={"empty": 1.0}))
        embeddings = await self.vectors.of([completion, *arguments.references], deadline=deadline)
        similarities = [cosine(embeddings[0].vector, other.vector) for other in embeddings[1:]]
        reward = max(similarities) if arguments.pick == "best" else statistics.fmean(similarities)
        score = Score(reward=reward, components={"empty": 0.0})
        return Outcome(result=score, cached=all(each.kept for each in embeddings))
