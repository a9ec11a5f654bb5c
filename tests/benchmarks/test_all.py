"""The table of all benchmarks."""

from pathlib import Path

from benchmarks.all import ALL, Ran, cell, report

TABLE = """# A benchmark

| side | CPU | time |
|---|---|---|
| ours | **1.00** | 2 |
| theirs, padded | 1.83 | 3 |

| side | CPU | time |
|---|---|---|
| ours | **1.10** | 4 |
"""


def test_a_figure_is_the_cell_of_the_first_row_that_fits_or_of_the_last_one() -> None:
    assert cell(TABLE, row=r"\| ours", column=1) == "**1.00**"
    assert cell(TABLE, row=r"\| ours", column=2, last=True) == "4"
    assert cell(TABLE, row="padded", column=1) == "1.83"
    assert cell(TABLE, row="nobody", column=1) is None
    assert cell(TABLE, row="padded", column=3) is None


def test_the_committed_results_have_the_rows_that_the_table_is_made_of() -> None:
    results = Path(__file__).parents[2] / "benchmarks/results"
    for benchmark in ALL:
        if (path := results / benchmark.file).exists():
            text = path.read_text(encoding="utf-8")
            for figure in benchmark.figures:
                assert cell(text, row=figure.row, column=figure.column), f"{benchmark.file}: {figure.row}"


def test_a_benchmark_that_failed_or_did_not_fit_is_named_with_the_reason() -> None:
    first, second, third = ALL[:3]
    ran = [Ran(first, 3.0), Ran(second, fault="failed with 1: a|b"), Ran(third, fault="not run: 6 minutes did not fit")]

    rows = [line for line in report(ran, read=lambda _: "").splitlines() if line.startswith("| ")]

    assert rows[1].startswith(f"| {first.figures[0].what} | not in its table | 98 % | `{first.command}`")
    assert rows[2].startswith(f"| {second.name} | failed with 1: a/b | | `{second.command}`")
    assert rows[3].startswith(f"| {third.name} | not run: 6 minutes did not fit |")


def test_what_was_not_run_keeps_the_figures_of_its_file() -> None:
    first, second = ALL[:2]
    text = report([Ran(first, 3.0)], read=lambda name: "| TRL | 2.5 |" if name == second.file else "")

    assert f"| training step: TRL's CPU over ours | 2.5 | 2 times | `{second.command}`" in text
    assert f"Not run with the others, but in earlier calls: {second.name}, " in text
