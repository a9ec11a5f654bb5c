import pytest

from learner.tenants.futures import RequestReused, ResultFutures


def test_a_retry_gets_the_same_future() -> None:
    futures = ResultFutures()
    first, new = futures.open("m:1", owner="a", digest="x", kind="optim_step")
    again, newer = futures.open("m:1", owner="a", digest="x", kind="optim_step")
    assert first is again
    assert (new, newer) == (True, False)


@pytest.mark.parametrize(("kind", "complaint"), [("optim_step", "another content"), ("save_weights", "needs the next")])
def test_another_request_under_the_same_number_is_named(kind: str, complaint: str) -> None:
    futures = ResultFutures()
    futures.open("m:1", owner="a", digest="x", kind="optim_step")
    with pytest.raises(RequestReused, match=rf"m:1 was .*{complaint}"):
        futures.open("m:1", owner="a", digest="y", kind=kind)


def test_a_result_stays_until_it_was_retrieved_and_a_while_after() -> None:
    now = 0.0
    futures = ResultFutures(clock=lambda: now)
    future, _ = futures.open("m:1", owner="a", digest="x", kind="optim_step")
    future.finish({"metrics": {}})
    now = 1e6
    futures.sweep()
    assert futures.get("m:1", owner="a") is future
    futures.retrieved(future)
    now += 500
    futures.sweep()
    assert futures.get("m:1", owner="a") is future
    now += 500
    futures.sweep()
    assert futures.get("m:1", owner="a") is None


def test_results_of_sessions_whose_clients_will_not_come_again_are_dropped() -> None:
    futures = ResultFutures()
    for name in ("s:train:0:1", "s:sample:0:1", "s:train:0:2", "s2:train:0:1"):
        futures.open(name, owner="a", digest="x", kind="optim_step")[0].finish({})
    futures.open("s:train:0:3", owner="a", digest="x", kind="optim_step")
    futures.forget_results({"s"})
    assert len(futures) == 2
    assert futures.get("s:train:0:3", owner="a") is not None
    assert futures.get("s2:train:0:1", owner="a") is not None


def test_a_future_is_its_owners_alone_and_is_set_once() -> None:
    futures = ResultFutures()
    future, _ = futures.open("m:1", owner="a", digest="x", kind="optim_step")
    future.finish(b"first")
    future.finish(b"second")
    assert future.payload == b"first"
    assert futures.get("m:1", owner="b") is None
