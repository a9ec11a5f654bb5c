"""The learner's look at itself and its generators while it serves training loops."""

import logging

import pytest

from learner.reports.served_monitor import ServedMonitor
from protocol.status import Status
from protocol.tenants import TenantsStatus
from services.diagnosis.asked import Target
from tests.services.diagnosis.served_tenants import standing, tenant
from tests.services.diagnosis.statuses import status


class Changing:
    """A learner's own status, with tenants that a test sets."""

    def __init__(self) -> None:
        self.tenants: TenantsStatus = standing(clients=0)

    def __call__(self) -> Status:
        return status("learner").model_copy(update={"tenants": self.tenants})


async def test_a_verdict_holds_once_it_was_found_twice_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = Changing()
    monitor = ServedMonitor(own=own, url="http://127.0.0.1:7300", generators=())
    found = []
    for tenants in (standing(clients=0), standing(tenant("a", refused=3)), standing(tenant("a", refused=9))):
        own.tenants = tenants
        await monitor.look()
        assert monitor.verdict is not None
        found.append(monitor.verdict.cause)

    assert found == ["", "", "flood"]
    assert [each.message.split(":")[1].strip().split()[0] for each in caplog.records] == ["Healthy", "a"]


async def test_a_generator_that_does_not_answer_is_named_though_nobody_samples(unused_tcp_port: int) -> None:
    gone = Target("generator", f"http://127.0.0.1:{unused_tcp_port}")
    monitor = ServedMonitor(own=Changing(), url="http://127.0.0.1:7300", generators=(gone,))
    await monitor.look()

    assert monitor.verdict is not None
    assert monitor.verdict.state == "sick"
    assert monitor.verdict.sentence.startswith(f"generator localhost:{unused_tcp_port}: dead")
    assert [each.kind for each in monitor.procs] == ["learner", "generator"]
