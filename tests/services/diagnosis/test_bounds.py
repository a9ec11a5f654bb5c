"""The bottleneck of a run, from the loads of its processes."""

import pytest

from protocol.status import GpuStatus, LoadStatus, QueueStatus, Status, UsageStatus
from services.diagnosis.bounds import Bottleneck, bottleneck_of, shares_full_cores
from tests.services.diagnosis.statuses import load, status

GPU = GpuStatus(index=0, busy_share=0.5, memory_bytes=1, total_bytes=2)
BUSY = load(busy=0.95, per_s=900, running=40, limit=64)


def bottleneck(
    learner: LoadStatus,
    *generators: LoadStatus,
    env: LoadStatus | None = None,
    rewards: Status | None = None,
) -> Bottleneck | None:
    found = [status("generator", name=f"g-{number}", load=one) for number, one in enumerate(generators)]
    env = env or load(running=8, limit=64)
    given = [
        status("learner", load=learner),
        *found,
        status("env-service", load=env),
        rewards or status("reward-service"),
    ]
    return bottleneck_of(given)


def cause(learner: LoadStatus, *generators: LoadStatus, env: LoadStatus | None = None) -> str:
    found = bottleneck(learner, *generators, env=env)
    return "" if found is None else found.cause


@pytest.mark.parametrize(
    ("learner_busy", "generators_busy"), [(0.64, 0.9), (0.96, 0.5), (0.85, 0.4), (0.55, 0.6), (0.35, 0.95)]
)
def test_a_run_whose_sides_are_about_even_has_none(learner_busy: float, generators_busy: float) -> None:
    generator = load(busy=generators_busy, per_s=900, running=20, limit=256)

    assert bottleneck(load(busy=learner_busy), generator, env=load(running=20, limit=32)) is None


def test_without_the_learner_nothing_is_said_of_its_waits() -> None:
    assert bottleneck_of([status("generator", load=load(busy=0.1)), status("env-service", load=load())]) is None


def test_a_full_env_service_beside_a_generator_that_is_nearly_empty() -> None:
    found = bottleneck(load(busy=0.2), load(busy=0.9, running=2, limit=64), env=load(running=2, limit=2))

    assert found is not None
    assert found.what == ("Sampling bounds: env-service.capacity 2 is full while the generator runs 2 of 64 sequences")
    assert found.remedy == "raise env-service.capacity, to 48 say"


def test_an_env_service_whose_groups_are_over_at_once_is_full_by_the_learners_account() -> None:
    env, generator = load(running=1.2, limit=2), load(busy=0.7, running=4, limit=256)

    assert cause(load(busy=0.25, capacity=0.9), generator, env=env) == "capacity"
    assert cause(load(busy=0.25, capacity=0.3), generator, env=env) == "split"


def test_the_first_seconds_of_a_run_say_nothing() -> None:
    begun = load(busy=0.1).model_copy(update={"over_s": 5.0})

    assert cause(begun, load(busy=0.9, running=2, limit=64), env=load(running=2, limit=2)) == ""


def test_groups_that_wait_for_rewards_name_the_work_of_the_reward_service() -> None:
    queues = (QueueStatus(name="items", depth=36, limit=100), QueueStatus(name="busy workers", depth=2, limit=16))
    rewards = status("reward-service", load=load(per_s=0.5, running=1.5), queues=queues)
    env = load(per_s=0.2, running=9, limit=32, rewards=8.6)

    found = bottleneck(load(busy=0.1, per_s=0), load(busy=0.0, running=0, limit=64), env=env, rewards=rewards)

    assert found is not None
    assert found.what == (
        "Rewards bound: 9 of 9 running groups wait for rewards; one takes 3 s, 36 completions are to be judged, "
        "2 workers are busy"
    )
    assert "reward-service.workers.count" in found.remedy


def test_rewards_that_hold_up_the_evaluation_before_the_first_step_are_found_as_well() -> None:
    learner = load(busy=1.0, per_s=0, evaluation=1.0)

    assert cause(learner, load(busy=0.1, running=1, limit=64), env=load(running=9, limit=32, rewards=9)) == "rewards"


def test_a_short_wait_for_rewards_bounds_nothing_though_little_else_is_waited_for() -> None:
    env = load(per_s=30, running=1, limit=2, rewards=0.8)

    assert cause(load(busy=0.3), load(busy=0.3, running=1, limit=64), env=env) == ""


def test_groups_that_wait_for_their_environment() -> None:
    env = load(running=10, limit=32, environment=7.0, host=2.0)

    assert cause(load(busy=0.1), load(busy=0.1, running=1, limit=64), env=env) == "environment"


def test_requests_that_wait_for_a_place_in_full_generators() -> None:
    found = bottleneck(load(busy=0.3), load(running=94, limit=64))

    assert found is not None
    assert found.what == "Sampling bounds: the generator runs 64 of 64 sequences, and 30 more wait"
    assert found.remedy.startswith("raise generator.engine.max_num_seqs")


def test_a_lag_bound_that_lets_no_group_begin() -> None:
    found = bottleneck(load(busy=0.4, max_lag=0.6), load(busy=0.5, running=20, limit=64))

    assert found is not None
    assert (found.cause, found.remedy) == ("max_lag", "raise learner.max_lag")
    assert cause(load(busy=0.4, max_lag=0.6), load(busy=0.95, running=20, limit=64)) != "max_lag"


def test_generators_that_work_all_the_time_while_the_learner_waits_are_to_be_more_whole_ones() -> None:
    found = bottleneck(load(busy=0.25), BUSY, BUSY)

    assert found is not None
    assert found.what == "Sampling bounds: the learner waits 75% of the time, and 2 generators run 80 of 128 sequences"
    assert found.remedy == "add generators, up to 8 in all, or take faster ones"


def test_a_learner_that_never_waits_beside_idle_generators() -> None:
    idle = load(busy=0.1, running=1, limit=64)

    found = bottleneck(load(busy=0.99), *[idle] * 4)

    assert found is not None
    assert found.what == "Training bounds: the learner trains 99% of the time, generators are idle 90%"
    assert found.remedy.endswith("or take 1 instead of 4 generators")
    assert cause(load(busy=0.99, evaluation=1.0), idle) == "", "it does not train while it waits for an evaluation"


IDLE_60 = load(busy=0.4, per_s=900, running=4, limit=64)


@pytest.mark.parametrize(
    ("cores", "usable", "gpus", "host", "found"),
    [
        ((1.0, 0.45, 0.3, 0.05), 2.0, (), "here", ""),
        ((1.0, 0.4, 0.2, 0.05), 2.0, (), "here", "training"),
        ((1.0, 0.45, 0.3, 0.05), 8.0, (), "here", "training"),
        ((1.0, 0.45, 0.3, 0.05), 2.0, (GPU,), "here", "training"),
        ((1.0, 0.45, 0.3, 0.05), 2.0, (), "elsewhere", "training"),
        ((1.0, 0.45, 0.3, 0.05), None, (), "here", "training"),
    ],
)
def test_idle_generators_leave_their_cores_to_the_learner_only_where_both_share_them(
    cores: tuple[float, ...], usable: float | None, gpus: tuple[GpuStatus, ...], host: str, found: str
) -> None:
    """Of two cores 1.8 at work are all, 1.65 are not. GPUs, and other machines, are idle for nobody's good."""
    used = [UsageStatus(cores=each, usable_cores=usable, memory_bytes=1, gpus=gpus) for each in cores]
    given = [
        status("learner", load=load(busy=0.97), usage=used[0]),
        status("generator", load=IDLE_60, usage=used[1], host=host),
        status("env-service", load=load(running=8, limit=64), usage=used[2]),
        status("reward-service", usage=used[3]),
    ]
    said = bottleneck_of(given)
    assert ("" if said is None else said.cause) == found
    assert shares_full_cores(given) is (found == "")


@pytest.mark.parametrize("share", [None, 0.6])
def test_generators_that_are_idle_within_a_part_of_a_long_step_are_not_idle(share: float | None) -> None:
    """In the few seconds of a load they may be done with what the next step will take."""
    idle = load(busy=0.0, running=0, limit=64).model_copy(update={"long_busy_share": share})

    assert cause(load(busy=1.0, per_s=0), idle) == ""
    assert cause(load(busy=1.0, per_s=0), load(busy=0.1, running=0, limit=64)) == "training"


def test_a_slow_generator_is_found_also_where_none_works_all_the_time() -> None:
    """As measured with three generators of which one ran for a twentieth of the time."""
    others = load(busy=0.31, per_s=185, running=9, limit=85), load(busy=0.28, per_s=200, running=5, limit=85)

    found = bottleneck(load(busy=0.66), others[0], load(busy=0.69, per_s=98, running=22, limit=85), others[1])

    assert found is not None
    assert (found.cause, found.who) == ("slow generator", "g-1")


def test_a_generator_that_takes_longer_for_a_token_with_as_much_to_do_is_slow() -> None:
    slow = load(busy=1.0, per_s=60, running=42, limit=64)

    found = bottleneck(load(busy=0.8), BUSY, slow, BUSY)

    assert found is not None
    assert (found.cause, found.who) == ("slow generator", "g-1")
    assert found.what == "Generator g-1 is slow: 60 tokens/s for 42 sequences, while the 2 others do 900 for 40"


@pytest.mark.parametrize(
    "other",
    [
        load(busy=1.0, per_s=60, running=2, limit=64),
        load(busy=1.0, per_s=0, running=0, limit=64),
        load(busy=1.0, per_s=500, running=42, limit=64),
        load(busy=1.0, per_s=880, running=120, limit=128),
    ],
)
def test_a_generator_that_had_less_to_do_is_not_slow(other: LoadStatus) -> None:
    assert bottleneck(load(busy=0.8), BUSY, other, BUSY) is None
