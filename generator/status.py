"""A generator's part of `GET /v1/status`."""

from generator.serving import Serving
from protocol.status import PeerStatus, ProgressStatus, QueueStatus, Report
from services.http.client import HttpClient
from services.http.status import peers_at


class GeneratorStatus:
    """`serving` is set once the engine is up."""

    def __init__(self, *, name: str, learner: str | None, client: HttpClient, most_requests: int) -> None:
        self._name = name
        self._learner = learner
        self._client = client
        self._most_requests = most_requests
        self.serving: Serving | None = None

    def report(self) -> Report:
        """The generator's part of its status."""
        if self.serving is None:
            return Report(id=self._name, peers=self._peers())
        state = self.serving.state()
        return Report(
            id=self._name,
            policy_version=state.policy_version,
            progress=ProgressStatus(unit="tokens", done=state.tokens_generated),
            peers=self._peers(),
            queues=(QueueStatus(name="requests", depth=state.running, limit=self._most_requests),),
            problems=() if self.serving.engine_is_alive else ("the engine's process has died: restart this generator",),
        )

    def _peers(self) -> tuple[PeerStatus, ...]:
        urls = () if self._learner is None else (self._learner,)
        return peers_at(urls, self._client.contacts(), kind="learner")
