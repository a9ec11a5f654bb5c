"""`headway report`: what stands in the file, that nothing else does, and the balance worked by hand."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headway.report import (
    ReportedRun,
    advice,
    balance_of,
    chart,
    page,
    read_run,
    report,
    round_ticks,
    thinned,
    verdict_of,
)
from services.config.sources import ConfigError

HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)>&amp;'


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "reward_mean": number / 10, "lag_mean": 1.5, "lag_max": 3, "train_s": 2.0,
        "wait_s": 1.5, "copy_s": 0.5, "sampled_tokens": 400, "loss": -0.5, "entropy": None, **changes,
    }  # fmt: skip


def write_run(folder: Path, *lines: dict[str, Any], summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    entries = lines or tuple(step(number) for number in range(1, 11))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"kind": "st')
    (folder / "summary.json").write_text(json.dumps(summary or {"train_wall_s": 50.0, "generator_idle_share": 0.2}))
    made = {
        "settings": {"max_lag": 7, "groups_per_step": 32, "algo.type": "grpo", "run.name": HOSTILE},
        "versions": {"headway": "0.1.0"}, "host": {"cores": 2}, "git": None, "command": ["learner", HOSTILE],
    }  # fmt: skip
    (folder / "made_with.json").write_text(json.dumps(made))
    completion = {"text": HOSTILE, "reward": 1.0, "tokens": 3, "finish_reason": "stop", "versions": ["1.2"]}
    sample = {"step": 1, "lease_id": 4, "prompt": HOSTILE, "completions": [completion]}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return folder


class PageTags(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_file_has_no_script_loads_nothing_and_shows_what_is_hostile_as_text(tmp_path: Path) -> None:
    seen = PageTags(page([read_run(write_run(tmp_path / "run"))]))

    names = {tag for tag, _ in seen.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    attributes = {name for _, given in seen.tags for name in given}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"src", "href"}
    policies = [given["content"] for tag, given in seen.tags if "http-equiv" in given]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert seen.text.count('<script>alert("1")</script><img src=x onerror=alert(1)>&amp;') == 4


def test_every_figure_says_in_words_what_it_shows_and_both_schemes_and_paper_have_colours(tmp_path: Path) -> None:
    text = page([read_run(write_run(tmp_path / "run"))])
    seen = PageTags(text)

    figures = [given for tag, given in seen.tags if tag == "svg"]
    assert len(figures) == text.count("<figcaption>") == 4, "reward, lag, time, loss; no entropy was measured"
    assert all(given["role"] == "img" and given["aria-label"] for given in figures)
    assert "mean reward: 0.1 at first, 1 at last" in text
    for wanted in ("prefers-color-scheme:dark", "@media print", "size:A4", "print-color-adjust:exact"):
        assert wanted in text


def test_what_happened_is_marked_at_its_step_and_what_is_regular_is_not(tmp_path: Path) -> None:
    """The resume leaves steps 1 to 8, which are 658 wide: 2 and 8 stand at 52 + 658 / 7 and 52 + 658."""
    lines = [step(number) for number in range(1, 11)]
    leave = {"kind": "leave", "version": 2, "generator_id": HOSTILE}
    checkpoint = {"kind": "checkpoint", "version": 2, "seconds": 1}
    guard = {"kind": "guard", "step": 8, "change": "loosened", "before": 1, "after": 2}
    lost = {"kind": "join", "version": 9, "generator_id": "lost"}
    run = read_run(
        write_run(tmp_path / "run", *lines, leave, checkpoint, guard, lost, {"kind": "resume", "version": 8})
    )
    text = page([run])
    places = re.findall(r'class="mark"><title>.*?</title><path d="M([0-9.]+) ', text, re.DOTALL)

    assert places[:2] == ["146.0", "710.0"]
    assert len(places) == 2 * text.count("<svg ")
    assert "<title>step 8: the learner was started again, from version 8\nstep 8: the guard raises" in text
    assert "Marked on the curves: ↻ restarts, × generators gone, ▼ lag bound" in text
    assert "lost" not in text
    assert "checkpoint, written" not in text
    assert not {"script", "img"} & {tag for tag, _ in PageTags(text).tags}
    assert 'class="mark"' not in page([run, run]), "nobody could tell whose they are"


def test_the_balance_by_hand(tmp_path: Path) -> None:
    balance = balance_of(read_run(write_run(tmp_path / "run")))

    assert balance is not None
    assert balance.reached == 4000 / 50
    assert balance.training == 4000 / 25
    assert balance.sampling == pytest.approx(4000 / (50 * 0.8))
    assert balance.bound == pytest.approx(100)
    assert balance.in_turn == pytest.approx(1 / (1 / 160 + 1 / 100))
    assert balance.shares == pytest.approx(
        {
            "training": 0.4, "waiting for groups": 0.3, "copying weights": 0.1,
            "between steps (checkpoints, evaluations)": 0.2,
        }
    )  # fmt: skip
    assert "Sampling bounds this run: training alone is 1.60 times as fast" in advice(balance)


@pytest.mark.parametrize(
    ("idle", "says"),
    [(0.75, "Training bounds this run: sampling alone is 2.00 times as fast"), (0.5, "even"), (None, "not known")],
)
def test_the_advice_names_the_slower_side(tmp_path: Path, idle: float | None, says: str) -> None:
    summary = {"train_wall_s": 50.0, "generator_idle_share": idle}
    balance = balance_of(read_run(write_run(tmp_path / "run", summary=summary)))

    assert balance is not None
    assert says in advice(balance)


def test_the_advice_counts_whole_generators_and_names_cheaper_changes_before_them(tmp_path: Path) -> None:
    publishes = [{"kind": "publish", "version": number, "members": 2} for number in range(1, 11)]
    balance = balance_of(read_run(write_run(tmp_path / "run", *map(step, range(1, 11)), *publishes)))

    assert balance is not None
    said = advice(balance)
    assert said.endswith("4 generators instead of 2 would make the two sides even.")
    order = [said.index(word) for word in ("env-service.capacity", "max_num_seqs", "learner.max_lag", "4 generators")]
    assert order == sorted(order)


def test_the_verdict_that_held_for_most_of_the_run_stands_on_top(tmp_path: Path) -> None:
    def verdict(at: float, state: str, sentence: str, remedy: str = "") -> dict[str, Any]:
        told = {"state": state, "cause": sentence, "who": "", "sentence": sentence, "remedy": remedy}
        return {"kind": "verdict", "version": 1, "unix_s": at, **told}

    lines = [
        verdict(0.0, "starting", "On the way"),
        verdict(100.0, "healthy", "Healthy"),
        verdict(120.0, "bounded", "Rewards bound <b>", "raise the workers"),
        {"kind": "publish", "version": 9, "unix_s": 200.0},
    ]
    run = read_run(write_run(tmp_path / "run", *map(step, range(1, 11)), *lines))

    assert verdict_of(run) == "Rewards bound <b>; raise the workers (so for 80% of the run)"
    text = page([run])
    assert text.index("Rewards bound &lt;b&gt;") < text.index("<figure>")
    assert verdict_of(read_run(write_run(tmp_path / "silent"))) == ""


def test_steps_that_a_resume_took_back_are_not_shown_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    lines = [step(1), step(2), step(3, reward_mean=9.0), {"kind": "resume", "version": 2}, step(3), step(4)]
    run = read_run(write_run(tmp_path / "run", *lines))

    assert [entry["step"] for entry in run.steps] == [1, 2, 3, 4]
    assert run.steps[2]["reward_mean"] == 0.3


def test_settings_that_differ_from_the_defaults_come_first(tmp_path: Path) -> None:
    seen = PageTags(page([read_run(write_run(tmp_path / "run"))])).text

    changed, _, same = seen.partition("settings as they are by default")
    assert "max_lag7" in changed.replace("\n", "")
    assert "groups_per_step32" not in changed
    assert "groups_per_step32" in same


def test_several_runs_share_their_figures(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name)) for name in ("one", "other")]
    text = page(runs)

    assert "one: mean reward" in text
    assert "other: mean reward" in text
    assert text.count("<h2>") == 2


def test_a_run_on_files_and_one_that_has_not_ended_have_a_page_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    folder.mkdir()
    lines = [{"kind": "held_out", "step": 0, "nll": 2.0}, {"kind": "step", "step": 1, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    text = page([read_run(folder)])
    assert "there is no summary yet" in text
    assert "The balance" not in text


def test_thinning_keeps_the_peaks() -> None:
    points = [(float(x), 1000.0 if x == 50_001 else float(x % 7)) for x in range(100_000)]
    kept = thinned(points, 720)

    assert len(kept) <= 2 * 720
    assert (50_001.0, 1000.0) in kept
    assert kept == sorted(kept)


def test_values_below_zero_and_values_that_are_all_equal_are_within_the_figure() -> None:
    for points in ([(0.0, -5.0), (1.0, 3.0)], [(1.0, 2.0)], [(0.0, 0.0), (9.0, 0.0)]):
        numbers = [float(y) for y in re.findall(r"[ML]\d+\.\d (\d+\.\d)", chart("t", {"c": points}))]
        assert numbers
        assert all(0 <= y <= 210 for y in numbers)
    assert chart("t", {"c": []}) == ""


@pytest.mark.parametrize(
    ("low", "high", "least", "ticks"),
    [
        (1.0, 60.0, 1.0, [10, 20, 30, 40, 50, 60]),
        (1.0, 3.0, 1.0, [1, 2, 3]),
        (0.0, 0.5, 0.0, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (-0.021, 0.0185, 0.0, [-0.02, -0.01, 0, 0.01]),
        (0.0, 26600.0, 0.0, [0, 5000, 10000, 15000, 20000, 25000]),
    ],
)
def test_axes_have_round_numbers_and_steps_whole_ones(
    low: float, high: float, least: float, ticks: list[float]
) -> None:
    assert round_ticks(low, high, least=least) == pytest.approx(ticks)


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    assert report([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert report([str(folder), "--output", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text() == (folder / "report.html").read_text()


def test_what_is_no_run_is_said() -> None:
    with pytest.raises(ConfigError, match="needs the folder of a run"):
        report([])
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        report(["/tmp"])


def test_a_run_of_100_000_steps_makes_a_small_file() -> None:
    steps = [step(number) for number in range(1, 100_001)]
    run = ReportedRun(name="long", steps=steps, evaluations=[], summary={}, made={}, samples=[])

    assert len(page([run])) < 500_000
