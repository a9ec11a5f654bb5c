"""The fleet: its members, who is refused and why, and the versions that it serves as a whole."""

from typing import Any, cast

import pytest

from learner.weights.fleet import FleetMembers, IdleWatch, JoinRefused, TrustedUrls
from learner.weights.provenance import Standing
from protocol.fleet import Condition, Fingerprints
from protocol.generation import GeneratorState
from protocol.messages import Fleet as FleetMessage
from protocol.model import PROTOCOL_VERSION, PolicyVersion
from services.http.client import HttpClient
from tests.learner.generators import FINGERPRINTS, announcement
from tests.learner.samples import group, trajectory

URL = "http://127.0.0.1:9000"


class Changes:
    """Counts them."""

    count = 0

    def note(self) -> None:
        self.count += 1


def make_fleet(changes: Changes | None = None) -> FleetMembers:
    return FleetMembers(
        fingerprints=FINGERPRINTS,
        incarnation=3,
        announce_every_s=2.0,
        silence_s=15.0,
        changed=(changes or Changes()).note,
    )


def serve(fleet: FleetMembers, name: str, number: int) -> None:
    fleet.committed(name, version=PolicyVersion(3, number), fingerprint="f")


def test_a_generator_that_fits_is_taken_in_and_told_the_incarnation_and_the_rhythm() -> None:
    changes = Changes()
    fleet = make_fleet(changes)
    answer = fleet.announce(announcement("a", URL), now=0.0)
    assert (answer.incarnation, answer.announce_every_s) == (3, 2.0)
    assert [member.generator_id for member in fleet.members()] == ["a"]
    assert fleet.serving() == []
    fleet.announce(announcement("a", URL), now=1.0)
    assert changes.count == 1, "a repeated announcement changes nothing"


@pytest.mark.parametrize(
    ("different", "named"), [("model", "model"), ("tokenizer", "tokenizer"), ("chat_template", "chat template")]
)
def test_another_fingerprint_is_refused_and_both_are_named(different: str, named: str) -> None:
    theirs: dict[str, Any] = FINGERPRINTS.model_dump() | {different: "other"}
    ours = getattr(FINGERPRINTS, different)
    text = f"generator a has another {named}: its fingerprint is other, the learner's is {ours}. Start both"
    with pytest.raises(JoinRefused, match=text):
        make_fleet().announce(announcement("a", URL, fingerprints=Fingerprints(**theirs)), now=0.0)


def test_another_protocol_version_is_refused_and_both_are_named() -> None:
    with pytest.raises(JoinRefused, match=f"speaks protocol version 99, the learner {PROTOCOL_VERSION}"):
        make_fleet().announce(announcement("a", URL, protocol_version=99), now=0.0)


def test_an_expelled_process_stays_out_and_its_next_start_may_try_again() -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL), now=0.0)
    instance = fleet.members()[0].instance
    fleet.expel("a", reason="it lies")
    assert fleet.expelled("a", instance) == "it lies"
    assert fleet.members() == []
    with pytest.raises(JoinRefused, match=r"generator a was expelled: it lies\. Restart it") as refusal:
        fleet.announce(announcement("a", URL), now=1.0)
    assert refusal.value.kind == "expelled"
    fleet.announce(announcement("a", URL, instance="2"), now=1.0)
    assert fleet.expelled("a", "2") is None
    assert [member.generator_id for member in fleet.members()] == ["a"]


def test_what_a_quarantined_process_sampled_is_given_back_and_it_stays_out() -> None:
    changes = Changes()
    fleet = make_fleet(changes)
    for name, instance in (("a", "1"), ("b", "2")):
        fleet.announce(announcement(name, URL, instance=instance), now=0.0)
        serve(fleet, name, 5)
    of_it, of_another = group(0, trajectory(5, instance="a-1")), group(1, trajectory(5, instance="b-2"))
    assert fleet.provenance.standing(of_it) is Standing.PROVEN
    before = changes.count

    fleet.quarantine("a", "a-1", reason="it samples otherwise than it says")

    assert changes.count > before
    assert [member.generator_id for member in fleet.members()] == ["b"]
    assert fleet.provenance.recalled([of_it, of_another]) == [of_it]
    assert fleet.provenance.standing(of_it) is Standing.UNPROVEN
    with pytest.raises(JoinRefused, match="it samples otherwise than it says"):
        fleet.announce(announcement("a", URL, instance="1"), now=1.0)


def test_a_quarantined_process_that_is_away_just_now_is_not_taken_back() -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL), now=0.0)
    serve(fleet, "a", 5)
    fleet.lost("a")
    fleet.quarantine("a", "a-1", reason="it samples otherwise than it says")
    with pytest.raises(JoinRefused, match="it samples otherwise than it says"):
        fleet.announce(announcement("a", URL), now=1.0)
    assert fleet.expelled("a", "a-1") == "it samples otherwise than it says"
    fleet.announce(announcement("a", URL, instance="2"), now=2.0)
    assert [member.instance for member in fleet.members()] == ["a-2"], "it was restarted"


def test_a_later_process_takes_the_id_at_once_and_the_earlier_one_is_told_so() -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL), now=0.0)
    serve(fleet, "a", 5)
    fleet.announce(announcement("a", URL, instance="2"), now=0.1)
    assert fleet.served is None
    with pytest.raises(JoinRefused, match="a process that started later announces itself under this id") as refusal:
        fleet.announce(announcement("a", URL, serving_version="3.5"), now=0.2)
    assert refusal.value.kind == "superseded"


@pytest.mark.parametrize("condition", ["able", "leaving"])
def test_a_late_announcement_of_a_predecessor_does_not_supersede_the_living_one(condition: Condition) -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL, instance="new", started_at=200.0), now=0.0)
    serve(fleet, "a", 5)
    late = announcement("a", URL, instance="old", started_at=100.0, condition=condition)
    with pytest.raises(JoinRefused, match="a process that started later announces itself under this id") as refusal:
        fleet.announce(late, now=1.0)
    assert refusal.value.kind == "superseded"
    fleet.announce(announcement("a", URL, instance="new", started_at=200.0, serving_version="3.5"), now=2.0)
    assert [(member.instance, fleet.served) for member in fleet.members()] == [("a-new", 5)]


def test_where_the_later_one_is_not_heard_of_any_more_clocks_that_differ_keep_nobody_out() -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL, instance="old", started_at=200.0), now=0.0)
    fleet.announce(announcement("a", URL, instance="new", started_at=100.0), now=10.0)
    assert [member.instance for member in fleet.members()] == ["a-new"]


@pytest.mark.parametrize("condition", ["leaving", "stalled"])
def test_a_generator_that_leaves_or_stalls_serves_nothing_from_then_on(condition: Condition) -> None:
    changes = Changes()
    fleet = make_fleet(changes)
    fleet.announce(announcement("a", URL), now=0.0)
    serve(fleet, "a", 5)
    before = changes.count
    fleet.announce(announcement("a", URL, condition=condition), now=1.0)
    assert fleet.serving() == []
    assert [member.able for member in fleet.members()] == [False]
    fleet.announce(announcement("a", URL, condition=condition), now=2.0)
    assert changes.count == before + 1
    fleet.announce(announcement("a", URL, serving_version="3.5"), now=3.0)
    assert [member.able for member in fleet.members()] == [True]
    assert fleet.serving() == [], "what it holds has to prove itself"
    assert changes.count == before + 2


def test_a_suspended_generator_serves_nothing_and_stays() -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL), now=0.0)
    serve(fleet, "a", 5)
    (member,) = fleet.members()
    fleet.suspend(member)
    assert fleet.served is None
    assert fleet.holds(member)


def test_a_lost_generator_may_come_back_and_serves_nothing_until_it_has_committed() -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL), now=0.0)
    serve(fleet, "a", 4)
    fleet.lost("a")
    assert fleet.served is None
    fleet.announce(announcement("a", URL, serving_version="3.4"), now=1.0)
    assert fleet.serving() == []


def test_a_silent_generator_leaves() -> None:
    changes = Changes()
    fleet = make_fleet(changes)
    fleet.announce(announcement("a", URL), now=0.0)
    fleet.announce(announcement("b", URL), now=10.0)
    before = changes.count
    assert fleet.expire(now=15.0) == []
    assert fleet.expire(now=15.5) == ["a"]
    assert [member.generator_id for member in fleet.members()] == ["b"]
    assert changes.count == before + 1


def test_silence_while_the_learner_itself_stood_still_is_nobodys_fault() -> None:
    fleet = make_fleet(Changes())
    fleet.announce(announcement("a", URL), now=0.0)
    fleet.stood_still(60.0)
    assert fleet.expire(now=70.0) == []
    assert fleet.expire(now=75.5) == ["a"]


def test_the_fleet_serves_the_oldest_version_of_those_that_serve() -> None:
    fleet = make_fleet()
    for name in ("a", "b", "c"):
        fleet.announce(announcement(name, URL), now=0.0)
    assert fleet.served is None
    serve(fleet, "a", 5)
    assert fleet.served == 5, "one that serves nothing yet does not count"
    serve(fleet, "b", 3)
    assert fleet.served == 3
    fleet.lost("b")
    assert fleet.served == 5
    assert [(one.generator_id, one.policy_version) for one in fleet.serving()] == [("a", "3.5")]


def test_a_generator_that_was_started_afresh_serves_nothing() -> None:
    changes = Changes()
    fleet = make_fleet(changes)
    fleet.announce(announcement("a", URL), now=0.0)
    serve(fleet, "a", 5)
    before = changes.count
    fleet.announce(announcement("a", URL, serving_version="3.5"), now=1.0)
    assert fleet.served == 5
    assert changes.count == before
    fleet.announce(announcement("a", URL), now=2.0)
    assert fleet.served is None
    assert changes.count == before + 1


def test_a_generator_at_another_address_is_another_process() -> None:
    fleet = make_fleet()
    fleet.announce(announcement("a", URL), now=0.0)
    serve(fleet, "a", 5)
    fleet.announce(announcement("a", "http://127.0.0.1:9001/", serving_version="3.5"), now=1.0)
    assert fleet.served is None
    assert [member.url for member in fleet.members()] == ["http://127.0.0.1:9001"]


def test_a_commit_of_one_that_has_left_changes_nothing() -> None:
    changes = Changes()
    fleet = make_fleet(changes)
    serve(fleet, "a", 5)
    assert fleet.served is None
    assert changes.count == 0


def test_a_fleet_that_is_full_refuses_the_next_generator_and_keeps_those_it_has() -> None:
    fleet = make_fleet()
    for number in range(4096):
        fleet.announce(announcement(f"g{number}", URL), now=0.0)
        serve(fleet, f"g{number}", 1)
    with pytest.raises(JoinRefused, match="has 4096 generators, and a learner takes at most 4096") as caught:
        fleet.announce(announcement("one-more", URL), now=1.0)
    assert caught.value.kind == "fleet_full"
    assert len(FleetMessage(generators=tuple(fleet.serving())).generators) == 4096


@pytest.mark.parametrize(
    ("url", "is_trusted"),
    [
        ("http://127.0.0.1:7310", True),
        ("https://[::1]:7310", True),
        ("http://gpu-7.cluster.example:7310", True),
        ("http://10.1.2.3:7310", True),
        ("http://11.1.2.3:7310", False),
        ("http://cluster.example.evil.test:7310", False),
        ("https://evil.test:7310", False),
        ("http://10.0.0.1@evil.test:7310", False),
        ("ftp://10.1.2.3", False),
        ("http://", False),
        ("http://10.1.2.3:99999", False),
    ],
)
def test_weights_and_prompts_go_to_listed_hosts_only(url: str, is_trusted: bool) -> None:
    trusted = TrustedUrls(hosts=("*.cluster.example", "10.0.0.0/8"))
    assert (trusted.fault(url) is None) == is_trusted


def test_who_must_show_a_certificate_of_our_ca_needs_no_entry() -> None:
    trusted = TrustedUrls(by_certificate=True)
    assert trusted.fault("https://gpu.example:7310") is None
    assert trusted.fault("http://gpu.example:7310") is not None


def test_a_generator_at_an_address_that_is_not_trusted_is_refused_and_told_what_to_do() -> None:
    fleet = make_fleet()
    fleet.url_fault = TrustedUrls().fault
    with pytest.raises(JoinRefused, match=r"add gpu.example to weights.generator_hosts, or give both sides") as caught:
        fleet.announce(announcement("a", "http://gpu.example:7310"), now=0.0)
    assert caught.value.kind == "untrusted_url"
    assert fleet.members() == []


class AskedClient:
    """In the place of an HTTP client: each generator has been idle for half of the seconds that have passed."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    async def get(self, url: str, response: type[GeneratorState], *, deadline_s: float) -> GeneratorState:
        return GeneratorState(
            generator_id="g",
            serving=True,
            policy_version="3.0",
            running=1,
            tokens_generated=int(10 * self.passed_s),
            idle_s=self.passed_s / 2,
            uptime_s=self.passed_s,
        )


@pytest.mark.parametrize(("count", "pause_s"), [(3, 5.0), (250, 5.0), (1000, 20.0)])
async def test_many_generators_are_asked_more_seldom_and_nothing_of_what_they_count_is_lost(
    count: int, pause_s: float
) -> None:
    fleet, client = make_fleet(), AskedClient()
    for number in range(count):
        fleet.announce(announcement(f"g{number}", URL), now=0.0)
        serve(fleet, f"g{number}", 0)
    watch = IdleWatch(fleet=fleet, client=cast(HttpClient, client))
    await watch.begin()
    assert watch.pause_s == pause_s
    client.passed_s = 40.0
    await watch.end()
    assert watch.share == 0.5
    assert watch.rates["g0"] == {"tokens_per_s": 10.0, "idle_share": 0.5, "running": 1}
