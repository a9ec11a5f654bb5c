"""One pass of a decoder of transformers over a packed row, for whatever head stands on it."""

from __future__ import annotations

from torch import Tensor, nn

from learner.training.packing import Microbatch


def predicting_states(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """The last hidden states [N, H] from which the microbatch's N targets are predicted; one if there is no target.

    A row that trains nothing predicts from one token all the same, and its caller drops the result: every rank has to
    run the same modules in the same order, forward and backward, or the collectives of sharded parameters come apart.
    """
    decoder = model.base_model
    assert isinstance(decoder, nn.Module), "a model of transformers has a decoder"
    hidden: Tensor = decoder(
        input_ids=microbatch.token_ids[None],
        position_ids=microbatch.positions[None],
        use_cache=False,
        packed_index=microbatch.index,
    ).last_hidden_state[0]
    return hidden.index_select(0, microbatch.rows) if len(microbatch.rows) else hidden[:1]


def one_at_least(token_ids: Tensor) -> Tensor:
    """`token_ids` [N, ...] to go with the predicting states: a row of token 0 if there is none."""
    return token_ids if len(token_ids) else token_ids.new_zeros(1, *token_ids.shape[1:])
