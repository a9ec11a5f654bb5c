import pyarrow
import pytest

from learner.tenants.compression import unpacked_zstd
from services.http.refusals import RequestRefused


def packed(body: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(body, asbytes=True))


def test_a_body_comes_back() -> None:
    assert unpacked_zstd(packed(b"x" * 5000), max_bytes=5000) == b"x" * 5000


def test_a_bomb_is_not_unpacked() -> None:
    with pytest.raises(RequestRefused, match="at most 2000000 are taken") as refused:
        unpacked_zstd(packed(bytes(500 << 20)), max_bytes=2_000_000)
    assert refused.value.status_code == 413


def test_what_is_not_zstd_is_refused() -> None:
    with pytest.raises(RequestRefused, match="not zstd"):
        unpacked_zstd(b"plain", max_bytes=100)
