"""The generator's Prometheus metrics."""

from generator.engine.engine import Engine
from protocol.fleet import Committed
from protocol.generation import GeneratePart
from services.http.metrics import Metrics


class Measures:
    """Counters of tokens and completions, gauges of load, and the newest weight sync."""

    def __init__(self, metrics: Metrics, *, engine: Engine) -> None:
        self._tokens = metrics.counter("generated_tokens", "Tokens handed out.")
        self._finished = metrics.counter("completions", "Completions finished, by reason.", labels=("finish_reason",))
        self._scored = metrics.counter("scored_tokens", "Tokens given by others whose logprobs were handed out.")
        self._commits = metrics.counter("commits", "Versions committed.")
        self._failures = metrics.counter(
            "sync_failures", "Steps of a weight sync that failed, by step.", labels=("step",)
        )
        self._version = metrics.gauge("policy_version", "Number of the policy version served; -1 before the first.")
        self._pause = metrics.gauge("commit_pause_seconds", "Pause of the newest commit.")
        self._load = metrics.gauge("commit_load_seconds", "Loading time of the newest commit.")
        self._version.set(-1)
        running = metrics.gauge("running_requests", "Completions being sampled.")
        running.set_function(lambda: engine.counters().running)
        waiting = metrics.gauge("waiting_requests", "Completions that have no token yet.")
        waiting.set_function(lambda: engine.counters().waiting)
        idle = metrics.gauge("idle_seconds", "Time without any request since the start.")
        idle.set_function(lambda: engine.counters().idle_s)

    def part(self, part: GeneratePart) -> None:
        """Notes tokens handed out."""
        self._tokens.inc(len(part.token_ids))
        if part.finish_reason is not None:
            self._finished.labels(finish_reason=part.finish_reason).inc()

    def scored(self, tokens: int) -> None:
        """Notes tokens of others whose logprobs were handed out."""
        self._scored.inc(tokens)

    def committed(self, committed: Committed, *, number: int) -> None:
        """Notes a commit."""
        self._commits.inc()
        self._version.set(number)
        self._pause.set(committed.pause_s)
        self._load.set(committed.load_s)

    def sync_failed(self, step: str) -> None:
        """Notes a weight sync that failed at `step`."""
        self._failures.labels(step=step).inc()
