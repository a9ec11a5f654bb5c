"""The judgement on a server of training loops, in its first sentence, by what holds its tenants up."""

import pytest

from protocol.status import PeerStatus
from protocol.tenants import TenantsStatus
from services.diagnosis.culprits import diagnose
from services.diagnosis.tenants import judge_tenants
from services.diagnosis.verdict import RunVerdict, verdict_on
from tests.services.diagnosis.served_tenants import call, run, standing, tenant
from tests.services.diagnosis.statuses import status, well

FLOOD = tenant("alice", queued=100, refused=7)
MISSING = run("bob/2", waits_for="operation 7, which its client has not sent", since_s=80.0, queued=3)


@pytest.mark.parametrize(
    ("given", "cause", "sentence"),
    [
        (
            standing(tenant("alice", completions=12), generator_silent_s=40.0), "generators",
            "No generator has answered for 40 s, and 12 completions wait for one",
        ),
        (
            standing(tenant("alice"), at_work=call("alice", since_s=700.0, rows=1, tokens=9)), "stuck call",
            "The trainer has had alice's forward_backward of 9 tokens in 1 row in hand for 700 s",
        ),
        (
            standing(tenant("alice", queued=2), tenant("bob", queued=3), tenant("c", queued=1), at_work=call("alice")),
            "long call",
            "All wait for one call: alice's forward_backward of 65,536 tokens in 64 rows is in hand since 42 s, and "
            "2 tenants wait behind it with 4 operations",
        ),
        (
            standing(tenant("bob", queued=1), FLOOD), "flood",
            "alice floods: it has 100 of 100 operations under way, and 7 calls of its were turned away in the last "
            "minute; others have their turns meanwhile",
        ),
        (
            standing(tenant("bob", completions=50)), "flood",
            "bob floods: it has 50 of 100 completions under way; others have their turns meanwhile",
        ),
        (
            standing(tenant("bob", queued=3), runs=(MISSING,)), "missing operation",
            "bob/2 waits for operation 7, which its client has not sent for 80 s, with 3 operations behind it",
        ),
    ],
)  # fmt: skip
def test_what_holds_tenants_up_is_named_with_a_remedy(given: TenantsStatus, cause: str, sentence: str) -> None:
    found = judge_tenants(given)

    assert (found.cause, found.sentence) == (cause, sentence)
    assert found.state == ("sick" if cause in ("generators", "stuck call") else "bounded")
    assert found.remedy


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (standing(tenant("a"), clients=0), "Healthy: nobody is there"),
        (
            standing(tenant("a"), clients=0, runs=(run("a/1"), run("a/2"))),
            "Healthy: nobody is there; 2 runs of clients that left are kept",
        ),
        (standing(tenant("a"), runs=(run("a/1"),)), "Healthy: 1 client is there, with nothing under way"),
        (
            standing(
                tenant("a", queued=1), tenant("b", completions=4), clients=2,
                runs=(
                    run("a/1", tokens_per_s=900.0, queued=1), run("a/2", tokens_per_s=100.0), run("b/1", completions=4),
                ),
            ),
            "Healthy: 3 runs of 2 tenants are at work, 1,000 tokens/s are trained, 4 completions are under way",
        ),
    ],
)  # fmt: skip
def test_a_server_is_healthy_whether_it_is_used_or_not(given: TenantsStatus, sentence: str) -> None:
    assert (judge_tenants(given).state, judge_tenants(given).sentence) == ("healthy", sentence)


@pytest.mark.parametrize(
    "given",
    [
        standing(tenant("a", completions=3), generator_silent_s=14.0, runs=(run("a/1", completions=3),)),
        standing(tenant("a", queued=5), at_work=call("a")),
        standing(tenant("a", queued=1), tenant("b", queued=1), at_work=call("a", since_s=14.0)),
        standing(tenant("a", queued=49)),
        standing(tenant("a", queued=3), runs=(run("a/1", waits_for="operation 7, which", since_s=59.0),)),
    ],
)
def test_short_waits_and_a_long_call_that_nobody_waits_behind_are_no_trouble(given: TenantsStatus) -> None:
    assert judge_tenants(given).state == "healthy"


def judged(tenants: TenantsStatus, *, peers: tuple[PeerStatus, ...] = ()) -> RunVerdict:
    learner = status("learner", peers=peers).model_copy(update={"tenants": tenants})
    procs = [well(learner), well(status("generator"))]
    return verdict_on(procs, diagnose(procs))


def test_the_verdict_on_a_server_is_of_its_tenants_and_not_of_a_run() -> None:
    flood = judged(standing(FLOOD))

    assert (flood.state, flood.cause, flood.who) == ("bounded", "flood", "alice")
    assert flood.text.endswith("or change alice's bounds (keys file)")
    assert judged(standing(clients=0)).sentence == "Healthy: nobody is there"


def test_a_generator_that_nobody_has_called_for_long_is_no_culprit_of_a_server() -> None:
    quiet = PeerStatus(name="g", kind="generator", url="http://127.0.0.1:7310", last_heard_s=900.0, state="answers")

    assert judged(standing(clients=0), peers=(quiet,)).state == "healthy"
    learner = status("learner", peers=(quiet,))
    assert [each.who for each in diagnose([well(learner)]).culprits] == ["g"], "of a run it is one"
