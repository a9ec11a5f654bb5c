"""MCP servers, real ones: programs and over HTTP, servers that die, and slow ones."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("mcp")

from env_service.builtin import mcp_servers
from env_service.builtin.mcp_servers import McpConnection, McpFailure, McpToolbox
from env_service.builtin.toolboxes import McpTool, ToolFault, name_of
from env_service.environments import catalog
from env_service.environments.interface import EnvironmentUnavailable, ToolCall
from env_service.environments.task_configs import ClassTasks
from protocol.generation import Sampling
from tests.env_service.agents.served import Saying
from tests.env_service.bench import benches
from tests.env_service.chat_models import model_with
from tests.env_service.peers import eventually, lease
from tests.process_ends import all_end

SERVER = str(Path(__file__).with_name("sample_mcp_server.py"))
PAGED_SERVER = str(Path(__file__).with_name("paged_mcp_server.py"))
COMMAND = (sys.executable, SERVER)

Opened = Callable[..., Awaitable[McpToolbox]]


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[Opened]:
    """Opens toolboxes that are closed at the end, shared connections too."""
    boxes = []

    async def open_box(**settings: Any) -> McpToolbox:
        box = McpToolbox(McpTool(kind="mcp", **{"connect_timeout_s": 60, **settings}))
        boxes.append(box)
        return box

    yield open_box
    for box in boxes:
        await box.close()
        await box._connection.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < until, "the server does not come up"
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


def add(a: object, b: object) -> ToolCall:
    return ToolCall("add", {"a": a, "b": b})  # type: ignore[dict-item]


async def test_a_program_s_tools_are_offered_with_their_schema_and_called(opened: Opened) -> None:
    box = await opened(command=COMMAND, tools=["add"])

    (tool,) = await box.offered()

    assert name_of(tool) == "add"
    assert json.loads(json.dumps(tool))["function"]["parameters"]["required"] == ["a", "b"]
    assert await box.call(add(2, 3)) == "5"


async def test_tools_over_http_are_called_side_by_side(opened: Opened, address: str) -> None:
    box = await opened(url=address)

    assert {name_of(tool) for tool in await box.offered()} == {"add", "process", "die", "wait"}
    assert await asyncio.gather(*(box.call(add(n, n)) for n in range(50))) == [str(2 * n) for n in range(50)]


async def test_tools_of_all_pages_are_offered_and_what_they_return_is_shown(opened: Opened) -> None:
    box = await opened(command=(sys.executable, PAGED_SERVER))

    offered = [name_of(tool) for tool in await box.offered()]

    told = {name: await box.call(ToolCall(name, {})) for name in offered}
    assert told == {
        "text": "a\nb",
        "file": "in the file",
        "bytes": "[resource file:///a.png]",
        "link": "[resource_link file:///b.txt]",
        "image": "[image]",
        "structured": '{"degrees": 21}',
    }


async def test_what_the_server_calls_an_error_is_told_to_the_policy(opened: Opened, address: str) -> None:
    box = await opened(url=address)

    with pytest.raises(ToolFault, match="integer"):
        await box.call(add("two", 3))
    with pytest.raises(ToolFault, match="Unknown tool"):
        await box.call(ToolCall("subtract", {}))


async def test_a_call_that_takes_too_long_is_told_and_the_connection_stays(opened: Opened, address: str) -> None:
    box = await opened(url=address, timeout_s=1.0)

    with pytest.raises(ToolFault, match="no answer within 1 s"):
        await box.call(ToolCall("wait", {"seconds": 30.0}))
    assert await box.call(add(1, 1)) == "2"


async def test_conversations_share_a_program_unless_set_otherwise(opened: Opened) -> None:
    process = ToolCall("process", {})
    first, second = await opened(command=COMMAND), await opened(command=COMMAND)
    alone = await opened(command=COMMAND, shared=False)

    one, other, own = [await box.call(process) for box in (first, second, alone)]

    assert one == other != own


async def test_closing_ends_the_program_of_a_conversation_of_its_own(opened: Opened) -> None:
    box = await opened(command=COMMAND, shared=False)
    number = int(await box.call(ToolCall("process", {})))

    await asyncio.create_task(box.close())  # in another task than the one that opened it

    assert all_end({number}, timeout_s=30)


async def test_a_server_that_dies_costs_that_call_and_comes_back(opened: Opened) -> None:
    box = await opened(command=COMMAND, timeout_s=5.0)
    assert await box.call(add(1, 2)) == "3"

    with pytest.raises(EnvironmentUnavailable, match="MCP server"):
        await box.call(ToolCall("die", {}))

    assert await box.call(add(2, 2)) == "4"


@pytest.mark.parametrize("within_a_call", [True, False])
async def test_what_a_server_of_a_conversation_of_its_own_held_is_lost_with_it(
    opened: Opened, within_a_call: bool
) -> None:
    box = await opened(command=COMMAND, shared=False, timeout_s=5.0)
    number = int(await box.call(ToolCall("process", {})))

    waits = asyncio.create_task(box.call(ToolCall("wait", {"seconds": 4.0 if within_a_call else 0.0})))
    await asyncio.sleep(0.5 if within_a_call else 0)
    if not within_a_call:
        assert await waits == "done"
    os.kill(number, signal.SIGKILL)

    for _ in range(2):
        with pytest.raises(EnvironmentUnavailable, match="MCP server"):
            await (waits if not waits.done() else box.call(add(1, 1)))


async def test_a_server_that_says_nothing_more_is_away_and_no_slow_tool(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("env_service.builtin.mcp_servers._SIGN_OF_LIFE_S", 1.0)
    # One that is stopped ends by neither of the two ways that are tried before it is killed.
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.5)
    box = await opened(command=COMMAND, timeout_s=1.0)
    number = int(await box.call(ToolCall("process", {})))
    os.kill(number, signal.SIGSTOP)
    with pytest.raises(EnvironmentUnavailable, match="does not answer"):
        await box.call(add(1, 1))

    assert all_end({number}, timeout_s=30)
    assert await box.call(add(1, 1)) == "2"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"url": "http://127.0.0.1:9/mcp"}, EnvironmentUnavailable),
        ({"command": ("/no/such/program",)}, McpFailure),
        ({"command": (sys.executable, "-c", "pass")}, EnvironmentUnavailable),
        (
            {"command": (sys.executable, "-c", "import time; time.sleep(60)"), "connect_timeout_s": 0.5},
            EnvironmentUnavailable,
        ),
    ],
)
async def test_a_server_that_does_not_come_up_is_named(
    opened: Opened, settings: dict[str, Any], expected: type[Exception]
) -> None:
    box = await opened(**settings)

    with pytest.raises(expected, match="MCP server"):
        await box.offered()


@pytest.mark.parametrize("shared", [True, False])
async def test_a_server_that_is_killed_in_the_middle_is_no_fault_of_the_tasks(tmp_path: Path, shared: bool) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "go", "arguments": {"answer": "1"}}\n')
    server = {"kind": "mcp", "command": [*COMMAND], "connect_timeout_s": 60, "shared": shared, "timeout_s": 10 + shared}
    options = {"train_file": str(tmp_path / "tasks.jsonl"), "verifier": "exact", "tools": [server]}
    entry = ClassTasks.model_validate({"source": "tools", "name": "agent", "options": options})

    def says(prompt: str) -> str:
        asked = prompt.rpartition("<tool_response>")[2].strip().partition("\n")[0]
        if not asked.isdigit():
            return '<tool_call>\n{"name": "process", "arguments": {}}\n</tool_call>'
        os.kill(int(asked), signal.SIGKILL)
        return '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

    model = model_with("tools_in_system", tmp_path)
    async with benches(model) as make:
        made = await make(Saying(model, says), extra=[*catalog.build([entry]).values()], environment_timeout_s=60)
        granted = lease(environment="agent", group_size=1).model_copy(update={"sampling": Sampling(max_tokens=200)})
        failed = await made.failed(granted)

    assert not failed.data_fault, failed.reason
    assert "MCP server" in failed.reason


async def test_a_tool_that_the_server_lacks_is_named(opened: Opened, address: str) -> None:
    box = await opened(url=address, tools=["add", "subtract"])

    with pytest.raises(ValueError, match=r"has no tool subtract; it has .*add"):
        await box.offered()


async def test_who_waited_for_a_connection_that_was_given_up_closes_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, given_up = list[str](), list[str]()

    class ReadyAtTheSecondTry:
        def __init__(self, server: object, **_: object) -> None:
            begun.append(str(server))

        async def __aenter__(self) -> "ReadyAtTheSecondTry":
            if len(begun) == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(1.0)  # as a program that takes its time to end
                    given_up.append("first")
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(mcp_servers, "Client", ReadyAtTheSecondTry)
    connection = McpConnection(McpTool(kind="mcp", url="http://127.0.0.1:1/mcp", connect_timeout_s=1.0))
    first = asyncio.create_task(connection._client())
    await asyncio.sleep(0.5)
    second = asyncio.create_task(connection._client())
    await eventually(lambda: connection._holder is None)
    healthy = await connection._client()

    for waiting in (second, first):
        with pytest.raises(EnvironmentUnavailable, match="not ready within 1 s"):
            await waiting

    assert given_up == ["first"], "before it was said, and not after a time in which it might have left"
    assert await connection._client() is healthy
    assert len(begun) == 2
    await connection.close()
