"""`POST /v1/execute` and its sessions, over the real application."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from protocol.rewards import ExecuteAnswer
from protocol.status import Readiness
from reward_service.execution.execution import execution_routes, open_execution
from reward_service.sandbox.pool import Sandboxes, open_sandboxes
from reward_service.verifier.program import ExecutionConfig, Program, RunLimits
from services.http.app import create_app
from services.http.metrics import Metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = ExecutionConfig(concurrency=1, max_waiting=1, cgroup="off", packages=(), max_sessions=2, session_idle_s=300.0)


def application() -> FastAPI:
    return create_app(
        service="reward-service",
        version="0",
        token=None,
        readiness=lambda: Readiness(ready=True),
        metrics=Metrics("reward-service"),
    )


@asynccontextmanager
async def serving(sandboxes: Sandboxes | None, config: ExecutionConfig = CONFIG) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        app = application()
        app.include_router(execution_routes(await stack.enter_async_context(open_execution(sandboxes, config))))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        yield await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://x", timeout=120))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[Sandboxes]:
    async with open_sandboxes(kind="unsafe", config=CONFIG) as opened:
        assert opened is not None
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(sandboxes: Sandboxes) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(sandboxes) as opened:
        yield opened


async def execute(client: httpx.AsyncClient, **request: object) -> ExecuteAnswer:
    response = await client.post("/v1/execute", json={"limits": {"wall_s": 60.0}, **request})
    assert response.status_code == 200, response.text
    return ExecuteAnswer.model_validate_json(response.content)


async def refused(client: httpx.AsyncClient, **request: object) -> tuple[int, str]:
    response = await client.post("/v1/execute", json=request)
    return response.status_code, response.json()["error"]["message"]


async def test_code_runs_with_its_files_input_and_environment(client: httpx.AsyncClient) -> None:
    answer = await execute(
        client,
        code="import os, sys; print(open('data/x').read(), sys.stdin.read(), os.environ['A']); sys.exit(2)",
        files={"data/x": "file"},
        stdin="input",
        environment={"A": "variable"},
    )
    assert (answer.stdout, answer.exit_code, answer.session_started) == ("file input variable\n", 2, False)


async def test_another_language_is_one_of_the_operators(client: httpx.AsyncClient) -> None:
    assert (await execute(client, code="echo $((1 + 1))", language="sh")).stdout == "2\n"
    assert await refused(client, code="1", language="cobol") == (
        422,
        "no interpreter is named 'cobol' (execution.interpreters); there are: python, sh",
    )


async def test_a_command_line_runs_as_it_is(client: httpx.AsyncClient) -> None:
    assert (await execute(client, argv=["python", "-c", "print(3)"])).stdout == "3\n"


async def test_a_program_that_is_too_slow_is_an_answer(client: httpx.AsyncClient) -> None:
    answer = await execute(client, code="while True: pass", limits={"wall_s": 0.5})
    assert (answer.timed_out, answer.signal) == (True, 9)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "expected either code or argv"),
        ({"code": "", "argv": ["sh"]}, "expected either code or argv"),
        ({"argv": ["sh"], "session": "a"}, "a session takes code"),
        ({"code": "", "limits": {"wall_s": 10_000.0}}, "at most 120"),
        ({"code": "", "files": {"../x": ""}}, "relative path"),
        ({"code": "", "session": "a", "limits": {"disk_mib": 10_000}}, "at most 256"),
    ],
)
async def test_what_cannot_be_run_is_refused(
    client: httpx.AsyncClient, request_: dict[str, object], message: str
) -> None:
    status, said = await refused(client, **request_)
    assert (status, message in said) == (422, True), said


async def test_more_programs_than_may_wait_are_turned_away(sandboxes: Sandboxes, client: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(client.post("/v1/execute", json={"code": "print(1)"})) for _ in range(6)]
    answers = [call.result() for call in calls]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
    assert all(answer.headers["Retry-After"] == "1" for answer in answers if answer.status_code == 429)


async def test_a_session_of_python_keeps_variables_and_survives_errors(client: httpx.AsyncClient) -> None:
    first = await execute(client, code="x = 1\nopen('f', 'w').write('kept')", session="py")
    failed = await execute(client, code="x += 1\n1 / 0", session="py")
    left = await execute(client, code="import sys\nsys.exit(5)", session="py")
    last = await execute(client, code="print(x, open('f').read(), input(), 'é')", session="py", stdin="in\n")
    assert (first.session_started, failed.session_started) == (True, False)
    assert (failed.exit_code, "ZeroDivisionError" in failed.stderr, "session_inside" in failed.stderr) == (
        1,
        True,
        False,
    )
    assert (left.exit_code, left.session_ended) == (5, False)
    assert last.stdout == "2 kept in é\n"
    await client.delete("/v1/sessions/py")


async def test_programs_of_verifiers_take_no_room_of_calls(sandboxes: Sandboxes, client: httpx.AsyncClient) -> None:
    program = Program(argv=("python", "-c", "print(1)"), limits=RunLimits(wall_s=60.0))
    judged = [asyncio.create_task(sandboxes.programs.run(program)) for _ in range(3)]
    await asyncio.sleep(0)
    assert sandboxes.programs.busy == 1
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(client.post("/v1/execute", json={"code": "print(1)"})) for _ in range(3)]
    assert sorted(call.result().status_code for call in calls) == [200, 429, 429]
    assert [ended.exit_code for ended in await asyncio.gather(*judged)] == [0, 0, 0]


@pytest.mark.parametrize("language", ["python", "sh"])
async def test_files_that_cannot_be_written_are_an_answer_and_the_session_goes_on(
    client: httpx.AsyncClient, language: str
) -> None:
    await execute(client, code={"python": "x = 1", "sh": "x=1"}[language], language=language, session="files")
    answer = await execute(client, code="", language=language, session="files", files={"out/a": "in a folder"})
    assert answer.exit_code == 0
    answer = await execute(client, code="", language=language, session="files", files={"out": ""})
    assert (answer.exit_code, "Is a directory: 'out'" in answer.stderr, answer.session_ended) == (1, True, False)
    code = {"python": "print(x)", "sh": "echo $x"}[language]
    assert (await execute(client, code=code, language=language, session="files")).stdout == "1\n"
    await client.delete("/v1/sessions/files")


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("sys.stdout.close()", 0),
        ("sys.stdout.close(); sys.stderr.close(); 1 / 0", 1),
        ("sys.stdout = sys.stderr = None", 0),
        # As on a disk that is full: what was printed cannot be written at the end.
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (10, most)); print('x' * 1000)", 0),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (10, most)); sys.stderr.close(); sys.exit('x' * 1000)", 1),
    ],
)
async def test_a_session_outlives_output_that_cannot_be_written(
    client: httpx.AsyncClient, code: str, exit_code: int
) -> None:
    await execute(client, code="import resource, sys\nusual = resource.getrlimit(resource.RLIMIT_FSIZE)", session="out")
    answer = await execute(client, code=f"most = usual[1]\n{code}", session="out")
    assert (answer.exit_code, answer.session_ended) == (exit_code, False)
    again = await execute(
        client,
        code="resource.setrlimit(resource.RLIMIT_FSIZE, usual); print(1); print(2, file=sys.stderr)",
        session="out",
    )
    assert (again.stdout, again.stderr) == ("1\n", "2\n")
    await client.delete("/v1/sessions/out")


async def test_a_session_of_a_shell_keeps_variables_until_it_exits(client: httpx.AsyncClient) -> None:
    await execute(client, code="x=7; cd /tmp", language="sh", session="sh")
    second = await execute(
        client, code="echo $x; pwd; cat; echo oh >&2; false", language="sh", session="sh", stdin="in"
    )
    assert (second.stdout, second.stderr, second.exit_code) == ("7\n/tmp\nin", "oh\n", 1)
    last = await execute(client, code="exit 4", language="sh", session="sh")
    assert (last.exit_code, last.session_ended) == (4, True)
    assert (await execute(client, code="echo [$x]", language="sh", session="sh")).stdout == "[]\n"
    await client.delete("/v1/sessions/sh")


async def test_a_call_over_its_time_ends_the_session_and_says_so(client: httpx.AsyncClient) -> None:
    await execute(client, code="x = 1", session="slow")
    answer = await execute(client, code="while True: pass", session="slow", limits={"wall_s": 0.5})
    assert (answer.timed_out, answer.session_ended) == (True, True)
    again = await execute(client, code="print('x' in globals())", session="slow")
    assert (again.stdout, again.session_started) == ("False\n", True)
    await client.delete("/v1/sessions/slow")


async def test_the_output_of_a_call_is_cut(client: httpx.AsyncClient) -> None:
    limits = {"wall_s": 60.0, "output_bytes": 1000}
    answer = await execute(client, code="print('é' * 5000)", session="long", limits=limits)
    assert (len(answer.stdout.encode()), answer.stdout_cut, answer.stderr_cut) == (1000, True, False)
    await client.delete("/v1/sessions/long")


async def test_sessions_are_bounded_and_can_be_ended(client: httpx.AsyncClient) -> None:
    for name in ("a", "b"):
        await execute(client, code="", session=name)
    status, message = await refused(client, code="", session="c")
    assert (status, "2 sessions live already" in message) == (429, True)
    assert (await client.delete("/v1/sessions/a")).json() == {"ended": True}
    assert (await client.delete("/v1/sessions/a")).json() == {"ended": False}
    assert (await execute(client, code="", session="c")).session_started
    for name in ("b", "c"):
        await client.delete(f"/v1/sessions/{name}")


async def test_a_session_that_is_idle_ends(sandboxes: Sandboxes) -> None:
    config = CONFIG.model_copy(update={"session_idle_s": 0.05})
    async with serving(sandboxes, config) as client:
        await execute(client, code="x = 1", session="idle")
        async with asyncio.timeout(120):
            await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "session idle"))
        assert (await execute(client, code="", session="idle")).session_started


async def test_a_session_has_one_language(client: httpx.AsyncClient) -> None:
    await execute(client, code="", session="one")
    assert await refused(client, code="", language="sh", session="one") == (
        422,
        "session 'one' runs python, got code in sh",
    )
    await client.delete("/v1/sessions/one")


async def test_code_that_breaks_the_exchange_loses_its_session_and_no_more(client: httpx.AsyncClient) -> None:
    forged = json.dumps({"exit_code": 0, "over": False, "stdout": "", "stderr": "", "extra": 1})
    write = f"os.write(n, {forged!r}.encode() + b'\\n')"
    code = f"import os\nfor n in range(3, 20):\n    try: {write}\n    except OSError: pass"
    status, message = await refused(client, code=code, session="forger")
    assert (status, "broke the exchange" in message) == (422, True), message
    assert (await execute(client, code="print(1)", session="forger")).stdout == "1\n"
    await client.delete("/v1/sessions/forger")


async def test_without_a_sandbox_programs_are_refused() -> None:
    async with serving(None) as client:
        assert await refused(client, code="1") == (403, "this service runs no programs: its setting sandbox is 'off'")
