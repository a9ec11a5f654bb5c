"""Items that a verifier compares stay in one request, wherever a client cuts."""

import asyncio
from functools import partial

from aiohttp import web

from protocol.rewards import ScoreItem
from services.http.breakers import BreakerSettings
from services.rewards.groups import affordable, halves, pieces
from services.rewards.items import Entry
from services.rewards.settings import HedgeSettings
from tests.env_service.peers import eventually
from tests.services.rewards.scripted import ArrivedRequest, held, lines, scores
from tests.services.rewards.test_client import client_of, hangs_on, rewards, scripted
from tests.services.rewards.test_hedging import has_answered


def grouped(name: str, size: int, *, first: str = "a") -> list[ScoreItem]:
    """The items of a group; the completion of the first one can be told."""
    texts = [first, *("b" * (number + 1) for number in range(1, size))]
    return [ScoreItem(id=text, verifier="v", completion=text, group=name, group_size=size) for text in texts]


def entries(*names: str) -> list[Entry]:
    """An entry for each name of a group, in order."""
    return [
        Entry(
            ScoreItem(id=str(at), verifier="v", completion="c", group=name, group_size=max(1, names.count(name))),
            wire_id=str(at), item_attempts=1,
        )
        for at, name in enumerate(names)
    ]  # fmt: skip


def named(found: list[Entry]) -> str:
    return "".join(entry.item.group or "-" for entry in found)


def sizes(asked: list[ArrivedRequest]) -> list[dict[str, int]]:
    """Of each request how many items of each group it holds."""
    found: list[dict[str, int]] = []
    for each in asked:
        names = [item.group for item in each.body.items]
        found.append({name: names.count(name) for name in sorted(set(names))})
    return found


async def test_two_groups_that_are_too_large_for_one_request_are_cut_between_them() -> None:
    both = [item for pair in zip(grouped("x", 160), grouped("y", 160), strict=True) for item in pair]
    async with client_of(service := scripted(), batch_items=256) as client:
        scored = await client.score(both)

    assert rewards(scored) == [float(len(item.completion)) for item in both]
    assert sorted(map(str, sizes(service.asked))) == ["{'x': 160}", "{'y': 160}"]


async def test_a_request_that_hangs_is_halved_between_groups() -> None:
    service = scripted(always=hangs_on("hang"))
    async with client_of(service, deadline_s=0.3, margin_s=0.0, patience_s=2.0) as client:
        scored = await client.score([*grouped("x", 2), *grouped("y", 6, first="hang")])

    assert rewards(scored[:2]) == [1.0, 2.0]
    assert sizes(service.asked)[1:3] in ([{"x": 2}, {"y": 6}], [{"y": 6}, {"x": 2}])


async def test_a_request_that_was_not_sent_is_not_halved() -> None:
    """A service that has hung is asked for a sign of life first; without one nothing is known of the items."""
    service, silent = scripted(held(asyncio.Event()), always=scores), [True]

    async def ready(_: web.Request) -> web.Response:
        if silent:
            silent.pop()
            await asyncio.Event().wait()
        return web.Response(text='{"ready": true}')

    rests = BreakerSettings(rest_s=0.3, rest_max_s=0.3)
    service.ready = ready
    async with client_of(service, deadline_s=0.2, margin_s=0.0, rests=rests) as client:
        alone = asyncio.create_task(client.score([ScoreItem(id="1", verifier="v", completion="c")]))
        await eventually(lambda: service.asked and not service.under_way)
        alone.cancel()
        assert rewards(await client.score(grouped("x", 4))) == [1.0, 2.0, 3.0, 4.0]

    assert not silent
    assert sizes(service.asked)[1:] == [{"x": 4}]


async def test_a_group_is_asked_twice_as_a_whole_or_not_at_all() -> None:
    answer = asyncio.Event()
    first, second = scripted(always=held(answer)), scripted()
    hedging = HedgeSettings(after_s=0.01, share=0.0, burst=5)
    async with client_of(first, second, hedging=hedging) as client:
        call = asyncio.create_task(client.score([*grouped("x", 4), *grouped("y", 4)]))
        await eventually(partial(has_answered, second))
        answer.set()
        await call

    assert sizes(second.asked) == [{"x": 4}]


async def test_what_is_slow_of_a_group_that_is_answered_in_part_is_asked_twice() -> None:
    first, second = scripted(always=lines(asyncio.Event(), "a")), scripted()
    async with client_of(first, second, hedging=HedgeSettings(after_s=0.05)) as client:
        assert rewards(await client.score(grouped("x", 4))) == [1.0, 2.0, 3.0, 4.0]

    assert sizes(second.asked) == [{"x": 1}]


def test_pieces_hold_whole_groups_and_fill_up_with_what_has_none() -> None:
    assert [named(piece) for piece in pieces(entries(*"xyxyx"), most=4)] == ["xxx", "yy"]
    assert [named(piece) for piece in pieces(entries("", "", "", "", ""), most=2)] == ["--", "--", "-"]
    assert [named(piece) for piece in pieces(entries(*"xxxxx"), most=2)] == ["xx", "xx", "x"]
    assert pieces([], most=2) == []


def test_halves_are_cut_through_a_group_only_where_it_is_the_only_one() -> None:
    assert tuple(map(named, halves(entries(*"xxxyyz")))) == ("xxx", "yyz")
    assert tuple(map(named, halves(entries(*"xyyyyy")))) == ("x", "yyyyy")
    assert tuple(map(named, halves(entries(*"xxxxxy")))) == ("xxxxx", "y")
    assert tuple(map(named, halves(entries(*"xxxx")))) == ("xx", "xx")
    assert tuple(map(named, halves(entries("", "", "")))) == ("-", "--")


def test_what_is_afforded_holds_no_part_of_a_whole_group() -> None:
    assert named(affordable(entries(*"xxxyy"), most=2)) == "yy"
    assert named(affordable(entries(*"xxx"), most=2)) == ""
    assert named(affordable(entries(*"xxx")[1:], most=1)) == "x"
    assert named(affordable(entries("", "", ""), most=2)) == "--"
