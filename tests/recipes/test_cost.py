"""Estimated costs: predicted times against measured ones."""

import itertools

import pytest

from float8lab import recipes
from float8lab.recipes import Auto
from float8lab.recipes.cost import MODES, estimate

BLOCK, ROWWISE, CURRENT, DELAYED = Auto().candidates
PRECISIONS = (None, BLOCK, ROWWISE, CURRENT, DELAYED)
MEASURED = {
    (4096, 4096): (2.054, 1.572, 1.478, 1.368, 1.294),
    (14336, 4096): (7.674, 5.246, 4.851, 4.404, 4.243),
    (4096, 14336): (7.565, 5.232, 4.711, 4.461, 4.295),
}
"""GPU ms of a training step by (N, K), with M = 16384, of bfloat16 and the recipes of PRECISIONS.
From one H200, "Linear layer" in benchmarks/RESULTS.md at commit 8b34738."""
MEASURED_EXPERTS = {
    (8, 2048, 7168): (3.761, 3.022, 3.059, 2.810, 2.569),
    (128, 768, 2048): (0.637, 0.836, 1.216, 0.956, 0.790),
}
"""The same by (E, N, K), with M = 32768: "Grouped linear layer" at commit cbf53cf."""
SHAPES = [
    (64, 64), (512, 512), (640, 640), (896, 896), (960, 960), (1024, 1024), (1536, 512),
    (512, 1536), (4096, 4096), (17, 50304),
]  # fmt: skip

each_recipe = pytest.mark.parametrize("recipe", PRECISIONS, ids=lambda r: type(r).__name__)


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_estimates_are_within_8_percent_of_measured_times(shape):
    for recipe, measured in zip(PRECISIONS, MEASURED[shape], strict=True):
        assert 1e3 * estimate(recipe, 16384, *shape).gpu == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("shape", MEASURED_EXPERTS, ids=str)
def test_estimates_of_experts_are_within_10_percent_of_measured_times(shape):
    experts, N, K = shape
    for recipe, measured in zip(PRECISIONS, MEASURED_EXPERTS[shape], strict=True):
        estimated = 1e3 * estimate(recipe, 32768, N, K, experts=experts).gpu
        assert estimated == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_estimates_have_the_order_of_measured_times(shape):
    estimated = [estimate(recipe, 16384, *shape).gpu for recipe in PRECISIONS]
    order = sorted(range(len(PRECISIONS)), key=MEASURED[shape].__getitem__)
    assert sorted(range(len(PRECISIONS)), key=estimated.__getitem__) == order


@each_recipe
def test_gpu_time_grows_with_the_tokens_and_cpu_time_does_not(recipe):
    for shape in SHAPES:
        times = [estimate(recipe, 2**power, *shape) for power in range(18)]
        assert all(b.gpu > a.gpu > 0 for a, b in itertools.pairwise(times)), shape
        assert len({t.cpu for t in times}) == 1, shape


@pytest.mark.parametrize("recipe", PRECISIONS[1:], ids=lambda r: type(r).__name__)
def test_fp8_pays_from_some_number_of_tokens_on_or_never(recipe):
    # Where a token saves as many seconds, NK * 6 * (1 / 763e12 - 1 / rate), as its casts take.
    widths = {DELAYED: 553, CURRENT: 800, ROWWISE: 931, BLOCK: 739}
    for N, K in SHAPES:
        pays = [
            estimate(recipe, 2**power, N, K).gpu < estimate(None, 2**power, N, K).gpu
            for power in range(26)
        ]
        assert pays == sorted(pays), (N, K)
        assert pays[-1] == (widths[recipe] < 2 * N * K / (N + K)), (N, K)


def test_gemms_in_high_precision_add_time():
    mixed = recipes.Float8CurrentScaling(override_linear_precision=(False, False, True))
    fp8, partly_fp8, high_precision = (
        estimate(r, 16384, 4096, 4096).gpu for r in (CURRENT, mixed, None)
    )
    assert fp8 < partly_fp8 < high_precision
    no_fp8 = recipes.Float8CurrentScaling(override_linear_precision=(True, True, True))
    assert estimate(no_fp8, 16384, 4096, 4096).gpu > high_precision  # its casts have no use


@each_recipe
def test_cpu_time_falls_when_compiled_and_is_zero_in_a_graph(recipe):
    eager, compiled, graph = (estimate(recipe, 16, 16, 16, mode=mode).cpu for mode in MODES)
    assert eager > compiled > graph == 0


def test_recipe_without_measurements_raises():
    with pytest.raises(ValueError, match=r"recipe must have scales .*; got MXFP8BlockScaling\(\)"):
        estimate(recipes.MXFP8BlockScaling(), 16, 16, 16)
