"""`headway up` from start to end, and everything that a run leaves."""

import importlib.util
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.collector import CollectedSpan, Collector
from tests.e2e.processes import Launcher, marked
from tests.e2e.run_files import GROUP_SIZE, GROUPS_PER_STEP, RunFolder, token_lags, trained_versions, write_run_file
from tests.learner.page.chromium import NEEDS_CHROMIUM, Viewed, chromium, opened

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.e2e

STEPS = 30
MAX_LAG = 4
OTEL = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
TRACED = 0.2
SUMMARY_KEYS = {
    "accuracy_before", "accuracy_after", "steps", "train_wall_s", "completions_per_s", "lag_histogram", "max_lag_seen",
    "learner_wait_share", "generator_idle_share", "publish_s_median", "groups_trained", "groups_dropped",
}  # fmt: skip


@dataclass(frozen=True)
class EndedRun:
    folder: RunFolder
    exit_code: int
    output: str
    left_over: dict[int, str]
    spans: list[CollectedSpan]


@pytest.fixture(scope="module")
def ended(launcher: Launcher, model: Path, tmp_path_factory: pytest.TempPathFactory) -> EndedRun:
    run_file = write_run_file(tmp_path_factory.mktemp("run"), model=model)
    words = [str(run_file.path), "--learner.steps", str(STEPS), "--learner.max-lag", str(MAX_LAG)]
    with Collector() as collector:
        words += ["--run.trace-url", collector.url, "--run.trace-share", str(TRACED)] if OTEL else []
        up = launcher("headway", "up", *words)
        exit_code = up.wait()
        left_over = marked(launcher.mark)
        return EndedRun(
            folder=run_file.run(), exit_code=exit_code, output=up.text(), left_over=left_over, spans=collector.spans()
        )


def test_it_ends_well_and_leaves_no_process(ended: EndedRun) -> None:
    assert ended.exit_code == 0, ended.output
    assert ended.left_over == {}


def test_it_says_whom_it_waits_for_and_how_it_goes_and_nothing_strange(ended: EndedRun) -> None:
    assert f"step {STEPS}/{STEPS}  reward" in ended.output
    assert "ETA" in ended.output
    assert "held-out accuracy" in ended.output
    # The guard may speak, and advice for rewards that are all alike: such large steps can be too much for such a model.
    # Heartbeats come every half a second here: where ten others want the same cores, a process is silent for five.
    own = (" guard: ", "so nothing is learned from them", "the learner does not answer; rollouts go on")
    said = "\n".join(line for line in ended.output.splitlines() if not any(each in line for each in own))
    for noise in ("Triton", "Warning", "WARNING", "Traceback", "vllm"):
        assert noise not in said


def test_the_summary_has_its_keys_and_adds_up(ended: EndedRun) -> None:
    summary = ended.folder.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == STEPS
    assert summary["groups_trained"] == STEPS * GROUPS_PER_STEP
    assert sum(summary["lag_histogram"].values()) == STEPS * GROUPS_PER_STEP * GROUP_SIZE
    assert sum(summary["token_lag_histogram"].values()) == sum(
        s["sampled_tokens"] for s in ended.folder.metrics("step")
    )
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy_after"] <= 1
    assert 0 <= summary["generator_idle_share"] <= 1


def test_no_trained_token_exceeds_the_lag_bound(ended: EndedRun) -> None:
    summary = ended.folder.summary()
    lags = {int(lag) for lag in summary["token_lag_histogram"]}
    assert lags <= set(range(MAX_LAG + 1))
    assert token_lags(ended.folder) == lags
    assert summary["max_lag_seen"] <= MAX_LAG
    assert max(lags) > 0, "sampling ran ahead of training"


def test_each_lease_is_trained_once_and_in_a_step_of_the_right_size(ended: EndedRun) -> None:
    batches = ended.folder.batches()
    assert [version for version, _ in batches] == list(range(STEPS))
    assert {len(groups) for _, groups in batches} == {GROUPS_PER_STEP}
    trained = Counter(group.lease_id for _, groups in batches for group in groups)
    assert set(trained.values()) == {1}


def test_every_version_on_a_trained_token_was_published(ended: EndedRun) -> None:
    published = [line["version"] for line in ended.folder.metrics("publish")]
    assert published[0] == 0
    assert published[-1] == STEPS
    assert published == sorted(set(published))
    assert trained_versions(ended.folder) <= {f"1.{version}" for version in published}


def test_engine_and_learner_agree_at_every_publish_and_on_every_trained_token(ended: EndedRun) -> None:
    assert all(line["probe_gap"] < 1e-3 for line in ended.folder.metrics("publish"))
    mismatches = [line["mismatch_kl"] for line in ended.folder.metrics("step") if line["mismatch_kl"] is not None]
    assert mismatches
    assert max(abs(mismatch) for mismatch in mismatches) < 1e-5


def test_metrics_and_samples_tell_of_every_step(ended: EndedRun) -> None:
    assert ended.folder.steps() == list(range(1, STEPS + 1))
    evaluated = [line["version"] for line in ended.folder.metrics("evaluation")]
    assert sorted(evaluated) == [0, 10, 20, STEPS]
    samples = ended.folder.lines("samples.jsonl")
    assert {sample["step"] for sample in samples} == set(range(1, STEPS + 1))
    assert samples[0]["prompt"].endswith("=")
    assert samples[0]["completions"][0].keys() >= {"text", "reward", "tokens", "finish_reason", "versions"}


TOLD = re.compile(r"token (\d+) \(id (\d+)\) .*: (?:version (\d+), logprob (\S+) sampling .*|given, not sampled)")


@NEEDS_CHROMIUM
def test_the_page_shows_the_tokens_versions_masks_and_rewards_of_the_journal(ended: EndedRun) -> None:
    """Of a group as Chromium shows it, token by token under the cursor of the keyboard."""
    by_lease = {group.lease_id: group for _, groups in ended.folder.batches() for group in groups}
    with Viewed(ended.folder.path) as shown, chromium() as browser:
        page, said = opened(browser, f"{shown.url}#/trajectories?why=trained")
        page.locator("table.list tbody tr td:nth-child(2) a").first.click(timeout=60_000)
        lease = (
            page.locator("h2", has_text=" · lease ").inner_text(timeout=60_000).split(" · lease ")[1].split(" · ")[0]
        )
        group = by_lease[int(lease)]
        ranked = sorted(group.trajectories, key=lambda one: -(one.reward.reward or 0.0))
        cards = page.locator(".siblings article").all()
        seen = [_shown_by(page, card) for card in cards]
        rewards = [float(card.locator("h3").inner_text().split("reward ")[1].split(" ")[0]) for card in cards]
        prompt = page.locator(".tokens.given").inner_text()

    assert prompt == group.prompt_text
    assert rewards == [one.reward.reward for one in ranked]
    for tokens, one in zip(seen, ranked, strict=True):
        first = tokens[0][0]
        assert [token for _, token, _, _ in tokens] == one.token_ids[first:].tolist()
        assert [version for _, _, version, _ in tokens] == one.token_versions()[first:].tolist()
        masks = [version >= 0 for _, _, version, _ in tokens]
        assert masks == (one.loss_mask[first:] == 1).tolist()
        assert not one.loss_mask[:first].any()
        logprobs = [logprob for _, _, _, logprob in tokens]
        assert logprobs == pytest.approx(one.behavior_logprobs[first:].tolist(), rel=1e-2, abs=1e-3)
    assert said == []


def _shown_by(page: "Page", card: "Locator") -> list[tuple[int, int, int, float]]:
    """Place, id, version (-1: not sampled) and logprob of each token after the prompt."""
    found: list[tuple[int, int, int, float]] = []
    card.locator(".tokens").focus()
    while True:
        page.keyboard.press("ArrowRight")
        told = TOLD.fullmatch(card.locator(".told").inner_text())
        assert told is not None, card.locator(".told").inner_text()
        place, token, version, logprob = told.groups()
        if found and found[-1][0] == int(place):
            return found
        found.append((int(place), int(token), int(version or -1), float(logprob or 0.0)))


def test_the_curves_are_a_picture(ended: EndedRun) -> None:
    assert (ended.folder.path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_trained_model_is_a_model_directory(ended: EndedRun, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(ended.folder.path / "model")
    before = AutoModelForCausalLM.from_pretrained(model)
    prompt = AutoTokenizer.from_pretrained(ended.folder.path / "model")("12+30=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        gap = (trained(prompt).logits - before(prompt).logits).abs().max().item()
    assert 1e-4 < gap < 100


@pytest.mark.skipif(not OTEL, reason="needs OpenTelemetry: pip install 'headway[otel]'")
def test_the_life_of_a_lease_from_its_grant_to_its_step_is_one_trace_of_all_four_processes(ended: EndedRun) -> None:
    traces: dict[str, list[CollectedSpan]] = defaultdict(list)
    for span in ended.spans:
        traces[span.trace_id].append(span)
    trained = {one.lease_id: version for version, groups in ended.folder.batches() for one in groups}
    whole = [spans for spans in traces.values() if any(span.name == "step" for span in spans)]
    assert 0 < len(whole) < len(trained) / 2, "a share of the leases that were trained"

    for spans in whole:
        (root,) = (span for span in spans if not span.parent)
        (step,) = (span for span in spans if span.name == "step")
        assert (root.name, root.service) == ("lease", "headway-learner")
        assert step.attributes["step"] == trained[root.attributes["lease_id"]] + 1
        assert {span.parent for span in spans} <= {span.span_id for span in spans} | {""}
        assert {span.service for span in spans} >= {"headway-learner", "headway-env-service", "headway-generator"}
    # Small calls of several leases to a reward service share one request, which belongs to one of their traces.
    over_all = [spans for spans in whole if any(span.service == "headway-reward-service" for span in spans)]
    assert over_all
    for spans in over_all:
        by_id = {span.span_id: span for span in spans}
        for span in spans:
            assert not span.parent or by_id[span.parent].began <= span.began, (span, by_id[span.parent])
        # A group that waited until it was too old has a batch's span too, before that of the one which was trained.
        (root, batch, step) = (named(spans, name)[-1] for name in ("lease", "batch", "step"))
        assert "version" in batch.attributes
        assert chains(by_id, "/v1/score") == {("headway-reward-service", "scoring", "rollout", "lease")}
        assert chains(by_id, "/v1/generate") == {("headway-generator", "turn", "rollout", "lease")}
        # A lease is granted again when its group came too late: what was trained is the last attempt's.
        attempts = named(spans, "rollout")
        assert [span.attributes["attempt"] for span in attempts] == sorted(
            {span.attributes["attempt"] for span in attempts}
        )
        (turn, scoring) = (
            next(one for one in named(spans, name) if one.parent == attempts[-1].span_id)
            for name in ("turn", "scoring")
        )
        assert turn.began <= turn.ended <= scoring.began <= scoring.ended <= batch.began <= batch.ended <= step.ended
        # A server's span ends when it comes to note that its answer was sent: whoever asked may be further by then.
        asking = ("headway-learner", "headway-env-service")
        assert [span for span in spans if span.service in asking and span.ended > root.ended] == []


def named(spans: Iterable[CollectedSpan], name: str) -> list[CollectedSpan]:
    """In the order in which they began."""
    return sorted((span for span in spans if span.name == name), key=lambda span: span.began)


def chains(by_id: dict[str, CollectedSpan], name: str) -> set[tuple[str, ...]]:
    """Of the spans of that name: the service, and the names of what they are part of up to the root."""
    found = set()
    for span in named(by_id.values(), name):
        chain, at = [span.service], span
        while at.parent:
            at = by_id[at.parent]
            chain.append(at.name)
        found.add(tuple(chain))
    return found
