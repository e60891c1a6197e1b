"""The table of what FP8 saves, and the bytes and seconds in it."""

import doctest

import pytest
import savings
import torch
from expecttest import assert_expected_inline

import float8lab
from float8lab import recipes


def test_table_on_a_gpu_has_times_and_sizes():
    base = savings.Cost(0.25, {"weights": 16_000_000_000, "peak of GPU memory": 40_000_000_000})
    fp8 = savings.Cost(0.2, {"weights": 8_000_000_000, "peak of GPU memory": 30_000_000_000})
    assert_expected_inline(
        savings.savings(base, fp8, "cuda"),
        """\
                        bf16       FP8  FP8 / bf16  saved
time a step         250.0 ms  200.0 ms        0.80   20 %
weights             16.00 GB   8.00 GB        0.50   50 %
peak of GPU memory  40.00 GB  30.00 GB        0.75   25 %""",
    )


def test_table_on_a_cpu_says_that_fp8_is_emulated():
    base = savings.Cost(0.9, {"saved for backward": 1_000_000, "gathered": 0})
    fp8 = savings.Cost(1.8, {"saved for backward": 520_000, "gathered": 0})
    table = savings.savings(base, fp8, "cpu", names=("float32", "FP8"), unit="token")
    assert_expected_inline(
        table,
        """\
                     float32       FP8  FP8 / float32  saved
time a token        900.0 ms    1.80 s              -      -
saved for backward    1.0 MB  520.0 kB           0.52   48 %
gathered                   -         -              -      -
On a CPU, FP8 is emulated and bfloat16 often slow: the sizes are a GPU's, the times are not.""",
    )


def test_runs_with_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"fp8 must have the sizes \['a'\]; got \['b'\]"):
        savings.savings(savings.Cost(1.0, {"a": 1}), savings.Cost(1.0, {"b": 1}), "cpu")


def test_meter_leaves_out_the_first_quarter():
    meter = savings.Meter("cpu")
    meter.seconds = [100.0, 100.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    assert meter.cost() == savings.Cost(2.0, {})


def test_counted_bytes_are_those_of_the_tensors():
    """Bytes of [B, K] activations and a [N, K] weight in bfloat16, then with FP8 activations."""
    B, K, N = 64, 32, 128
    model = torch.nn.Linear(K, N, bias=False)
    x = torch.randn(B, K, requires_grad=True)
    before = savings.counted(model, x, autocast=True)
    assert before["weights"] == 4 * N * K
    assert before["saved for backward"] == 2 * (B * K + N * K + B * N)  # x, cast weight, output
    float8lab.convert_to_float8(model, recipes.Float8CurrentScaling())
    after = savings.counted(model, x, autocast=True)
    assert after["weights"] == 4 * N * K
    casts = after["saved for backward"] - 2 * B * N
    assert casts == B * K + 3 * 4  # x, its scale, and the factors that cast the weight again


@pytest.mark.gpu
def test_meter_reads_the_peak_of_the_gpu():
    meter = savings.Meter("cuda")
    with meter:
        torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    assert meter.cost({"weights": 3}).sizes["peak of GPU memory"] >= 1 << 26


def test_docstring_examples_run():
    assert doctest.testmod(savings).failed == 0
