"""The hash that torch computes where weights are: its value, and what it tells apart."""

import itertools

import pytest
import torch

from services import tensor_hash as module
from services.tensor_hash import ROW_WORDS, tensor_hash

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROW_BYTES = 8 * ROW_WORDS
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return (values > 0) if dtype == torch.bool else (100 * values).to(dtype)


def mixed(total: int) -> int:
    total = ((total ^ (total >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    total = ((total ^ (total >> 27)) * 0x94D049BB133111EB) & MASK
    return total ^ (total >> 31)


CONSTANTS = [mixed(count * GOLDEN & MASK) for count in range(1, 2 * ROW_WORDS + 1)]


def by_hand(raw: bytes) -> str:
    """As the module's docstring says it, in Python's whole numbers."""
    left = raw
    while True:
        sums = []
        for start in range(0, len(left), ROW_BYTES):
            row = left[start : start + ROW_BYTES]
            total = 0
            for i in range(-(-len(row) // 8)):
                moved = (int.from_bytes(row[8 * i : 8 * i + 8], "little") + CONSTANTS[i]) & MASK
                total += (moved ^ moved >> 29) * (CONSTANTS[ROW_WORDS + i] | 1)
            sums.append(total & MASK)
        if len(sums) <= 1:
            return f"{mixed((sums[0] if sums else 0) ^ (len(raw) * GOLDEN & MASK)):016x}"
        left = b"".join(total.to_bytes(8, "little") for total in sums)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4095, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 2 * ROW_BYTES + 5])
def test_it_is_what_its_docstring_says(nbytes: int) -> None:
    raw = torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(nbytes)).to(torch.uint8)
    assert tensor_hash(raw) == by_hand(raw.numpy().tobytes())


@pytest.mark.parametrize("rows", [2, 3, 256])
def test_it_is_the_same_however_many_rows_are_taken_at_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = drawn(5 * ROW_WORDS * 2 + 3)
    expected = tensor_hash(tensor)
    monkeypatch.setattr(module, "_HOST_ROWS", rows)
    assert tensor_hash(tensor) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_of_the_values_in_order_wherever_they_lie(dtype: torch.dtype) -> None:
    tensor = drawn(257, 1031, dtype=dtype)
    expected = tensor_hash(tensor)
    apart = torch.zeros((257, 2 * 1031 + 1), dtype=dtype)[:, 1::2]
    apart.copy_(tensor)
    assert not apart.is_contiguous()
    assert tensor_hash(apart) == tensor_hash(tensor.t().contiguous().t()) == expected
    raw = tensor.view(torch.uint8).view(-1)
    for offset in range(1, 9):
        behind = torch.zeros(raw.numel() + offset, dtype=torch.uint8)[offset:]
        behind.copy_(raw)
        assert tensor_hash(behind) == expected
    assert tensor_hash(tensor.view(-1)) == expected, "the shape is not in it"


def test_a_scalar_and_an_empty_tensor_have_one() -> None:
    assert tensor_hash(torch.tensor(1.0)) == tensor_hash(torch.ones(1))
    assert tensor_hash(torch.empty(0)) == tensor_hash(torch.empty((3, 0), dtype=torch.int64))
    assert tensor_hash(torch.empty(0)) != tensor_hash(torch.tensor(0.0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_every_change_of_a_single_bit_is_found(dtype: torch.dtype) -> None:
    whole = drawn(72).to(torch.uint8).view(dtype)
    raw = whole.view(torch.uint8)
    seen = {tensor_hash(whole)}
    for at, bit in itertools.product(range(72), range(8)):
        raw[at] ^= 1 << bit
        seen.add(tensor_hash(whole))
        raw[at] ^= 1 << bit
    assert len(seen) == 1 + 8 * 72


@pytest.mark.parametrize("at", [0, 2 * ROW_WORDS - 1, 2 * ROW_WORDS, 6 * ROW_WORDS - 1, 6 * ROW_WORDS, -1])
def test_a_changed_element_is_found_in_every_row(at: int) -> None:
    tensor = drawn(6 * ROW_WORDS + 5)
    before = tensor_hash(tensor)
    tensor[at] += 1e-3
    assert tensor_hash(tensor) != before


def test_all_swaps_of_two_elements_are_found_those_of_opposite_signs_too() -> None:
    tensor = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 2.0, -2.0, 0.0, -0.0, 3.0, 2.0, -1.0, 1.0])
    before = tensor_hash(tensor)
    for i, j in itertools.combinations(range(len(tensor)), 2):
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        same = torch.equal(swapped.view(torch.int32), tensor.view(torch.int32))
        assert (tensor_hash(swapped) == before) == same
    words = tensor.view(torch.int64)
    for i, j in itertools.combinations(range(len(words)), 2):
        exchanged = words.clone()
        exchanged[[i, j]] = words[[j, i]]
        assert (tensor_hash(exchanged) == before) == torch.equal(exchanged, words)


@pytest.mark.parametrize("columns", [1, 6, 64, 1000, 2 * ROW_WORDS, 2 * ROW_WORDS + 2])
def test_exchanged_rows_are_found_also_those_as_long_as_the_hashs_own(columns: int) -> None:
    tensor = drawn(5, columns)
    before = tensor_hash(tensor)
    for i, j in itertools.combinations(range(5), 2):
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        assert tensor_hash(swapped) != before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_shifts_and_what_is_left_out_are_found(dtype: torch.dtype) -> None:
    tensor = drawn(4000).to(dtype)
    shifted = [tensor.roll(by) for by in (1, 2, 7, 8, -1, 1000)]
    cut = [tensor[:-1], tensor[1:], torch.cat([tensor, torch.zeros(1, dtype=dtype)])]
    others = [tensor_hash(each) for each in (*shifted, *cut, torch.zeros_like(tensor))]
    assert len({tensor_hash(tensor), *others}) == 1 + len(others)


def test_zeros_of_other_lengths_are_told_apart() -> None:
    lengths = (0, 1, 2, 8, 9, ROW_BYTES, ROW_BYTES + 8, 2 * ROW_BYTES)
    assert len({tensor_hash(torch.zeros(n, dtype=torch.uint8)) for n in lengths}) == len(lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same(dtype: torch.dtype) -> None:
    for shape in ((0,), (3,), (700, 1025), (300 * ROW_WORDS,)):
        tensor = drawn(*shape, dtype=dtype)
        assert tensor_hash(tensor.cuda()) == tensor_hash(tensor)
