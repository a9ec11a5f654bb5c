"""A row's attention in one call, against its rectangles. The kernel needs a GPU: in its place stands a loop here."""

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.training import varlen
from learner.training.attention import PackedIndex, build_packed_index, packed_attention
from learner.training.batch import flatten
from learner.training.packing import pack, shared_prefixes
from learner.training.varlen import SequenceSpans, gather_summing, kernel_taking, sequence_spans
from tests.learner.training.tiny_model import random_sequences

HEADS, SHARED, WIDTH = 4, 2, 8


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, *, spans: SequenceSpans, scaling: float, window: int | None
) -> Tensor:
    """Formula that the kernel computes: the last query of a sequence stands at its last key."""
    found = []
    for place in range(len(spans.query_starts) - 1):
        asking = slice(*spans.query_starts[place : place + 2].tolist())
        seen = slice(*spans.key_starts[place : place + 2].tolist())
        keys, values = (flat[seen].repeat_interleave(HEADS // SHARED, dim=1) for flat in (key, value))
        at = torch.arange(len(keys) - (asking.stop - asking.start), len(keys))
        distance = at[:, None] - torch.arange(len(keys))[None]
        hidden = (distance < 0) | (distance >= (window or len(keys)))
        scores = torch.einsum("qhd,khd->hqk", query[asking], keys) * scaling
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(found)


class Layer(torch.nn.Module):
    """An attention's module, as far as it is looked at."""


def run(index: PackedIndex, inputs: list[Tensor], *, window: int | None) -> list[Tensor]:
    """The output, and the gradients of query, key and value, each with a row of its own for the loss."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in inputs[:3])
    found, _ = packed_attention(Layer(), query, key, value, None, packed_index=index, sliding_window=window)
    return [found.detach(), *torch.autograd.grad(found, (query, key, value), inputs[3])]


def row_of(lengths: list[int], *, shared: int = 0) -> tuple[list[np.ndarray], int]:
    """Tokens of sequences of which all begin with the first `shared` tokens of the first one."""
    rows, end = [np.arange(lengths[0])], lengths[0]
    for length in lengths[1:]:
        rows.append(np.concatenate([np.arange(shared), np.arange(end, end + length - shared)]))
        end += length - shared
    return rows, end


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("lengths", "shared"), [([5], 0), ([1, 4, 9], 0), ([6, 6, 7, 9], 4), ([4, 4, 6], 4)])
def test_one_call_gives_what_rectangles_give(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], shared: int, window: int | None
) -> None:
    rows, tokens = row_of(lengths, shared=shared)
    index = build_packed_index(rows, tokens=tokens)
    drawn = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(1, heads, tokens, WIDTH, generator=drawn, dtype=torch.float64) for heads in (HEADS, SHARED, SHARED)
    ]
    inputs.append(torch.randn(1, tokens, HEADS, WIDTH, generator=drawn, dtype=torch.float64))
    expected = run(index, inputs, window=window)
    calls = []

    def counted(*tensors: Tensor, spans: SequenceSpans, scaling: float, window: int | None) -> Tensor:
        calls.append(spans)
        return one_by_one(*tensors, spans=spans, scaling=scaling, window=window)

    monkeypatch.setattr(varlen, "kernel_taking", lambda query, value: counted)
    found = run(index, inputs, window=window)
    assert calls == [index.spans]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_spans_of_a_shared_prompt_ask_for_what_is_new() -> None:
    rows, tokens = row_of([6, 5, 7], shared=4)
    spans = sequence_spans(rows, tokens=tokens)
    assert spans is not None
    assert spans.query_starts.tolist() == [0, 6, 7, 10]
    assert spans.key_starts.tolist() == [0, 6, 11, 18]
    assert (spans.longest_query, spans.longest_key) == (6, 7)
    assert spans.keys is not None
    assert spans.keys.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 0, 1, 2, 3, 7, 8, 9]


def test_without_shared_prompts_keys_are_the_row_itself() -> None:
    spans = sequence_spans(row_of([3, 4])[0], tokens=7)
    assert spans is not None
    assert spans.keys is None
    assert torch.equal(spans.query_starts, spans.key_starts)


def test_a_sequence_without_a_token_of_its_own_asks_nothing() -> None:
    spans = sequence_spans([np.arange(3), np.arange(3), np.array([0, 1, 2, 3])], tokens=4)
    assert spans is not None
    assert spans.query_starts.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([np.array([1, 0, 2])], id="not in order"),
        pytest.param([np.array([0, 2]), np.array([1])], id="with a hole"),
        pytest.param([np.array([0, 1]), np.array([2, 0])], id="what is new does not come last"),
    ],
)
def test_a_row_in_another_order_has_no_spans(rows: list[np.ndarray]) -> None:
    assert sequence_spans(rows, tokens=3) is None


def test_every_row_of_a_batch_has_spans() -> None:
    batch = flatten(random_sequences(16))
    for prefixes in (shared_prefixes(batch),):
        assert pack(batch, np.arange(16), prefixes=prefixes).index.spans is not None
        assert pack(batch, np.zeros(0, dtype=np.int64), prefixes=prefixes).index.spans is not None


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_gradients_of_a_shared_token_are_added_in_float32(device: str) -> None:
    # On a CPU torch adds bfloat16 so anyway. On a GPU its sum has 8 bits, and stays at 256 for each further 1.
    flat = torch.zeros(1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    places = torch.zeros(600, dtype=torch.int64, device=device)
    (grad,) = torch.autograd.grad(gather_summing(flat, places).sum(), flat)
    assert grad.item() == 600


@pytest.mark.parametrize(
    ("lengths", "shared", "window", "asked"),
    [
        pytest.param([60, 64], 0, None, False, id="long ones of about the same length"),
        pytest.param([60, 64], 0, 32, True, id="with a window"),
        pytest.param([60, 64], 8, None, True, id="with a prompt in common"),
        pytest.param([20, 64], 0, None, True, id="of different lengths"),
        pytest.param([64], 0, None, True, id="few scores"),
    ],
)
def test_long_sequences_that_fill_a_rectangle_stay_in_it(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], shared: int, window: int | None, asked: bool
) -> None:
    monkeypatch.setattr(varlen, "MANY_SCORES", 64 * 64)
    calls = []

    def taking(query: Tensor, value: Tensor) -> varlen.VarlenKernel | None:
        calls.append(query.shape)
        return None

    monkeypatch.setattr(varlen, "kernel_taking", taking)
    rows, tokens = row_of(lengths, shared=shared)
    inputs = [torch.randn(1, heads, tokens, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    run(build_packed_index(rows, tokens=tokens), [*inputs, torch.randn(1, tokens, HEADS, WIDTH)], window=window)
    assert bool(calls) == asked


def test_a_cpu_and_other_widths_have_rectangles() -> None:
    assert kernel_taking(torch.zeros(3, 4, 64, dtype=torch.bfloat16), torch.zeros(3, 2, 64)) is None
