"""What an env_service says about itself at `GET /v1/status`."""

from env_service.connection import LearnerLink
from env_service.leases import Outbox, RunningLeases
from env_service.rollouts.generation import GeneratorFleet
from protocol.messages import ServingGenerator
from protocol.status import PeerStatus, QueueStatus, Report
from services.http.client import HttpClient
from services.http.status import peers_at
from services.rewards.client import RewardClient


class EnvServiceStatus:
    """Reads the conversation with the learner, the fleet, and how calls went. `learner` is its ZeroMQ address."""

    def __init__(
        self,
        *,
        name: str,
        learner: str,
        link: LearnerLink,
        outbox: Outbox,
        running: RunningLeases,
        capacity: int,
        fleet: GeneratorFleet,
        generators: HttpClient,
        rewards: RewardClient,
    ) -> None:
        self._name = name
        self._learner = learner
        self._link = link
        self._outbox = outbox
        self._running = running
        self._capacity = capacity
        self._fleet = fleet
        self._generators = generators
        self._rewards = rewards

    def report(self) -> Report:
        """The env_service's part of its status."""
        return Report(
            id=self._name,
            peers=(
                self._learner_peer(),
                *map(self._generator, self._fleet.serving),
                *peers_at(self._rewards.urls, self._rewards.contacts(), kind="reward-service"),
            ),
            queues=(
                QueueStatus(name="running leases", depth=len(self._running.report_progress()), limit=self._capacity),
                QueueStatus(name="unacknowledged groups", depth=len(self._outbox)),
            ),
        )

    def _learner_peer(self) -> PeerStatus:
        return PeerStatus(
            name=self._learner,
            kind="learner",
            last_heard_s=self._link.silence_s,
            state=self._learner_state(),
        )

    def _learner_state(self) -> str:
        if self._link.welcomed:
            return "has welcomed this process"
        return f"refuses this process: {self._link.refusal}" if self._link.refusal else "has not answered a hello"

    def _generator(self, generator: ServingGenerator) -> PeerStatus:
        (peer,) = peers_at((generator.url,), self._generators.contacts(), kind="generator")
        outstanding = self._fleet.outstanding.get(generator.generator_id, 0)
        return peer.model_copy(
            update={
                "name": generator.generator_id,
                "serving_version": generator.policy_version,
                "state": f"{peer.state}, {outstanding} completions outstanding",
            }
        )
