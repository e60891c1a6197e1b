"""Rows, tables, JSON, sections of RESULTS.md, plots, and the command that runs all subjects."""

import argparse
import json
import sys
from dataclasses import asdict

import pytest
from expecttest import assert_expected_inline

from benchmarks import __main__ as benchmark_command
from benchmarks import common, gemm, report
from benchmarks.report import Column, Row, Subject, Target

COLUMNS = (
    report.NAME, report.decibels("y"), report.TIME, report.FLOOR, report.TIMES_FLOOR,
    report.SPEED_UP, report.FLOPS, Column("saved MB", 1), report.TARGET,
)  # fmt: skip


def example_rows():
    db = {"y": 30.0}
    return [
        Row("up", "bfloat16", sqnr_db=db, ms=(4.0,), flops=2e12, floor_ms=3.2, baseline=True),
        Row("up", "good", sqnr_db=db, ms=(1.9, 2.0, 2.1), flops=2e12, floor_ms=1.6, fp8=True,
            targets=(Target("x floor", "<=", 1.04), Target("x bf16", ">=", 2.0)),
            values={"saved MB": 1.25}),
        Row("up", "bad", sqnr_db={"y": 3.0}, refusal="wrong: y 3.0 dB, below 20 dB"),
    ]  # fmt: skip


def test_tabulate_gives_a_table_of_rows():
    assert_expected_inline(
        report.tabulate(COLUMNS, example_rows()),
        """\
| implementation | y (dB) |           GPU ms (quartiles) | floor ms | x floor | x bf16 | TFLOP/s | saved MB |                                  target |
| :------------- | -----: | ---------------------------: | -------: | ------: | -----: | ------: | -------: | --------------------------------------: |
| bfloat16       |   30.0 |          4.000 (4.000-4.000) |    3.200 |   1.250 |   1.00 |     500 |        - |                                       - |
| good           |   30.0 |          2.000 (1.950-2.050) |    1.600 |   1.250 |   2.00 |    1000 |      1.2 | x floor <= 1.04 missed; x bf16 >= 2 met |
| bad            |    3.0 | wrong: y 3.0 dB, below 20 dB |        - |       - |      - |       - |        - |                                       - |""",  # noqa: E501
    )


def test_a_column_that_no_row_uses_is_left_out():
    rows = [Row("up", "bfloat16", ms=(4.0,))]
    assert report.tabulate(COLUMNS, rows).splitlines()[0] == (
        "| implementation |  GPU ms (quartiles) |"
    )


def test_rows_are_not_compared_with_a_refused_baseline():
    rows = [Row("up", "bfloat16", refusal="wrong", baseline=True), Row("up", "fp8", ms=(1.0,))]
    assert "x bf16" not in report.tabulate(COLUMNS, rows)


@pytest.mark.parametrize("numbers", [{"ms": (1.0,)}, {"wall_ms": (1.0,)}, {"values": {"us": 1.0}}])
def test_a_refused_row_with_numbers_is_an_error(numbers):
    with pytest.raises(ValueError, match="refusal must be None for a row with numbers"):
        Row("up", "bad", refusal="wrong", **numbers)


def test_setting_adds_percentages_of_ceiling_and_copy(setting):
    setting.floor.time = lambda fn: common.Timing((2.0,))
    # 64^3 GEMMs and a copy of 64 KiB, in 2 ms each.
    row = setting.row("up", "fp8", ms=(2.0,), flops=64**3, bytes=2**16, fp8=True)
    assert row.values == {"% of ceiling": pytest.approx(50), "% of copy": pytest.approx(50)}
    assert setting.row("up", "bad", refusal="wrong", flops=1.0).values == {}


def test_rows_round_trip_through_json(tmp_path):
    path = tmp_path / "up.json"
    old_header, new_header = {"time": "1", "torch": "2"}, {"time": "2", "torch": "2"}
    common.append_json(path, old_header, [asdict(Row("up", "old"))])
    for row in example_rows():
        common.append_json(path, new_header, [asdict(row)])
    facts, rows = report.read_json(path)
    assert facts == new_header
    assert rows == example_rows()


def report_options(**changes):
    default = {
        "json": None, "plot": None, "seed": 0, "commit": None, "compile": False, "samples": 3,
    }  # fmt: skip
    return argparse.Namespace(**{**default, **changes})


def test_rows_are_printed_and_written_one_by_one(setting, tmp_path, capsys):
    path = tmp_path / "up.json"
    lines_before_row = []

    def rows(setting, options):
        for row in example_rows():
            lines_before_row.append(len(path.read_text().splitlines()) if path.exists() else 0)
            yield row

    subject = Subject("up", "Up", "Up.", COLUMNS, rows)
    measured = report.measure(subject, setting, report_options(json=path), {"torch": "2"})
    assert measured == example_rows()
    assert lines_before_row == [0, 1, 2]
    out, err = capsys.readouterr()
    assert "- torch: 2\n\nup\n\n| implementation" in out
    assert "up | up | bad: wrong: y 3.0 dB, below 20 dB" in err
    facts, rows_read = report.read_json(path)
    assert rows_read == measured
    assert set(facts) == {"time", "torch"}


def test_render_has_a_table_for_each_case():
    subject = Subject("up", "Up", "Up.", (report.NAME, report.TIME), lambda setting, options: ())
    rows = [Row("first", "a", ms=(1.0,)), Row("second", "a", ms=(2.0,)), Row("first", "b")]
    assert_expected_inline(
        report.render(subject, {"torch": "2", "time": "now"}, rows),
        """\
- torch: 2

first

| implementation |  GPU ms (quartiles) |
| :------------- | ------------------: |
| a              | 1.000 (1.000-1.000) |
| b              |                   - |

second

| implementation |  GPU ms (quartiles) |
| :------------- | ------------------: |
| a              | 2.000 (2.000-2.000) |""",
    )


RESULTS_PAGE = """\
# Results

## GEMM

Before.

<!-- begin benchmarks.gemm -->
old numbers
<!-- end benchmarks.gemm -->

After: a loss, and its cause.

## Linear

<!-- begin benchmarks.linear -->
linear numbers
<!-- end benchmarks.linear -->
"""


def test_a_section_is_replaced_and_remarks_stay():
    text = report.replace_section(RESULTS_PAGE, "gemm", "GEMM", r"new \1 numbers")
    assert "old numbers" not in text
    for part in ("Before.", "After: a loss, and its cause.", "linear numbers", r"new \1 numbers"):
        assert text.count(part) == 1
    assert text.index("Before.") < text.index("new") < text.index("After:")
    assert report.replace_section(text, "gemm", "GEMM", r"new \1 numbers") == text


def test_a_new_section_is_added_at_the_end():
    text = report.replace_section(RESULTS_PAGE, "mlp", "MLP", "mlp numbers")
    assert text.startswith(RESULTS_PAGE.rstrip())
    assert text.endswith(
        "## MLP\n\n<!-- begin benchmarks.mlp -->\n\nmlp numbers\n\n<!-- end benchmarks.mlp -->\n"
    )


@pytest.mark.parametrize(
    "comment", ["<!-- end benchmarks.gemm -->", "<!-- begin benchmarks.gemm -->"]
)
def test_broken_section_comments_are_an_error(comment):
    text = RESULTS_PAGE.replace("<!-- end benchmarks.gemm -->", comment * 2, 1)
    with pytest.raises(ValueError, match="must stand in this order, once each"):
        report.replace_section(text, "gemm", "GEMM", "new")


def test_results_have_comments_for_subjects_only():
    text = benchmark_command.RESULTS.read_text()
    section_names = [
        line.split(".")[1].split()[0] for line in text.splitlines() if "<!-- begin" in line
    ]
    assert len(section_names) > 3
    assert set(section_names) <= set(benchmark_command.SUBJECTS)
    for name in section_names:  # raises if a comment is broken
        assert report.replace_section(text, name, "", "new") != text


@pytest.mark.parametrize("name", benchmark_command.SUBJECTS)
def test_every_subject_has_its_modules_name(name):
    subject = benchmark_command.subject(name)
    assert subject.name == name
    assert subject.doc.count(f"benchmarks.{name}") >= 1
    titles = [benchmark_command.subject(other).title for other in benchmark_command.SUBJECTS]
    assert titles.count(subject.title) == 1


def write_gemm(folder):
    rows = [Row("up", "bfloat16", ms=(4.0,)), Row("up", "row, fast", ms=(2.0,))]
    for row in rows:
        common.append_json(folder / "gemm.json", {"time": "1", "commit": "abc"}, [asdict(row)])


def test_results_are_rewritten_from_json(tmp_path):
    write_gemm(tmp_path)
    results = tmp_path / "RESULTS.md"
    results.write_text(RESULTS_PAGE)
    assert benchmark_command.main(["--from", str(tmp_path), "--results", str(results)]) == 0
    text = results.read_text()
    assert "| row, fast      | 2.000 (2.000-2.000) |" in text
    assert "- commit: abc" in text
    assert "After: a loss, and its cause." in text
    assert "linear numbers" in text  # there is no linear.json


def test_results_at_a_new_path_start_as_a_copy(tmp_path):
    write_gemm(tmp_path)
    results = tmp_path / "new" / "RESULTS.md"
    assert benchmark_command.rewrite(results, "gemm", tmp_path / "gemm.json")
    assert "row, fast" in results.read_text()
    assert "## Training loss" in results.read_text()


def test_each_subject_runs_in_its_own_process(tmp_path, monkeypatch):
    results = tmp_path / "RESULTS.md"
    results.write_text(RESULTS_PAGE)
    commands = []

    def fake_run(words, **keywords):
        commands.append(words)
        if "benchmarks.gemm" in words:
            write_gemm(tmp_path)
        return argparse.Namespace(returncode=int("benchmarks.linear" in words))

    monkeypatch.setattr(benchmark_command.subprocess, "run", fake_run)
    arguments = ["--only", "gemm,linear,accuracy,fsdp", "--compile", "--plot", str(tmp_path)]
    arguments += ["--json", str(tmp_path), "--results", str(results), "--commit", "abc"]
    assert benchmark_command.main(arguments) == 1  # linear failed
    assert [words[0] for words in commands] == [sys.executable] * 4
    assert "--compile" in commands[0]
    assert commands[0][commands[0].index("--json") + 1] == str(tmp_path / "gemm.json")
    assert commands[0][commands[0].index("--commit") + 1] == "abc"
    assert "--compile" not in commands[2]  # accuracy compiles nothing
    assert "torch.distributed.run" in commands[3]
    assert "row, fast" in results.read_text()
    assert "linear numbers" in results.read_text()


def test_options_are_passed_on_to_subjects():
    arguments = report_options(compile=True, plot="plots", commit="abc")
    words = benchmark_command.command("gemm", arguments, "gemm.json", 0)
    parser = common.new_parser("")
    report.add_options(parser)
    gemm.SUBJECT.add_options(parser)
    parsed = parser.parse_args(words[3:])
    assert (parsed.compile, parsed.samples, parsed.commit) == (True, 3, "abc")


def test_an_unknown_subject_is_named(capsys):
    with pytest.raises(SystemExit):
        benchmark_command.main(["--only", "gemm,gem"])
    assert "got gem" in capsys.readouterr().err


def test_header_omits_the_output_options(monkeypatch):
    argv = ["benchmarks/gemm.py", "--json", "/tmp/x.json", "--layer", "up", "--commit", "abc"]
    argv += ["--candidate", "block, compile"]
    monkeypatch.setattr(sys, "argv", argv)
    facts = common.header("abc")
    command = "python -m benchmarks.gemm --layer up --candidate 'block, compile'"
    assert facts["command"] == command
    assert facts["commit"] == "abc"


def test_plot_has_a_bar_for_each_time(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    bars = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.barh", lambda self, y, width, **keywords: bars.append(width)
    )
    path = tmp_path / "plots" / "up.png"
    report.save_plot(Subject("up", "Up", "", COLUMNS, lambda s, o: ()), example_rows(), path)
    assert bars == [2.0, 4.0]  # the refused row has no bar
    assert path.stat().st_size > 0
    assert plt.get_fignums() == []


def test_rows_as_dicts_are_plain_json():
    row = asdict(example_rows()[1])
    assert json.loads(json.dumps(row))["targets"][0] == {
        "quantity": "x floor", "relation": "<=", "bound": 1.04,
    }  # fmt: skip
