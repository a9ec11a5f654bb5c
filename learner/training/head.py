"""A model's output projection as it is called in training: for logprobs and for the most probable tokens."""

from __future__ import annotations

from torch import Tensor, nn

from learner.training.logprobs import Chunking, token_logprobs
from learner.training.top_tokens import top_tokens

_CHUNKING = Chunking()


class LogprobHead(nn.Linear):
    """A model's output projection that can also give logprobs of targets, or the most probable tokens.

    It is a module, and computes in `forward`, so that hooks which gather sharded parameters see it called, and it
    returns plain tuples, which those hooks look into.
    """

    @classmethod
    def sharing(cls, linear: nn.Linear) -> LogprobHead:
        """A head with the very parameters of `linear`, so that ties to an embedding stay."""
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight = linear.weight
        head.bias = linear.bias
        return head

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        top: int = 0,
        temperature: float = 1.0,
        chunking: Chunking = _CHUNKING,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None] | tuple[Tensor, Tensor]:
        """Logits of `input` [..., H], unless more is asked for. With `input` [T, H]:

        with `target` [T], the target's logprobs [T], the entropy [T] and the logprobs of `candidates` [T, C]; with
        `top`, the token ids [T, top] and logprobs [T, top] of the most probable tokens.
        """
        if target is not None:
            result = token_logprobs(
                hidden=input,
                weight=self.weight,
                bias=self.bias,
                target=target,
                candidates=candidates,
                temperature=temperature,
                chunking=chunking,
                with_entropy=with_entropy,
                entropy_gradient=entropy_gradient,
            )
            return result.logprobs, result.entropy, result.candidates
        if top:
            best = top_tokens(
                hidden=input,
                weight=self.weight,
                bias=self.bias,
                count=top,
                temperature=temperature,
                chunking=chunking,
            )
            return best.token_ids, best.logprobs
        return super().forward(input)
