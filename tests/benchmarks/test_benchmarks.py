"""The common parts of benchmarks: statistics, header, tables, gates, shapes and offloading."""

import doctest
import json
import math
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline

from benchmarks import common, floor, offload, report, shapes, tensor_parallel


def test_timing_gives_median_and_quartiles():
    timing = common.Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 4.0)
    assert timing.describe() == "3.000 (2.000-4.000)"


def test_timing_of_one_sample_has_no_spread():
    assert common.Timing((2.0,)).quartiles == (2.0, 2.0)


def test_time_wall_calls_warm_up_and_samples():
    calls = []
    timing = common.time_wall(lambda: calls.append(1), warm_up=2, samples=3, calls=5)
    assert len(calls) == 2 + 3 * 5
    assert len(timing.samples) == 3
    assert all(sample >= 0 for sample in timing.samples)


def test_header_has_the_versions_and_the_command():
    facts = common.header()
    assert {"torch", "triton", "commit", "command"} <= facts.keys()
    assert ("GPU" in facts) == torch.cuda.is_available()
    assert facts["torch"] == torch.__version__
    assert facts["command"].startswith("python -m benchmarks.")
    assert all(isinstance(value, str) and value for value in facts.values())


def test_table_is_markdown():
    text = common.table(["layer", "ms", "x bf16"], [["bfloat16", "1.250", "1.00"], ["fp8", 2, "-"]])
    assert_expected_inline(
        text,
        """\
| layer    |    ms | x bf16 |
| :------- | ----: | -----: |
| bfloat16 | 1.250 |   1.00 |
| fp8      |     2 |      - |""",
    )


def test_json_history_grows_by_a_line(tmp_path):
    path = tmp_path / "new" / "history.json"
    for row in ("first", "second"):
        common.append_json(path, {"torch": "2"}, [row])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["rows"] for record in records] == [["first"], ["second"]]
    assert records[0]["header"]["torch"] == "2"


def test_sqnr_of_known_noise():
    expected = torch.full((100,), 2.0, dtype=torch.float64)
    assert common.sqnr(expected + 0.02, expected) == pytest.approx(40.0)
    assert common.sqnr(expected.clone(), expected) == math.inf


@pytest.mark.parametrize(
    "broken_result",
    [torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.ones(3)],
    ids=["nan", "inf", "shape"],
)
def test_sqnr_of_a_broken_result_is_nan(broken_result):
    assert math.isnan(common.sqnr(broken_result, torch.ones(2)))


def test_gate_admits_a_close_answer():
    expected = torch.randn(64, 64)
    gate = common.Gate({"y": expected}, floor_db=20.0)
    assert gate.admits({"y": expected + 0.01 * torch.randn(64, 64)})


@pytest.mark.parametrize("kind", ["far", "nan", "missing"])
def test_gate_refuses_a_wrong_answer(kind):
    expected = torch.randn(64, 64)
    answers = {"far": {"y": expected + torch.randn(64, 64)}, "nan": {"y": expected * math.nan}}
    gate = common.Gate({"y": expected}, floor_db=20.0)
    assert not gate.admits(answers.get(kind, {}))
    refusal = gate.refusal(gate.measure(answers.get(kind, {})))
    assert refusal is not None
    assert "below 20 dB" in refusal


@pytest.mark.parametrize(
    "module",
    [common, floor, offload, report, shapes, tensor_parallel],
    ids=lambda module: module.__name__,
)
def test_docstring_examples_run(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_shapes_give_the_sizes_of_the_three_gemms():
    (shape,) = (s for s in shapes.select("llama-8b") if s.name == "up")
    assert shape.gemms() == {
        "fprop": (16384, 14336, 4096), "dgrad": (16384, 4096, 14336), "wgrad": (14336, 4096, 16384),
    }  # fmt: skip
    assert shape.flops() == 6 * 16384 * 14336 * 4096
    assert shapes.select("llama-8b", M=8)[0].M == 8


def test_offload_is_compared_with_the_model_without_it():
    def result(offloaded, refusal, peak, moved=0):
        return offload.Result("bf16", offloaded, refusal, peak, moved, 4e9, (2.0, 4.0, 6.0))

    lines = offload.rows([result(0, None, 9e9), result(3, None, 6e9, 8e9), result(5, "wrong", 5e9)])
    assert lines[1] == [
        "bf16", "3", "6.00", "3.00", "4.00", "4.000 (3.000-5.000)", "1.00x", "4000.0",
    ]  # fmt: skip
    assert lines[2][5:] == ["wrong", "-", "-"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_offload_needs_a_gpu():
    with pytest.raises(SystemExit, match="measures a CUDA GPU"):
        offload.main([])


def test_sustained_steps_take_turns():
    order = []

    def step(name: str) -> None:
        if order[-1:] != [name]:
            order.append(name)

    results = common.time_sustained(
        {name: partial(step, name) for name in "ab"}, seconds=0.01, rounds=3
    )
    assert order == ["a", "b"] * 3
    assert all(
        len(result.timing.samples) == 3 and result.timing.median > 0 for result in results.values()
    )
