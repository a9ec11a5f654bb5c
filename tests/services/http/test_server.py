"""The server as a loop of a process: it ends when it is cancelled, and frees its port."""

import asyncio
import os
import signal
import socket
import sys
import time

import pytest
from fastapi import FastAPI

from services.http.server import AddressInUse, Listener, serve_http


def test_a_taken_port_says_so_before_anything_starts() -> None:
    with Listener(host="127.0.0.1", port=0) as first, pytest.raises(AddressInUse) as caught:
        Listener(host="127.0.0.1", port=first.port)
    assert f"cannot listen on 127.0.0.1:{first.port}" in str(caught.value)


async def test_cancelling_ends_the_server_and_frees_the_port() -> None:
    listener = Listener(host="127.0.0.1", port=0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        server = group.create_task(serve_http(FastAPI(), listener))
        reader, writer = await _get(listener.port, "/")
        await reader.readline()
        server.cancel()
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port), timeout=5)
    Listener(host="127.0.0.1", port=listener.port).socket.close()


async def test_a_server_that_nobody_waits_for_ends_at_once() -> None:
    took_s = []
    for _ in range(5):  # the machine may be busy
        with Listener(host="127.0.0.1", port=0) as listener:
            server = asyncio.create_task(serve_http(FastAPI(), listener))
            reader, writer = await _get(listener.port, "/")
            await reader.readline()
            started = time.monotonic()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
            took_s.append(time.monotonic() - started)
            writer.close()
    assert min(took_s) < 0.08


@pytest.mark.parametrize(("finish_s", "answered"), [(30, True), (1, False)])
async def test_a_request_in_progress_has_its_time_to_end(finish_s: int, answered: bool) -> None:
    app, begun, goes_on, ends = FastAPI(), asyncio.Event(), asyncio.Event(), list[str]()

    @app.get("/")
    async def slow() -> dict[str, bool]:
        begun.set()
        try:
            await goes_on.wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return {"done": True}

    with Listener(host="127.0.0.1", port=0) as listener:
        server = asyncio.create_task(serve_http(app, listener, finish_s=finish_s))
        async with asyncio.timeout(60):
            reader, writer = await _get(listener.port, "/")
            await begun.wait()
            server.cancel()
            await asyncio.sleep(0.1)
            assert not server.done()
            if answered:
                goes_on.set()
            await asyncio.gather(server, return_exceptions=True)
            said = await reader.read()
        writer.close()
    assert (b'{"done":true}' in said, ends) == (answered, [] if answered else ["cancelled"])


CHILD = """
import asyncio, os, sys
from fastapi import FastAPI
from services.http.server import Listener, serve_http
from services.logs import configure_logging
from services.process import run_loops, run_process

app = FastAPI()

@app.get("/crash")
async def crash():
    crashed.set()
    return {}

async def waits():
    await crashed.wait()
    raise RuntimeError("told to")

async def main(stop):
    global crashed
    crashed = asyncio.Event()
    with Listener(host="127.0.0.1", port=0) as listener:
        print(listener.port, flush=True)
        try:
            await run_loops(http=serve_http(app, listener), other=waits())
        finally:
            print("cleaned up", flush=True)

configure_logging("learner")
sys.exit(run_process("learner", main))
"""


async def start_child() -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stdout=pipe, stderr=pipe)


async def ended(child: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(60):
        out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_a_serving_process_lets_it_clean_up_and_exit_with_0(number: signal.Signals) -> None:
    child = await start_child()
    assert child.stdout is not None
    port = int(await child.stdout.readline())
    reader, writer = await _get(port, "/healthz")
    await reader.readline()
    os.kill(child.pid, number)
    code, out, err = await ended(child)
    writer.close()
    assert (code, out) == (0, "cleaned up\n"), err


async def test_a_crashed_loop_stops_the_server_and_exits_with_1() -> None:
    child = await start_child()
    assert child.stdout is not None
    port = int(await child.stdout.readline())
    _, writer = await _get(port, "/crash")
    code, out, err = await ended(child)
    writer.close()
    assert (code, out) == (1, "cleaned up\n")
    assert "stopped by an error: other: RuntimeError: told to" in err


async def _get(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask a server for a path; the connection stays open."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await writer.drain()
        return reader, writer
