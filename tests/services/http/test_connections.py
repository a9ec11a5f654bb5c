"""The head of a request ends, in bytes and in time."""

import asyncio

import pytest
from fastapi import FastAPI

from services.http import connections
from tests.services.http.test_app import serving

HEAD = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n"


async def _answer(url: str, *parts: bytes, then: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        async with asyncio.timeout(8):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(then)
            return await reader.read(200)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("line", [b"x" * 9000, b"A: " + b"x" * 8000 + b"\r\n"])
async def test_a_head_without_end_is_cut_off(line: bytes) -> None:
    async with serving(FastAPI()) as url:
        said = await _answer(url, HEAD, *[line] * 12)
        assert said == b"" or said.startswith(b"HTTP/1.1 400")
        assert (await _answer(url, HEAD, then=b"\r\n")).startswith(b"HTTP/1.1 404")


async def test_a_long_head_in_one_piece_is_refused() -> None:
    async with serving(FastAPI()) as url:
        assert (await _answer(url, HEAD + b"A: " + b"x" * 70_000 + b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await _answer(url, HEAD + b"A: " + b"x" * 60_000 + b"\r\n\r\n")).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("part", [b"", HEAD])
async def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    async with serving(FastAPI()) as url:
        assert await _answer(url, part) == b""


async def test_a_connection_that_waits_after_its_request_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    async with serving(FastAPI()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 404")
            await reader.readuntil(b'"Not Found"}')
            await asyncio.sleep(0.6)
        writer.close()


async def _closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.5):
            return await reader.read(1) == b""
    except TimeoutError:
        return False


async def test_a_peer_with_many_half_sent_requests_loses_the_oldest_and_a_whole_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_HEADS_OF_A_PEER", 4)
    monkeypatch.setattr(connections, "CROWDED_S", 0.2)
    async with serving(FastAPI()) as url:
        port = int(url.rpartition(":")[2])
        held = []
        for _ in range(6):  # within CROWDED_S: a burst loses none
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            held.append((reader, writer))
        await asyncio.sleep(0.3)
        assert (await _answer(url, HEAD, then=b"\r\n")).startswith(b"HTTP/1.1 404")
        assert (await _answer(url, HEAD, then=b"\r\n")).startswith(b"HTTP/1.1 404")
        assert [await _closed(reader) for reader, _ in held] == [True, True, False, False, False, False]
        for _, writer in held:
            writer.close()
    assert not connections.LimitedConnection._waiting
