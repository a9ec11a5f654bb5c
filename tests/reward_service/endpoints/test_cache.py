"""Answers that are kept, in memory and in a file."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from reward_service.endpoints.cache import Cache, KeptAnswer, key_of, open_cache_file
from reward_service.verifier.submission import InfrastructureError, UserError


class Made:
    """Counts what is made."""

    def __init__(self, text: str = "7") -> None:
        self.text = text
        self.times = 0

    async def make(self) -> str:
        self.times += 1
        await asyncio.sleep(0)
        return self.text


def memory(made: Made, *, entries: int = 10) -> Cache:
    return Cache(entries=entries, file=None)


def test_keys_tell_apart_texts_that_only_look_alike_when_joined() -> None:
    keys = {key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", ""), key_of("", "abc")}
    assert len(keys) == 5
    assert key_of("a\ud800") == key_of("a\ud800")


async def test_an_answer_is_made_once() -> None:
    made = Made()
    cache = memory(made)
    found = [await cache.get("a", made.make) for _ in range(3)]
    assert found == [KeptAnswer("7", kept=False), KeptAnswer("7", kept=True), KeptAnswer("7", kept=True)]
    assert made.times == 1


@pytest.mark.parametrize("entries", [0, 10])
async def test_what_is_asked_for_twice_at_once_is_made_once(entries: int) -> None:
    made = Made()
    cache = memory(made, entries=entries)
    found = await asyncio.gather(*(cache.get("a", made.make) for _ in range(5)))
    assert [one.text for one in found] == ["7"] * 5
    assert made.times == 1


async def test_an_error_is_not_kept_and_does_not_spread_to_others_who_wait() -> None:
    made = Made()
    cache = memory(made)

    async def fail() -> str:
        await asyncio.sleep(0)
        raise InfrastructureError("gone")

    makers: list[Callable[[], Awaitable[str]]] = [fail, made.make]
    outcomes = await asyncio.gather(*(cache.get("a", maker) for maker in makers), return_exceptions=True)
    assert isinstance(outcomes[0], InfrastructureError)
    assert outcomes[1] == KeptAnswer("7", kept=False)


async def test_one_who_waits_makes_it_himself_when_the_first_is_cancelled() -> None:
    made = Made()
    cache = memory(made)
    began = asyncio.Event()

    async def hang() -> str:
        began.set()
        await asyncio.Event().wait()
        return "never"

    first = asyncio.create_task(cache.get("a", hang))
    await began.wait()
    second = asyncio.create_task(cache.get("a", made.make))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == KeptAnswer("7", kept=False)


async def test_one_who_waits_no_more_takes_the_answer_from_nobody() -> None:
    made = Made()
    cache = memory(made, entries=0)
    first, second, third = (asyncio.create_task(cache.get("a", made.make)) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    assert [(await first).text, (await third).text] == ["7", "7"]
    assert made.times == 1


async def test_the_least_recently_used_goes_first() -> None:
    made = Made()
    cache = memory(made, entries=2)
    for key in ("a", "b", "a", "c", "a", "b"):
        await cache.get(key, made.make)
    # b was dropped for c, and made anew.
    assert (made.times, len(cache)) == (4, 2)


async def test_without_entries_nothing_is_kept() -> None:
    made = Made()
    cache = memory(made, entries=0)
    await cache.get("a", made.make)
    await cache.get("a", made.make)
    assert (made.times, len(cache)) == (2, 0)


async def test_a_file_outlives_its_process(tmp_path: Path) -> None:
    path, made = tmp_path / "kept" / "answers.sqlite", Made("ü 7")
    for kept in (False, True):
        async with open_cache_file(path, entries=10) as file:
            assert await Cache(entries=10, file=file).get("a", made.make) == KeptAnswer("ü 7", kept=kept)
    assert made.times == 1


async def test_a_file_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    async with open_cache_file(path, entries=100) as file:
        for number in range(5):
            await file.put(f"{number}", "x")
    async with open_cache_file(path, entries=2) as file:
        assert [await file.get(f"{number}") for number in range(5)] == [None, None, None, "x", "x"]


async def test_two_services_can_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    async with open_cache_file(path, entries=9) as one, open_cache_file(path, entries=9) as other:
        await one.put("a", "1")
        await other.put("a", "2")
        assert (await one.get("a"), await other.get("a")) == ("1", "1")


async def test_another_file_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    path.write_text("this is no database " * 100)
    with pytest.raises(UserError, match=r"answers\.sqlite cannot be used as a file of kept answers"):
        async with open_cache_file(path, entries=9):
            pass
    assert path.read_text().startswith("this is no database")
