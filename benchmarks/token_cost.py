"""Cost of a token and of a completion around the engine: CPU of a generator's frontend, its engine, and a client.

    python -m benchmarks.token_cost [--against OTHER] [--rounds 2]

A generator's routes over its real engine (vLLM, on a tiny model of random weights), and a client in a process of its
own, which reads the answers as env_services do. Short: 16 requests at once for 8 completions of 5 tokens. Long: 4 at
once for 8 completions of 400 tokens. OTHER is a folder with another commit: both run, and are measured in turn. The
kernel's work for a process is counted as its own. Weights are random, so that a completion goes on to its limit.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.local_processes import each_process, fields_of

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/token_cost.md"
COMPLETIONS = 8
PROMPT = tuple(range(3, 15))


@dataclass(frozen=True)
class Load:
    """Requests for `tokens` tokens, `at_once` of them under way, `requests` in all, after `warm_up`."""

    tokens: int
    at_once: int
    requests: int
    warm_up: int


LOADS = {"short": Load(5, 16, 160, 32), "long": Load(400, 4, 4, 0)}


def make_model(folder: Path) -> None:
    """A tiny Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4096, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).to(torch.float32).save_pretrained(folder)


async def serve(model: Path) -> None:
    """A generator's token routes until standard input ends, and `/measured` for the CPU seconds so far."""
    from generator.engine.options import EngineOptions, prepare_environment

    options = EngineOptions(
        model=str(model), dtype="float32", max_model_len=2100, kv_cache_gb=0.5, tokenizer=False, max_num_seqs=128
    )
    prepare_environment(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from generator.engine.engine import Engine

        engine = await Engine.start(options=options)
    from fastapi import Response

    from generator.routes import add_token_routes
    from generator.serving import GeneratorMetrics, Serving
    from protocol.status import Readiness
    from services.http.app import create_app
    from services.http.metrics import Metrics
    from services.http.server import Listener, serve_http

    registry = Metrics("generator")
    app = create_app(
        service="generator", version="0", token=None, readiness=lambda: Readiness(ready=True), metrics=registry
    )
    serving = Serving(
        engine=engine, generator_id="g", vocabulary_size=64, max_model_len=2100, max_waiting_requests=1024,
        metrics=GeneratorMetrics(registry, engine=engine),
    )  # fmt: skip
    serving.holds("0.0")
    unused: Any = None
    add_token_routes(app, serving=serving, scoring=unused)

    @app.get("/measured")
    async def measured() -> Response:
        return Response(json.dumps({"frontend": cpu_s(os.getpid()), "core": sum(map(cpu_s, children(os.getpid())))}))

    listener = Listener(host="127.0.0.1", port=0)
    serving_http = asyncio.create_task(serve_http(app, listener))
    print(listener.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    serving_http.cancel()
    await engine.shutdown()


def cpu_s(pid: int) -> float:
    """User and system time of a process with all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    return [child for child, stat in each_process("stat") if int(fields_of(stat)[1]) == pid]


async def ask(url: str, load: Load) -> dict[str, float]:
    """CPU seconds of the three over the requests of a load, and the parts that came."""
    import urllib.request

    from services.http.client import HttpClient

    def measured() -> dict[str, float]:
        with urllib.request.urlopen(f"{url}/measured") as answer:
            found: dict[str, float] = json.loads(answer.read())
        return {**found, "client": cpu_s(os.getpid())}

    async with HttpClient() as http:
        await sample(http, url, load, load.warm_up)
        before = measured()
        parts = await sample(http, url, load, load.requests)
        after = measured()
    return {name: after[name] - before[name] for name in after} | {"parts": float(parts)}


async def sample(http: Any, url: str, load: Load, requests: int) -> int:
    """The completions of so many requests, gathered as an env_service does. Returns the number of parts."""
    from env_service.rollouts.completions import Completion
    from protocol.generation import GeneratePart, GenerateRequest, Sampling

    left = iter(range(requests))
    count = 0

    async def work() -> None:
        nonlocal count
        for number in left:
            made = [Completion(index) for index in range(COMPLETIONS)]
            for each in made:
                each.begin_request()
            request = GenerateRequest(
                request_id=f"r{number}",
                prompt_token_ids=PROMPT,
                n=COMPLETIONS,
                sampling=Sampling(max_tokens=load.tokens),
            )
            asked = http.stream(f"{url}/v1/generate", request, GeneratePart, deadline_s=600, idle_timeout_s=600)
            async with asked as parts:
                async for part in parts:
                    count += 1
                    made[part.index].extend(part, generator_id="g")
            assert all(len(each.token_ids) == len(each.behavior_logprobs) == load.tokens for each in made)

    await asyncio.gather(*(work() for _ in range(load.at_once)))
    return count


class CheckoutGenerator:
    """A generator with the code of a checkout, which runs while it is entered, and clients with the same code."""

    def __init__(self, checkout: Path, model: Path) -> None:
        self._checkout = checkout
        self._environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        self._script = [sys.executable, str(HERE / "benchmarks/token_cost.py")]
        self._server = subprocess.Popen(
            [*self._script, "--serve", str(model)], cwd=checkout, env=self._environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._url = ""

    def __enter__(self) -> Self:
        assert self._server.stdout is not None
        self._url = self._server.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=600)

    def measured(self, name: str) -> dict[str, float]:
        """A load's cost in us: of a completion for the short one, of a token for the long."""
        load = LOADS[name]
        asked = [*self._script, "--ask", name, "--url", self._url]
        done = subprocess.run(
            asked, cwd=self._checkout, env=self._environment, stdout=subprocess.PIPE, text=True, check=True
        )
        spent: dict[str, float] = json.loads(done.stdout)
        completions = load.requests * COMPLETIONS
        parts = spent.pop("parts") / completions
        units = completions * (load.tokens if name == "long" else 1)
        return {stage: 1e6 * seconds / units for stage, seconds in spent.items()} | {"parts": parts}


def commit(checkout: Path) -> str:
    """The short name of its commit."""
    asked = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def table(found: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    """The medians, as Markdown."""
    lines = [
        "| commit | load, us of CPU | frontend | engine core | client | parts a completion | frontend, all runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        for load, unit in (("short", "5 tokens, a completion"), ("long", "400 tokens, a token")):
            middle = {stage: statistics.median(each[load][stage] for each in runs) for stage in runs[0][load]}
            all_runs = ", ".join(f"{each[load]['frontend']:.1f}" for each in runs)
            lines.append(
                f"| `{name}` | {unit} | {middle['frontend']:.1f} | {middle['core']:.1f} | "
                f"{middle['client']:.1f} | {middle['parts']:.2f} | {all_runs} |"
            )
    return "\n".join([*lines, ""])


def measure(checkouts: Sequence[Path], *, rounds: int) -> str:
    """All runs, in turn: each generator is started once, and idle while another one is asked."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        make_model(Path(folder))
        started = {commit(checkout): CheckoutGenerator(checkout, Path(folder)) for checkout in checkouts}
        subjects = {name: running.enter_context(subject) for name, subject in started.items()}
        found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in subjects}
        for number in range(rounds):
            names = list(subjects) if number % 2 else list(reversed(subjects))
            runs: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
            for load in LOADS:
                for name in names:
                    runs[name][load] = subjects[name].measured(load)
                    print(name, load, runs[name][load], flush=True)
            for name in names:
                found[name].append(runs[name])
        return table(found)


def main() -> None:
    """Measures, or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_cost", description=__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ask", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve))
    elif arguments.ask is not None:
        print(json.dumps(asyncio.run(ask(arguments.url, LOADS[arguments.ask]))))
    else:
        checkouts = [HERE] if arguments.against is None else [arguments.against.resolve(), HERE]
        found = measure(checkouts, rounds=arguments.rounds)
        with RESULT.open("a", encoding="utf-8") as file:
            file.write(f"\n## `{commit(HERE)}`\n\n{found}")


if __name__ == "__main__":
    main()
