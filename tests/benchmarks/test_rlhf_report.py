import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.rlhf_report import Point, figure, read_points, table

POINT = Point(
    algo="grpo",
    max_lag=4,
    step=8,
    lag_mean=2.5,
    train_wall_s=30.0,
    gold_win_rate=0.6,
    proxy_win_rate=0.7,
    kl=1.25,
    gold=2.0,
    proxy=0.5,
    length=9.0,
)
LATER = replace(POINT, step=16, gold_win_rate=0.4, proxy_win_rate=0.9, kl=6.0)


def test_the_table_has_the_best_and_the_last_point_of_a_run() -> None:
    (row,) = [line for line in table([LATER, POINT]).splitlines() if line.startswith("| grpo")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["grpo", "4", "2.5", "8", "**0.600**", "1.25", "16", "0.400", "0.900", "2.0", "6.0", "9.0", "30"]


def test_points_come_back_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    assert read_points(file) == []
    file.write_text("".join(json.dumps(asdict(point)) + "\n" for point in (POINT, LATER)), encoding="utf-8")
    assert read_points(file) == [POINT, LATER]


def test_the_figure_is_drawn_for_several_algorithms(tmp_path: Path) -> None:
    figure([POINT, LATER, replace(POINT, algo="online_dpo", max_lag=0)], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0
