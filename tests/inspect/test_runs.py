"""Tests of verdicts on watched runs, of alerts during a run, and of comparing two runs."""

import json
import math
import warnings

import pytest
import torch

import float8lab
from float8lab import __main__ as command
from float8lab.inspect import compare, diagnose
from float8lab.inspect.watch.records import Log, Record, Step

GOOD = {
    "amax": 1.0, "scale_min": 0.1, "scale_max": 0.1, "saturated": 0.02, "flushed": 0.0,
    "subnormal": 0.0, "nan": 0, "inf": 0, "sqnr": 30.0, "staleness": None, "elements": 100,
}  # fmt: skip


def record(step=0, layer="a", operand="x", **values):
    return Record(step=step, layer=layer, operand=operand, **{**GOOD, **values})


CASES = {
    "not finite": ({"nan": 2, "inf": 1}, 3.0, "3"), "saturation": ({"staleness": 0.5}, 0.02, "2 %"),
    "stale scale": ({"staleness": -5.0}, -5.0, "2^5.0 too large"),
    "underflow": ({"flushed": 0.25}, 0.25, "25 %"), "noise": ({"sqnr": 12.0}, 12.0, "12.0 dB"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_of_finding_is_reported_once_at_its_worst_step(kind):
    values, value, text = CASES[kind]
    milder = {key: 0 if key in ("nan", "inf") else number for key, number in GOOD.items()}
    log = Log(
        records=[record(0, **milder), record(1, **values), record(1, "b"), record(2, **values)]
    )
    diagnosis = diagnose(log)
    (finding,) = diagnosis.findings
    assert (finding.step, finding.layer, finding.operand, finding.kind) == (1, "a", "x", kind)
    assert (finding.value, finding.shown()) == (value, text)
    assert not diagnosis.is_healthy
    assert f"a, x: {kind} ({text}). Try {finding.advice}." in str(diagnosis)
    assert json.loads(json.dumps(diagnosis.to_json()))["findings"][0]["kind"] == kind


def test_findings_are_sorted_by_kind_and_health_is_one_sentence():
    records = [record(layer=kind, **values) for kind, (values, _, _) in reversed(CASES.items())]
    assert [f.kind for f in diagnose(Log(records=records)).findings] == [*CASES]
    healthy = diagnose(Log(records=[record(), record(1)]))
    assert str(healthy) == (
        "FP8 is healthy: 1 operands in 2 watched steps, all finite, none clipped, "
        "SQNR 30.0 dB or more."
    )
    assert "Nothing was watched" in str(diagnose(Log()))


def test_a_gemm_in_high_precision_is_a_finding_unless_all_are():
    gemms = {"a": {"fprop": 1, "wgrad": 1}, "b": {"fprop, high precision": 2, "wgrad": 1}}
    (finding,) = diagnose(Log(steps=[Step(4, None, gemms)])).findings
    assert (finding.step, finding.layer, finding.operand) == (4, "b", "fprop")
    gemms_of_all_layers = {name: {"fprop, high precision": 1} for name in "ab"}
    assert diagnose(Log(steps=[Step(4, None, gemms_of_all_layers)])).is_healthy


@pytest.mark.parametrize("warn", [True, False])
def test_a_watch_warns_once_of_each_new_finding(warn):
    layer = float8lab.convert_to_float8(torch.nn.Linear(32, 32))
    x = torch.ones(16, 32)
    watch = float8lab.inspect.watch(layer, warn=warn)
    with warnings.catch_warnings(record=True) as caught_warnings, watch as w:
        warnings.simplefilter("always")
        for step in range(3):
            x[0, 0] = 1.0 if step == 0 else float("inf")
            layer(x).sum().backward()
            w.step()
    messages = [str(warning.message) for warning in caught_warnings]
    assert len(messages) == warn
    beginning = "step 1: (model), x: not finite (1). Try find the op"
    assert all(message.startswith(beginning) for message in messages)
    assert [(f.step, f.operand, f.kind) for f in w.alerts if f.operand == "x"] == [
        (1, "x", "not finite"),
        (2, "x", "not finite"),
    ]


def two_runs():
    a = Log(
        recipe="A()",
        steps=[Step(i, 2.0) for i in range(20)],
        records=[record(sqnr=20.0), record(layer="b"), record(layer="gone")],
    )
    b = Log(
        recipe="B()",
        steps=[Step(i, 2.0 if i < 18 else 2.1) for i in range(20)],
        records=[record(sqnr=26.0, flushed=0.5), record(layer="b", sqnr=28.0)],
    )
    return a, b


def test_compare_reports_the_loss_gap_and_sqnr_gains():
    comparison = compare(*two_runs())
    assert comparison.gap == pytest.approx(0.05)
    assert [(o.layer, o.sqnr_gain) for o in comparison.operands] == [
        ("a", 6.0), ("b", -2.0), ("gone", 0.0),
    ]  # fmt: skip
    text = str(comparison)
    assert "a: A()\nb: B()\n" in text
    assert "the loss of b is +5.00 % of a's" in text
    assert (
        "2 operands in both: SQNR of b is more than 1 dB higher in 1, lower in 1; 1 in one" in text
    )
    assert "19    2.0000  2.1000  +5.00 %" in text
    without_common_operands = compare(two_runs()[0], Log(steps=[Step(3, 2.5)]))
    assert without_common_operands.losses == ((3, 2.0, 2.5),)
    assert compare(Log(), Log()).gap is None
    diverged = compare(Log(steps=[Step(3, math.nan)]), two_runs()[0])
    assert json.loads(json.dumps(diverged.to_json(), allow_nan=False))["gap"] is None
    with pytest.raises(TypeError, match="original must be the log of a watch, as x is"):
        compare(Log(), torch.ones(1))


def test_the_compare_report_and_version_commands(tmp_path, capsys):
    pytest.importorskip("plotly")
    paths = [str(tmp_path / name) for name in "ab"]
    for log, path in zip(two_runs(), paths, strict=True):
        log.to_jsonl(path)
    assert command.main(["compare", *paths]) == 0
    assert f"a: {paths[0]}" in capsys.readouterr().out
    assert command.main(["compare", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] == pytest.approx(0.05)
    assert command.main(["report", paths[0]]) == 0
    assert capsys.readouterr().out.startswith("FP8 is healthy")
    assert command.main(["report", paths[1], "--strict"]) == 1
    assert "underflow" in capsys.readouterr().out
    assert command.main(["report", str(tmp_path / "none")]) == 2
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"float8lab {float8lab.__version__}\n"
