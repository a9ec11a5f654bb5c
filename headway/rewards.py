"""Headway's verifiers from Python: in a notebook, and as reward functions of TRL and verl.

    from headway.rewards import for_trl, for_verl, serving

    GRPOTrainer(..., reward_funcs=[for_trl("math")])          a column `answer` of the data set is its argument
    compute_score = for_verl("math")                          verl's custom_reward_function
    with serving({"close": close}) as server:                 a reward service in a thread of this process
        server.score([ScoreItem(id="1", verifier="close", completion="41", arguments={"answer": 42})])

A service is started at the first call, in this process, unless `urls` name those that run. A running event loop, as a
notebook has one, is no obstacle: services and clients have a loop of their own in a thread.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pydantic import JsonValue

from protocol.rewards import ScoreItem
from reward_service.config import RewardServiceConfig
from reward_service.service import serve
from reward_service.verifier.lanes import Verifier, in_user_loop
from reward_service.verifier.program import SandboxKind
from reward_service.verifier.submission import inspect_function
from services.config.models import HttpConfig
from services.process import Stop
from services.rewards.client import score_sync
from services.rewards.items import ItemScore

T = TypeVar("T")
_START_S = 120.0
_STOP_S = 30.0


class NoReward(Exception):
    """A verifier could not judge a completion; the text says why. It is not a reward of 0."""


class _Thread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headway-rewards", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()


class RewardServer:
    """A reward service in this process. A context manager; or `start` and `stop`, as cells of a notebook need it.

    `verifiers` are functions by name: with a pydantic model of their arguments, or as TRL's are. They run in threads of
    this process, and a deadline does not end them; those that come with Headway run as they do in a service.
    """

    def __init__(
        self,
        verifiers: Mapping[str, Callable[..., object]] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sandbox: SandboxKind = "off",
        config: RewardServiceConfig | None = None,
    ) -> None:
        self._config = config or RewardServiceConfig(sandbox=sandbox, http=HttpConfig(host=host, port=port))
        self._more = [_in_threads(name, function) for name, function in (verifiers or {}).items()]
        self._thread: _Thread | None = None
        self._stop: Stop | None = None
        self._serving: Future[None] | None = None
        self.url = ""

    def start(self) -> Self:
        """Returns when it listens. Raises what keeps it from that, such as AddressInUse."""
        if self._thread is not None:
            return self
        self._thread = _Thread()
        listening: Future[str] = Future()
        self._serving = self._thread.start(self._serve(listening))
        self._serving.add_done_callback(lambda done: _pass_on(done, listening))
        try:
            self.url = listening.result(_START_S)
        except BaseException:
            self.stop()
            raise
        return self

    async def _serve(self, listening: "Future[str]") -> None:
        self._stop = Stop()
        await serve(self._config, self._stop, more=self._more, listening=listening.set_result)

    def stop(self) -> None:
        """Ends it, and returns when it has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            if self._stop is not None and self._serving is not None and not self._serving.done():
                thread.start(_request(self._stop)).result(_STOP_S)
                self._serving.result(_STOP_S)
        finally:
            thread.end()

    def score(self, items: Sequence[ScoreItem]) -> list[ItemScore]:
        """A reward or an error for each item, in order."""
        http = self._config.http
        token = None if http.token is None else http.token.get_secret_value()
        return score_sync(items, urls=[self.start().url], token=token, tls=http.tls)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def serving(verifiers: Mapping[str, Callable[..., object]] | None = None, **settings: Any) -> RewardServer:
    """A reward service with these functions and all that come with Headway; see RewardServer."""
    return RewardServer(verifiers, **settings)


async def _request(stop: Stop) -> None:
    stop.request("the caller")


def _pass_on(done: "Future[None]", listening: "Future[str]") -> None:
    error = done.exception()
    if error is not None and not listening.done():
        listening.set_exception(error)


def _in_threads(name: str, function: Callable[..., object]) -> Verifier:
    read = inspect_function(function=function, path=name)

    async def judge(submission: Any, arguments: Any) -> object:
        return await asyncio.to_thread(read.function, submission, arguments)

    async def judge_together(submissions: Any, arguments: Any) -> object:
        assert read.together is not None, "a function that takes one submission"
        return await asyncio.to_thread(read.together, submissions, arguments)

    together = read.together if read.coroutine or read.together is None else judge_together
    opener = in_user_loop(read.coroutine or judge, together=together)
    return Verifier(name=name, version="0", description=read.description, arguments=read.arguments, open=opener)


class _Scores:
    """Asks services at addresses, or one that is started in this process when it is first needed."""

    def __init__(self, verifier: str | Callable[..., object], urls: Sequence[str], sandbox: SandboxKind) -> None:
        functions = {} if isinstance(verifier, str) else {_name_of(verifier): verifier}
        self.name = verifier if isinstance(verifier, str) else _name_of(verifier)
        self._urls = list(urls)
        self._server = None if urls else RewardServer(functions, sandbox=sandbox)
        self._lock = threading.Lock()

    def __call__(self, given: Sequence[tuple[str, str, Mapping[str, JsonValue]]]) -> list[ItemScore]:
        items = [
            ScoreItem(
                id=str(number), verifier=self.name, completion=completion, prompt=prompt, arguments=dict(arguments)
            )
            for number, (completion, prompt, arguments) in enumerate(given)
        ]
        with self._lock:
            urls = self._urls if self._server is None else [self._server.start().url]
        return score_sync(items, urls=urls)


class TrlReward(Protocol):
    """A reward function as TRL's trainers call it: lists in, a list of numbers or None out."""

    __name__: str

    def __call__(self, completions: Sequence[object], **columns: Any) -> list[float | None]: ...


def for_trl(
    verifier: str | Callable[..., object],
    *,
    columns: Mapping[str, str] | None = None,
    arguments: Mapping[str, JsonValue] | None = None,
    urls: Sequence[str] = (),
    sandbox: SandboxKind = "off",
) -> TrlReward:
    """A verifier of Headway's, by its name or as a function, as a reward function of TRL.

    `columns` maps the verifier's arguments to columns of the data set; `answer` to `answer` if left out. `arguments`
    are the same for all. Where there is no reward the list has None, which TRL leaves out of its sums. Raises NoReward
    for a question that is wrong, such as an argument that the verifier does not know.
    """
    scores = _Scores(verifier, urls, sandbox)
    wanted = {"answer": "answer"} if columns is None else columns

    def reward(completions: Sequence[object], **given: Any) -> list[float | None]:
        prompts = given.get("prompts") or [""] * len(completions)
        rows = [
            (_text(completion), _text(prompts[at]), {**(arguments or {}), **_row(given, wanted, at)})
            for at, completion in enumerate(completions)
        ]
        found = scores(rows)
        for scored in found:
            if scored.error is not None and scored.error.kind == "user":
                raise NoReward(f"{scores.name}: {scored.error.message}")
        return [scored.reward for scored in found]

    reward.__name__ = scores.name
    return reward


def for_verl(
    verifier: str | Callable[..., object],
    *,
    arguments: Mapping[str, JsonValue] | None = None,
    urls: Sequence[str] = (),
    sandbox: SandboxKind = "off",
) -> Callable[..., float]:
    """A verifier of Headway's as verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    `ground_truth` is the argument `answer`, or all arguments if it is a mapping; `extra_info["arguments"]` adds to
    them. It raises NoReward where there is none: verl knows no completion without a reward.
    """
    scores = _Scores(verifier, urls, sandbox)

    def compute_score(
        data_source: object,
        solution_str: str,
        ground_truth: object,
        extra_info: Mapping[str, Any] | None = None,
        **_: object,
    ) -> float:
        extra = extra_info or {}
        truth: Mapping[str, Any] = ground_truth if isinstance(ground_truth, Mapping) else {"answer": ground_truth}
        given = {**(arguments or {}), **truth, **extra.get("arguments", {})}
        (scored,) = scores([(solution_str, _text(extra.get("prompt", "")), given)])
        if scored.reward is None:
            raise NoReward(f"{scores.name} of a completion of {data_source}: {_why(scored)}")
        return scored.reward

    return compute_score


def _why(scored: ItemScore) -> str:
    return "no reason given" if scored.error is None else scored.error.message


def _name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _text(given: object) -> str:
    """The text of a completion or a prompt: as it is, or the last message of a conversation."""
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and given and isinstance(given[-1], Mapping):
        return str(given[-1].get("content") or "")
    raise TypeError(f"got {given!r:.80}, expected a text or a list of messages")


def _row(given: Mapping[str, Any], columns: Mapping[str, str], at: int) -> dict[str, JsonValue]:
    return {argument: given[column][at] for argument, column in columns.items() if column in given}
