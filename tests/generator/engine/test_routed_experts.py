"""A worker's rows by hand: of prompts that lie in the cache, of what is computed again, in parts one after another."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protocol.generation import Sampling
from services.http.client import HttpClient
from tests.generator.engine.test_packing import as_a_generator

with as_a_generator():
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from generator.engine import answers
    from generator.engine.routed_experts import RoutedRows, UntoldRows
    from generator.weights import routing_capture
    from generator.weights.routing_capture import ASKED, NotCaptured, RoutingCapture

BLOCK = 4


class ScriptedRunner:
    """Stands for vLLM's model runner, with a layer of experts: a token of id t goes to the experts t and t + 1."""

    def __init__(self, *, experts: int = 256, eager: bool = True, groups: int = 1) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        model = SimpleNamespace(
            get_total_num_hidden_layers=lambda: 1, get_num_experts=lambda: experts,
            get_num_experts_per_tok=lambda: 2, enforce_eager=eager,
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(
            model_config=model, scheduler_config=SimpleNamespace(max_num_batched_tokens=32)
        )
        self.kv_cache_config = SimpleNamespace(
            num_blocks=8, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups
        )
        self.model = None
        table = SimpleNamespace(block_size=BLOCK, block_table=SimpleNamespace(np=np.zeros((4, 8), dtype=np.int32)))
        self.input_batch = SimpleNamespace(
            req_ids=[], num_computed_tokens_cpu=np.zeros(4, dtype=np.int32), block_table=[table]
        )
        self.requests: dict[str, Any] = {}
        self.capture: Any = None
        self.computed: list[int] = []

    def execute_model(self, step: Any) -> None:
        self.capture(0, torch.tensor([[each + 1, each] for each in self.computed], dtype=torch.int32))

    def sample_tokens(self, _: object) -> Any:
        return SimpleNamespace(aux_output_connector_output=None)

    def step(self, *requests: tuple[str, int, list[int], list[int]], finished: tuple[str, ...] = ()) -> dict[str, Any]:
        """A step of requests, each with how many of its tokens are computed, its blocks, and the ids of those that are
        computed now. The first expert of each row that is told.
        """
        batch = self.input_batch
        batch.req_ids = [name for name, *_ in requests]
        self.computed = [each for *_, ids in requests for each in ids]
        for row, (_, computed, blocks, _) in enumerate(requests):
            batch.num_computed_tokens_cpu[row] = computed
            batch.block_table[0].block_table.np[row, : len(blocks)] = blocks
        self.execute_model(
            SimpleNamespace(
                finished_req_ids=set(finished), total_num_scheduled_tokens=len(self.computed),
                num_scheduled_tokens={name: len(ids) for name, _, _, ids in requests},
            )
        )  # fmt: skip
        told = self.sample_tokens(None).aux_output_connector_output or {}
        return {name: rows[:, 0].min(axis=1).tolist() for name, rows in told.items()}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ScriptedRunner:
    made = ScriptedRunner()
    hooked(made, monkeypatch)
    return made


def hooked(runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(_: object, capture: RoutingCapture) -> None:
        runner.capture = capture.capture

    monkeypatch.setattr(routing_capture, "bind_routed_experts_capturer", bind)
    asked = SimpleNamespace(sampling_params=SamplingParams(extra_args=dict(ASKED)))
    runner.requests = {"a": asked, "b": asked, "c": SimpleNamespace(sampling_params=SamplingParams())}
    RoutingCapture(runner)


def test_a_prompt_in_one_step_or_in_pieces_then_token_by_token(runner: ScriptedRunner) -> None:
    assert runner.step(("a", 0, [1, 2], [10, 11, 12, 13, 14])) == {"a": [10, 11, 12, 13, 14]}
    assert runner.step(("b", 0, [3], [20, 21]), ("a", 5, [1, 2], [15])) == {"b": [20, 21], "a": [15]}
    assert runner.step(("a", 6, [1, 2], [16]), ("b", 2, [3], [22])) == {"a": [16], "b": [22]}


def test_a_prompt_in_the_cache_has_the_rows_of_who_computed_it(runner: ScriptedRunner) -> None:
    """Computed by one that did not ask, in an earlier step, or in the same one."""
    runner.step(("c", 0, [5], [10, 11, 12, 13]))
    assert runner.step(("a", 4, [5, 6], [14])) == {"a": [10, 11, 12, 13, 14]}
    found = runner.step(("b", 4, [7, 6], [24]), ("c", 0, [7], [20, 21, 22, 23]))
    assert found == {"b": [20, 21, 22, 23, 24]}


def test_what_is_computed_again_is_told_once(runner: ScriptedRunner) -> None:
    """Preempted behind six tokens, and computed again with other weights in other blocks."""
    runner.step(("a", 0, [1, 2], [10, 11, 12, 13, 14]))
    runner.step(("a", 5, [1, 2], [15]))
    assert runner.step(("a", 0, [3, 4], [60, 61, 62, 63])) == {}
    assert runner.step(("a", 4, [3, 4], [64, 65, 66])) == {"a": [66]}


def test_a_name_that_has_ended_may_come_again(runner: ScriptedRunner) -> None:
    runner.step(("a", 0, [1], [10, 11]))
    runner.step(("b", 0, [2], [20]), finished=("a",))
    assert runner.step(("a", 0, [1], [30, 31])) == {"a": [30, 31]}


def test_numbers_above_255_are_of_two_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ScriptedRunner(experts=512)
    hooked(runner, monkeypatch)
    assert runner.step(("a", 0, [1], [300, 510])) == {"a": [300, 510]}


def test_a_layer_that_routes_fewer_tokens_ends_the_telling(
    runner: ScriptedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the workers of a model have parts of the tokens each."""
    capture, runner.capture = runner.capture, lambda layer, ids: capture(layer, ids[:1])
    assert runner.step(("a", 0, [1], [10, 11])) == {}
    assert "told no more" in caplog.text
    runner.capture = capture
    assert runner.step(("a", 2, [1], [12])) == {}


@pytest.mark.parametrize(
    ("changes", "complaint"), [({"eager": False}, "enforce_eager is false"), ({"groups": 0}, "no layer keeps the keys")]
)
def test_an_engine_that_cannot_says_why(
    changes: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotCaptured, match=complaint):
        hooked(ScriptedRunner(**changes), monkeypatch)


def rows(*first: int) -> Any:
    return np.array([[[each, each + 1]] for each in first], dtype=np.uint8)


def output(name: str, *, ended: bool = False, routed: Any = None) -> Any:
    return SimpleNamespace(request_id=name, routed_experts=routed, finish_reason="stop" if ended else None)


def test_rows_wait_for_the_output_that_is_sent_and_no_longer_than_their_request() -> None:
    waiting = RoutedRows()
    waiting.added(SimpleNamespace(request_id="a", sampling_params=SamplingParams(extra_args=dict(ASKED))))
    waiting.added(SimpleNamespace(request_id="c", sampling_params=SamplingParams()))
    waiting.note({"a": rows(1, 2), "c": rows(9)})
    waiting.note({"a": rows(3)})
    sent = [output("c"), output("a")]
    waiting.attach(sent)
    assert sent[0].routed_experts is None
    assert sent[1].routed_experts.tolist() == rows(1, 2, 3).tolist()
    theirs = [output("a", routed=rows(4), ended=True)]
    waiting.take_off(theirs)
    assert [each.routed_experts for each in theirs] == [None]
    waiting.attach(theirs)
    assert theirs[0].routed_experts.tolist() == rows(4).tolist()
    assert len(waiting) == 0


def test_a_part_tells_those_before_its_last_token() -> None:
    """A prompt of three: with two tokens there are four rows, and what has come for a later part waits for it."""
    untold = UntoldRows(3)
    assert untold.take([]) is None
    untold.add(rows(0, 1, 2, 3))
    untold.add(rows(4, 5))
    for tokens, start, told in (([50, 51], 0, [0, 1, 2, 3]), ([52], 4, [4]), ([53], 5, [5])):
        found = untold.take(tokens)
        assert found is not None
        assert (found[0], found[1][:, 0, 0].tolist()) == (start, told)
    assert untold.take([54]) is None


def completion_of(untold: UntoldRows, *token_ids: int) -> Any:
    return SimpleNamespace(
        index=0, token_ids=token_ids, logprobs=[-0.5] * len(token_ids), weight_versions=(), finish_reason=None,
        untold=untold,
    )  # fmt: skip


def test_a_part_that_is_too_long_for_a_line_goes_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows of a long prompt are left out, and those of the tokens behind it are told."""
    longest_line = inspect.signature(HttpClient).parameters["max_answer_bytes"].default
    assert longest_line * 0.7 > answers.MAX_PART_BYTES * 4 / 3, "in base64, with room for tokens and spans"
    monkeypatch.setattr(answers, "MAX_PART_BYTES", 100)
    untold = UntoldRows(2000)
    untold.add(rows(*np.random.default_rng(0).integers(0, 250, 2001)))
    first = answers.generate_part(completion_of(untold, 50, 51), instance="i", oldest_cache="")
    assert (first.token_ids, first.routed_experts) == ((50, 51), None)
    assert "the learner routes these tokens itself" in caplog.text
    untold.add(rows(7))
    second = answers.generate_part(completion_of(untold, 52), instance="i", oldest_cache="")
    assert second.routed_experts is not None
    assert second.routed_experts.spans == ((2001, 2002),)


def test_rows_before_the_first_that_is_wanted_stay_behind() -> None:
    """Of a prompt of four the tokens from 3 on are wanted; the engine computes two, then the others."""
    params = answers.sampling_params(
        n=1, sampling=Sampling(max_tokens=4), stream_interval=1, routed_experts=True, routed_experts_from=3
    )
    waiting, sent = RoutedRows(), output("a", ended=True)
    waiting.added(SimpleNamespace(request_id="a", sampling_params=params))
    waiting.note({"a": rows(0, 1)})
    waiting.note({"a": rows(2, 3, 4)})
    waiting.attach([sent])
    assert sent.routed_experts.tolist() == rows(3, 4).tolist()
    assert len(waiting) == 0
    untold = UntoldRows.of_request(params, prompt=4)
    untold.add(sent.routed_experts)
    found = untold.take([50, 51])
    assert found is not None
    assert (found[0], found[1][:, 0, 0].tolist()) == (3, [3, 4])
