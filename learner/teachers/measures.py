"""The Prometheus metrics of teachers, in the learner's registry."""

from services.metrics import Metrics


class TeacherMeasures:
    """Tokens that teachers have scored, requests that came to nothing, and how long steps waited for either."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.counter("teacher_tokens", "Tokens scored by a teacher.", labels=("teacher",))
        self._failures = metrics.counter(
            "teacher_failures", "Requests to a teacher that came to nothing.", labels=("teacher", "endpoint")
        )
        self._waited = metrics.counter(
            "teacher_wait_seconds", "Time that steps waited for a teacher's logprobs.", labels=("teacher",)
        )

    def scored(self, teacher: str, tokens: int) -> None:
        """Notes an answer."""
        self._tokens.labels(teacher=teacher).inc(tokens)

    def failed(self, teacher: str, endpoint: str) -> None:
        """Notes a request without a usable answer."""
        self._failures.labels(teacher=teacher, endpoint=endpoint).inc()

    def waited(self, teacher: str, seconds: float) -> None:
        """Notes a wait of a step."""
        self._waited.labels(teacher=teacher).inc(seconds)
