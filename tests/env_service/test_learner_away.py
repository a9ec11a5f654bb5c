"""A learner that is away for long: finished groups wait for it, and are no more than what it had granted."""

from protocol.lease_keys import key_of
from tests.env_service.peers import eventually, lease, serving
from tests.env_service.test_connection import conversing, finished


async def test_the_outbox_of_an_absent_learner_holds_each_granted_lease_once_and_nothing_else() -> None:
    granted = [lease(number) for number in range(8)]
    async with conversing(resend_s=0.01) as talk:
        await talk.learner.welcome(serving("g0", "http://127.0.0.1:1"))
        await talk.learner.grant(*granted)
        for _ in granted:
            key = await talk.rollouts.next_started()
            (one,) = [each for each in granted if key_of(each) == key]
            await talk.rollouts.finish(finished(one))
        await eventually(lambda: len(talk.outbox) == len(granted))
        assert talk.running.report_progress() == ()
        # Granted anew by a learner that came back: nothing is rolled out twice, and nothing is kept twice.
        await talk.learner.grant(*granted, *granted)
        await eventually(lambda: len(talk.outbox) == len(granted))
        assert talk.rollouts.started.empty()
