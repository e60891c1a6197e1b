"""Linear: the output and every gradient against float64, every parameter, every shape."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import float8lab
from float8lab import recipes
from float8lab.nn import gemm, scales
from float8lab.recipes import Format
from float8lab.tensor import Float8Tensor
from tests.nn.composition import documented_sqnr, sqnr
from tests.nn.models import UNDELAYED, saved_bytes

RECIPES = {"delayed": recipes.DelayedScaling(), **UNDELAYED}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())

SQNR_RECIPES = {
    **RECIPES, "delayed-e4m3": recipes.DelayedScaling(fp8_format=Format.E4M3),
    "current-e4m3": recipes.Float8CurrentScaling(fp8_format=Format.E4M3),
    "nvfp4": recipes.NVFP4BlockScaling(),
}  # fmt: skip
# The SQNR in dB of output, dX and dW against float64 for normally distributed tensors. e4m3 rounds
# to 3 mantissa bits, which leaves about 31.5 dB for an operand and 28.5 dB for two. An e5m2
# gradient (2 bits) leaves about 25.5 dB, or 24.5 dB with an e4m3 operand. e2m1 (1 bit) leaves about
# 19.5 dB for an operand and 16.5 dB for two.
SQNR = {
    "delayed": (28.0, 24.0, 24.0), "current": (28.0, 24.0, 24.0), "delayed-e4m3": (28.0,) * 3,
    "current-e4m3": (28.0,) * 3, "rowwise": (28.0,) * 3, "block": (28.0,) * 3, "mx": (27.5,) * 3,
    "nvfp4": (16.0,) * 3,
}  # fmt: skip


def test_sqnr_is_that_of_the_table_in_the_documentation():
    rows = {
        "`DelayedScaling`, `Float8CurrentScaling`": ("delayed", "current"),
        "the same with `Format.E4M3`": ("delayed-e4m3", "current-e4m3"),
        "`Float8RowwiseScaling`, `Float8BlockScaling`": ("rowwise", "block"),
        "`MXFP8BlockScaling`": ("mx",), "`NVFP4BlockScaling`": ("nvfp4",),
    }  # fmt: skip
    table = documented_sqnr("Accuracy of a linear layer")
    assert table.keys() == rows.keys()
    assert {name: table[row] for row, names in rows.items() for name in names} == SQNR


def run(module, x, dy, recipe=None):
    """The output and the gradients of one forward and backward."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(dy)
    return y.detach(), x.grad, {n: p.grad for n, p in module.named_parameters()}


def float64_run(module, x, dy):
    reference = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    reference = reference.to(x.device).double()
    reference.load_state_dict({k: v.double() for k, v in module.state_dict().items()})
    x = x.detach().double().requires_grad_()
    y = reference(x)
    y.backward(dy.double())
    return y.detach(), x.grad, {n: p.grad for n, p in reference.named_parameters()}


@pytest.mark.parametrize("leading", [(32,), (33,), (2, 16), (3, 11)], ids=str)
@pytest.mark.parametrize("features", [48, 40])
def test_outputs_are_no_views_and_may_be_modified_in_place(leading, features):
    layer = float8lab.Linear(32, features, device="cpu")
    x = torch.randn(*leading, 32, requires_grad=True)
    with float8lab.autocast(recipe=RECIPES["current"]):
        y = layer(x)
    assert y.shape == (*leading, features)
    assert not y._is_view()
    y.add_(1.0).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", SQNR_RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sqnr_of_output_and_gradients_is_as_documented(name, dtype, device):
    recipe = SQNR_RECIPES[name]
    layer = float8lab.Linear(256, 192, device=device, params_dtype=dtype)
    nn.init.normal_(layer.bias, std=0.1)  # a larger bias would drown the noise of the GEMM
    x = torch.randn(4, 96, 256, device=device, dtype=dtype)
    dy = torch.randn(4, 96, 192, device=device, dtype=dtype)
    run(layer, x, dy, recipe)  # delayed scaling: give the gradients a history
    y, dx, grads = run(layer, x, dy, recipe)
    y64, dx64, grads64 = float64_run(layer, x, dy)
    assert y.dtype == dx.dtype == dtype
    measured = (sqnr(y, y64), sqnr(dx, dx64), sqnr(grads["weight"], grads64["weight"]))
    # A higher ratio is that of another format, or of a GEMM in high precision.
    assert all(0 <= m - s < 2 for m, s in zip(measured, SQNR[name], strict=True)), measured
    bias_noise = 60 if dtype == torch.float32 else 40  # the sum is in float32, with one rounding
    assert sqnr(grads["bias"], grads64["bias"]) > bias_noise


@each_recipe
@pytest.mark.parametrize(
    ("shape", "K", "N"),
    [
        ((1,), 1, 1), ((7,), 17, 5), ((2, 3, 5), 33, 50), ((), 40, 24), ((0,), 16, 32),
        ((3, 0), 8, 8),
    ],
    ids=["1", "odd", "N-D", "vector", "empty", "empty-N-D"],
)  # fmt: skip
def test_small_odd_and_empty_shapes_are_near_float64(recipe, shape, K, N, device):
    layer = float8lab.Linear(K, N, device=device)
    x, dy = torch.randn(*shape, K, device=device), torch.randn(*shape, N, device=device)
    y, dx, grads = run(layer, x, dy, recipe)
    y64, dx64, grads64 = float64_run(layer, x, dy)
    assert y.shape == (*shape, N)
    assert dx.shape == x.shape
    pairs = [(y, y64), (dx, dx64), *((grads[n], grads64[n]) for n in grads)]
    for actual, expected in pairs:
        assert actual.shape == expected.shape
        if expected.numel():
            assert (actual.double() - expected).norm() <= 0.15 * expected.norm() + 1e-12


@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["high", "current"])
def test_jagged_nested_tensors_equal_their_values(recipe):
    layer, dy = float8lab.Linear(40, 24, return_bias=True, device="cpu"), torch.randn(7, 24)
    parts = [torch.randn(size, 40) for size in (3, 0, 4)]
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged).requires_grad_()
    values = torch.cat(parts).requires_grad_()
    with float8lab.autocast(recipe is not None, recipe=recipe):
        (y, bias), (expected, _) = layer(jagged), layer(values)
    assert bias is layer.bias
    assert y.shape[:2] == jagged.shape[:2]  # the two may be added
    y.values().backward(dy)
    expected.backward(dy)
    assert torch.equal(y.values(), expected)
    assert torch.equal(jagged.grad.values(), values.grad)


def test_tensors_of_other_layouts_are_refused():
    layer = float8lab.Linear(40, 24, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the layout is a prototype
        nested = torch.nested.nested_tensor([torch.randn(3, 40)])
    with pytest.raises(TypeError, match=r"inp must have layout torch.jagged if it is nested; got"):
        layer(nested)
    with (
        float8lab.autocast(recipe=RECIPES["current"]),
        pytest.raises(TypeError, match=r"^inp must be dense .* got torch.sparse_coo. Give"),
    ):
        layer(torch.eye(8, 40).to_sparse())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@each_recipe
def test_nonfinite_values_propagate_as_in_torch_and_leave_no_trace(recipe, value, device):
    layer = float8lab.Linear(64, 48, device=device)
    for operand in ("x", "dy", "weight"):
        x, dy = torch.randn(32, 64, device=device), torch.randn(32, 48, device=device)
        run(layer, x, dy, recipe)  # delayed scales of finite tensors
        with torch.no_grad():
            {"x": x, "dy": dy, "weight": layer.weight}[operand][3, 5] = value
        results = flatten_results(run(layer, x, dy, recipe))
        for actual, plain in zip(results, flatten_results(run(layer, x, dy)), strict=True):
            assert torch.equal(actual.isfinite(), plain.isfinite())
        with torch.no_grad():
            layer.weight[3, 5] = 1.0
        results = flatten_results(run(layer, torch.ones_like(x), torch.ones_like(dy), recipe))
        assert all(t.isfinite().all() for t in results)  # it is in no amax history


def flatten_results(results):
    y, dx, grads = results
    return [y, dx, *grads.values()]


@each_recipe
def test_grad_scaler_sees_an_overflow(recipe):
    """If a gradient overflows float16, the step is skipped and the scale halved, as in torch."""
    plain = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False))
    model = float8lab.convert_to_float8(copy.deepcopy(plain), recipe)
    x, target = torch.randn(2, 32, 64)
    steps = {}
    for trained_model in (plain, model):
        optimizer = torch.optim.SGD(trained_model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        skipped, norms = [], []
        for _ in range(4):
            before = scaler.get_scale()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (trained_model(x) - target).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(
                torch.stack([p.grad.norm() for p in trained_model.parameters()]).norm().item()
            )
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.get_scale() < before)
        steps[trained_model] = skipped, norms
    (skipped, norms), (plain_skipped, plain_norms) = steps[model], steps[plain]
    assert skipped[0]
    assert plain_skipped[0]
    assert not skipped[-1]
    assert norms[-1] == pytest.approx(plain_norms[-1], rel=0.05)


@each_recipe
def test_outside_autocast_linear_equals_torch_nn_linear(recipe):
    layer = float8lab.Linear(32, 16, device="cpu")
    x = torch.randn(5, 32)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert isinstance(layer, nn.Linear)
    assert torch.equal(layer(x), expected)
    with float8lab.autocast(recipe=recipe), float8lab.autocast(enabled=False):
        assert torch.equal(layer(x), expected)


@each_recipe
def test_only_gemms_of_required_gradients_run(recipe):
    layer = float8lab.Linear(32, 16, device="cpu")
    layer.weight.requires_grad_(False)
    x = torch.randn(8, 32, requires_grad=True)
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=recipe):
        layer(x).sum().backward()
    assert counts.fp8 + counts.high_precision == 2  # no wgrad
    assert layer.weight.grad is None
    assert x.grad is not None
    layer.weight.requires_grad_(True)
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=recipe):
        layer(x.detach()).sum().backward()
    assert counts.fp8 + counts.high_precision == 2  # no dgrad
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=recipe), torch.no_grad():
        layer(x)
    assert counts.fp8 + counts.high_precision == 1


@each_recipe
def test_activations_are_saved_in_fp8(recipe):
    x = torch.randn(4096, 256, dtype=torch.bfloat16, requires_grad=True)
    layer = float8lab.Linear(256, 128, device="cpu", params_dtype=torch.bfloat16)
    high = saved_bytes(layer, x)
    weight_cast = 256 * 128 if recipe.linear.w.block[0] == recipe.linear.w.block[1] else 0
    assert high == 4096 * 256 * 2
    assert saved_bytes(layer, x, recipe) - weight_cast <= 0.55 * high


@pytest.mark.parametrize("gemm_index", [0, 1, 2], ids=["fprop", "dgrad", "wgrad"])
def test_override_linear_precision_keeps_the_chosen_gemm_in_high_precision(gemm_index):
    override = tuple(i == gemm_index for i in range(3))
    recipe = recipes.Float8CurrentScaling(override_linear_precision=override)
    layer = float8lab.Linear(64, 64, device="cpu")
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    with float8lab.count_gemms() as counts:
        y, dx, grads = run(layer, x, dy, recipe)
    assert (counts.fp8, counts.high_precision) == (2, 1)
    y64, dx64, grads64 = float64_run(layer, x, dy)
    results = [(y, y64), (dx, dx64), (grads["weight"], grads64["weight"])]
    for i, (actual, expected) in enumerate(results):
        assert (sqnr(actual, expected) > 100) == (i == gemm_index)


def test_hybrid_rounds_gradients_to_e5m2():
    layer = float8lab.Linear(16, 16, bias=False, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
    dy = torch.full((16, 16), 1.125)
    dy[0, 0] = 57344.0
    exact_scale = recipes.Float8CurrentScaling(power_of_2_scale=True)
    _, dx, _ = run(layer, torch.zeros(16, 16), dy, exact_scale)
    assert dx[1, 1] == 1.0  # two mantissa bits: 1.125 rounds to even
    _, dx, _ = run(
        layer, torch.zeros(16, 16), dy.clamp(max=448.0),
        recipes.Float8CurrentScaling(power_of_2_scale=True, fp8_format=Format.E4M3),
    )  # fmt: skip
    assert dx[1, 1] == 1.125  # three mantissa bits


def test_amax_epsilon_bounds_the_scale_from_below():
    layer = float8lab.Linear(16, 16, bias=False, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
    x = torch.full((1, 16), 1e-3)
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling(amax_epsilon=448.0 * 2)):
        assert torch.equal(layer(x), torch.zeros(1, 16))  # scale 2 rounds 1e-3 to 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_recipe
def test_torch_autocast_only_rounds_the_result_of_the_gemm(recipe, dtype):
    """The output is rounded once, at the end; GEMMs of FP8 data exceed the range of float16."""
    layer, x = float8lab.Linear(256, 16, device="cpu"), torch.randn(8, 256, requires_grad=True)
    reference_layer, second_layer = copy.deepcopy(layer), copy.deepcopy(layer)
    with float8lab.autocast(recipe=recipe):
        expected = reference_layer(x).to(dtype)
        with torch.autocast("cpu", dtype):
            assert torch.equal(layer(x), expected)
    with torch.autocast("cpu", dtype), float8lab.autocast(recipe=recipe):
        y = second_layer(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad.dtype == second_layer.weight.grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
@each_recipe
def test_torch_autocast_only_rounds_the_result_of_the_gemm_on_a_gpu(recipe, kind, dtype):
    x, splits = torch.randn(48, 256, device="cuda"), ()
    if kind == "linear":
        layer: Any = float8lab.Linear(256, 32, device="cuda")
    else:
        layer, splits = float8lab.GroupedLinear(2, 256, 32, device="cuda"), ([20, 28],)
    with float8lab.autocast(recipe=recipe):
        expected = layer(x, *splits)
        for _ in range(3):  # recorded and repeated
            with torch.autocast("cuda", dtype):
                y = layer(x, *splits)
                assert torch.is_autocast_enabled("cuda")
            tolerance = torch.finfo(dtype).eps * float(expected.detach().abs().max())
            torch.testing.assert_close(y, expected.to(dtype), rtol=0, atol=tolerance)


def test_default_initialization_has_zero_bias_and_std_0_023():
    layer = float8lab.Linear(1000, 300, device="cpu")
    assert torch.equal(layer.bias, torch.zeros(300))
    assert layer.weight.std().item() == pytest.approx(0.023, rel=0.02)
    assert layer.weight.mean().abs() < 1e-3


def test_init_method_bias_and_params_dtype_take_effect():
    layer = float8lab.Linear(
        8, 4, bias=False, init_method=nn.init.ones_, params_dtype=torch.bfloat16, device="cpu"
    )
    assert layer.bias is None
    assert torch.equal(layer.weight, torch.ones(4, 8, dtype=torch.bfloat16))
    assert float8lab.Linear(8, 4, device="cpu").weight.dtype == torch.get_default_dtype()


@pytest.mark.parametrize("name", ["Linear", "GroupedLinear"])
def test_weights_are_initialized_from_the_stream_of_the_rng_tracker(name):
    tracker = float8lab.CudaRNGStatesTracker(device="cpu")
    tracker.add("model-parallel-rng", 5)
    tracker.add("experts", 6)
    sizes = (2, 8, 4) if name == "GroupedLinear" else (8, 4)
    make = functools.partial(getattr(float8lab, name), *sizes, device="cpu")
    streams = ((5, {}), (6, {"rng_tracker_name": "experts"}))
    for seed, kwargs in streams:
        layer = make(get_rng_state_tracker=lambda: tracker, **kwargs)
        torch.manual_seed(seed)
        assert all(map(torch.equal, layer.parameters(), make().parameters()))
        assert layer.use_bias
    assert not make(bias=False, rng_tracker_name=None).use_bias
    with pytest.raises(ValueError, match="name must be one given to add"):
        make(get_rng_state_tracker=lambda: tracker, rng_tracker_name="other")


def test_default_device_is_the_gpu_unless_torch_has_another():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert float8lab.Linear(4, 4).weight.device.type == expected
    assert float8lab.RotaryPositionEmbedding(4)(2).device.type == expected
    with torch.device("meta"):
        assert float8lab.Linear(4, 4).weight.is_meta
    with torch.device("cpu"):
        assert float8lab.Linear(4, 4).weight.device.type == "cpu"
    assert float8lab.Linear(4, 4, device="meta").weight.is_meta
    torch.set_default_device("cpu")
    try:
        assert float8lab.Linear(4, 4).weight.device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_return_bias_returns_the_bias_without_adding_it():
    layer = float8lab.Linear(16, 8, return_bias=True, device="cpu")
    nn.init.normal_(layer.bias)
    x = torch.randn(4, 16)
    y, bias = layer(x)
    assert bias is layer.bias
    assert torch.equal(y, nn.functional.linear(x, layer.weight))
    with float8lab.autocast(recipe=RECIPES["current"]):
        y8, bias8 = layer(x)
    assert bias8 is layer.bias
    assert sqnr(y8, y) > 25


@each_recipe
def test_without_gradients_nothing_is_cast_columnwise(recipe, monkeypatch):
    columnwise_specs, quantize = [], gemm.quantize

    def recording_quantize(x, rowwise, columnwise, *rest):
        columnwise_specs.append(columnwise)
        return quantize(x, rowwise, columnwise, *rest)

    monkeypatch.setattr(gemm, "quantize", recording_quantize)
    layer, x = float8lab.Linear(64, 32, device="cpu"), torch.randn(48, 64)
    with float8lab.autocast(recipe=recipe):
        layer(x)  # sets the first delayed scales
        y = layer(x)
        assert any(columnwise_specs)
        columnwise_specs.clear()
        with torch.no_grad():
            assert torch.equal(layer(x), y)
    assert columnwise_specs == [None, None]


@pytest.mark.parametrize(
    "split",
    [("query", "key_", "value"), {"query": 8, "key": 4, "value_": 12}],
    ids=["equal", "sizes"],
)
def test_split_parameters_equal_one_parameter(split):
    torch.manual_seed(1)
    layer = float8lab.Linear(16, 24, parameters_split=split, device="cpu")
    names = [f"{n}_{kind}" for n in ("query", "key", "value") for kind in ("weight", "bias")]
    assert [n for n, _ in layer.named_parameters()] == names
    torch.manual_seed(1)
    unsplit = float8lab.Linear(16, 24, device="cpu")
    x, dy = torch.randn(4, 16), torch.randn(4, 24)
    y, dx, grads = run(layer, x, dy, RECIPES["current"])
    y2, dx2, grads2 = run(unsplit, x, dy, RECIPES["current"])
    assert torch.equal(y, y2)
    assert torch.equal(dx, dx2)
    parts = torch.cat([grads[f"{n}_weight"] for n in ("query", "key", "value")])
    assert torch.equal(parts, grads2["weight"])


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_split_parameters_stored_in_fp8_are_not_requantized(recipe):
    """A second cast would choose other scales, because no row's largest value is 448."""
    with float8lab.fp8_model_init(recipe=RECIPES[recipe]):
        layer, unsplit = (
            float8lab.Linear(128, 384, parameters_split=split, device="cpu")
            for split in (("query", "key", "value"), None)
        )
    for parameter in layer.parameters():
        if isinstance(parameter, Float8Tensor):
            parameter.qdata.copy_(torch.randint(8, 25, parameter.shape) / 8)
    unsplit.weight = nn.Parameter(
        torch.cat([layer.query_weight, layer.key_weight, layer.value_weight])
    )
    x, dy = torch.randn(32, 128), torch.randn(32, 384)
    y, dx, grads = run(layer, x, dy, RECIPES[recipe])
    y2, dx2, grads2 = run(unsplit, x, dy, RECIPES[recipe])
    assert torch.equal(y, y2)
    assert torch.equal(dx, dx2)
    assert torch.equal(grads["key_weight"], grads2["weight"][128:256])


def test_invalid_parameters_split_is_refused():
    with pytest.raises(ValueError, match="must add up to out_features 24; got"):
        float8lab.Linear(16, 24, parameters_split={"a": 8, "b": 8}, device="cpu")
    with pytest.raises(ValueError, match="divides out_features 25; got 2 names"):
        float8lab.Linear(16, 25, parameters_split=("a", "b"), device="cpu")
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation must be False where parameters"):
        float8lab.Linear(16, 24, parameters_split=("a", "b"), fuse_wgrad_accumulation=True)


def test_a_tensor_parallel_layer_is_sharded_and_requires_its_group():
    column = float8lab.Linear(16, 48, tp_size=2, parallel_mode="column", device="cpu")
    row = float8lab.Linear(16, 48, tp_size=2, parallel_mode="Row", device="cpu")
    assert (column.weight.shape, column.bias.shape) == ((24, 16), (24,))
    assert (row.weight.shape, row.bias.shape) == ((48, 8), (48,))
    assert (column.weight.partition_dim, row.weight.partition_dim) == (0, 1)
    assert column.weight.tensor_model_parallel
    assert column.bias.tensor_model_parallel
    assert not hasattr(row.bias, "tensor_model_parallel")  # unsharded on every rank
    with pytest.raises(RuntimeError, match="tp_group must be set before the first call"):
        column(torch.ones(2, 16))
    with pytest.raises(ValueError, match="out_features must be a multiple of the 2"):
        float8lab.Linear(16, 17, tp_size=2, parallel_mode="column", device="cpu")
    with pytest.raises(ValueError, match="in_features must be a multiple of the 2"):
        float8lab.Linear(17, 16, tp_size=2, parallel_mode="row", device="cpu")
    split = {"q": 8, "k": 3}
    with pytest.raises(ValueError, match=r"parameters_split\['k'\] must be a multiple of the 2"):
        float8lab.Linear(
            16, 11, tp_size=2, parallel_mode="column", parameters_split=split, device="cpu"
        )
    assert float8lab.Linear(16, 16, tp_size=2, device="cpu").weight.shape == (16, 16)
    with pytest.raises(ValueError, match="parallel_mode must be one of None"):
        float8lab.Linear(16, 16, parallel_mode="diagonal", device="cpu")
    single = float8lab.Linear(16, 16, parallel_mode="column", sequence_parallel=True, device="cpu")
    assert single(torch.ones(2, 16)).shape == (2, 16)


@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["high", "current"])
def test_a_compiled_layer_accumulates_into_main_grad(recipe):
    layer = float8lab.Linear(32, 16, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for m in (layer, compiled):
        m.weight.main_grad = torch.full((16, 32), 7.0)
    x, dy = torch.randn(8, 32), torch.randn(8, 16)
    for microbatch in range(3):
        for m in (layer, compiled):
            with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
                y = m(x * (microbatch + 1), is_first_microbatch=microbatch == 0)
            y.backward(dy)
    assert torch.equal(compiled.weight.main_grad, layer.weight.main_grad)


def test_a_compiled_layer_marks_a_weight_whose_gradient_it_has_accumulated():
    """Megatron's hooks set the mark to False before each step."""
    layer = float8lab.Linear(32, 16, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.zeros(16, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    recipe = RECIPES["current"]
    for is_trained in (False, True):
        layer.weight.grad_added_to_main_grad = False
        with torch.set_grad_enabled(is_trained), float8lab.autocast(recipe=recipe):
            y = compiled(torch.ones(8, 32))
        assert layer.weight.grad_added_to_main_grad is is_trained
    y.sum().backward()
    assert layer.weight.main_grad.any()
    assert layer.weight.grad.shape == (16, 32)  # to be thrown away


@pytest.mark.parametrize(
    ("main_grad", "got"),
    [
        (torch.zeros(4, 8, dtype=torch.int32), "torch.int32"),
        (torch.zeros(8, 4), "8, 4"),
        (3.0, "3.0"),
    ],
)
def test_an_invalid_main_grad_is_refused(main_grad, got):
    layer, x = float8lab.Linear(8, 4, device="cpu", fuse_wgrad_accumulation=True), torch.randn(2, 8)
    layer.weight.main_grad = main_grad
    for enabled in (True, False):
        with (
            float8lab.autocast(enabled=enabled),
            pytest.raises(TypeError, match=f"main_grad of the weight must be .* got .*{got}"),
        ):
            layer(x)
    layer.weight.main_grad = None  # without one the gradient goes to .grad
    with float8lab.autocast():
        layer(x).sum().backward()
    assert layer.weight.grad is not None


PRUNED = {
    "Linear": {"weight": 1},
    "LayerNormLinear": {"layer_norm_weight": 0, "layer_norm_bias": 0, "weight": 1},
    "LayerNormMLP": {
        "layer_norm_weight": 0, "layer_norm_bias": 0, "fc1_weight": 1, "fc2_weight": 0,
        "fc2_bias": 0,
    },
}  # fmt: skip
"""The parameters that a pruning of inputs shortens, with the dimension of inputs, by module."""


@pytest.mark.parametrize("name", PRUNED)
def test_layers_with_pruned_parameters_use_the_sizes_of_the_parameters(name):
    layer, small = (getattr(float8lab, name)(size, 8, device="cpu") for size in (32, 16))
    x = torch.randn(4, 16)
    for module in (layer, small):
        float8lab.convert_to_float8(module)
    for key, dim in PRUNED[name].items():
        parameter = nn.Parameter(getattr(layer, key).narrow(dim, 0, 16))
        setattr(layer, key, parameter)
    small.load_state_dict(layer.state_dict())
    results = []
    for module in (layer, small):
        inp = x.clone().requires_grad_()
        y = module(inp)
        y.square().sum().backward()
        results.append((y, inp.grad, *(p.grad for p in module.parameters())))
    assert all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))
    sizes = r"inp must have 16 as its last dimension .* got shape \(4, 32\)"
    with pytest.raises(ValueError, match=sizes):
        layer(torch.randn(4, 32))


def test_a_norm_of_another_size_than_the_weight_is_refused():
    layer = float8lab.LayerNormLinear(32, 8, device="cpu")
    layer.weight = nn.Parameter(layer.weight[:, :16])
    for features, message in ((16, r"^layer_norm_weight must .*\(32,\)"), (32, "^inp must")):
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(4, features))


def count_weight_casts(monkeypatch):
    shapes = []
    original = gemm.quantize

    def counting(x, *args, **kwargs):
        if isinstance(x, torch.nn.Parameter):
            shapes.append(tuple(x.shape))
        return original(x, *args, **kwargs)

    for module in (scales, gemm):
        monkeypatch.setattr(module, "quantize", counting)
    return shapes


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_is_first_microbatch_casts_the_weight_once_and_changes_no_result(name, monkeypatch):
    weight_casts = count_weight_casts(monkeypatch)
    layer, plain = float8lab.Linear(32, 32, device="cpu"), float8lab.Linear(32, 32, device="cpu")
    plain.load_state_dict(layer.state_dict())
    for microbatch in range(3):
        x = torch.randn(4, 32) * (microbatch + 1)
        for m, first in ((layer, microbatch == 0), (plain, None)):
            with float8lab.autocast(recipe=RECIPES[name]):
                m(x, is_first_microbatch=first).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert len(weight_casts) == 1 + 3
    with float8lab.autocast(recipe=RECIPES[name]):
        layer(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.mul_(2.0)
        layer(x, is_first_microbatch=False)  # the change is noticed nevertheless
    assert len(weight_casts) == 1 + 3 + 2


@pytest.mark.parametrize("name", RECIPES)
def test_fused_optimizers_leave_no_stale_cast(name):
    """Fused optimizers do not increment the version counter."""
    layer = float8lab.Linear(32, 32, device="cpu")
    plain = copy.deepcopy(layer)
    for m in (layer, plain):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.5, fused=m is layer)
        for step in range(4):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            with float8lab.autocast(recipe=RECIPES[name]):
                loss = m(x).square().sum()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close([*layer.parameters()], [*plain.parameters()], rtol=1e-3, atol=1e-3)


def test_a_write_through_data_is_noticed_because_no_cast_is_kept():
    layer = float8lab.Linear(32, 32, bias=False, device="cpu")
    x = torch.randn(4, 32)
    with float8lab.autocast(recipe=RECIPES["current"]):
        layer(x).sum().backward()
        assert layer._fp8.weight_cast is None
        layer.weight.data.zero_()  # invisible to the version counter
        assert torch.equal(layer(x), torch.zeros(4, 32))


@each_recipe
def test_fp8_model_init_stores_one_byte_for_each_weight_element(recipe):
    with float8lab.fp8_model_init(recipe=recipe):
        layer = float8lab.Linear(256, 128, device="cpu")
    weight = layer.weight
    assert isinstance(weight, Float8Tensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.qdata.numel() * weight.qdata.element_size() == 256 * 128
    assert weight.spec == recipe.linear.w
    x, dy = torch.randn(16, 256), torch.randn(16, 128)
    plain = float8lab.Linear(256, 128, device="cpu")
    with torch.no_grad():
        plain.weight.copy_(weight.dequantize())
    outside_autocast = zip(
        flatten_results(run(layer, x, dy)), flatten_results(run(plain, x, dy)), strict=True
    )
    assert all(torch.equal(actual, expected) for actual, expected in outside_autocast)
    run(layer, x, dy, recipe)
    y, dx, grads = run(layer, x, dy, recipe)
    y64, dx64, grads64 = float64_run(plain, x, dy)
    # Only x (e4m3), dy (e5m2 under HYBRID) and the weight's transpose are rounded.
    assert min(sqnr(y, y64), sqnr(dx, dx64), sqnr(grads["weight"], grads64["weight"])) > 24
    assert type(grads["weight"]) is torch.Tensor
    assert float8lab.Linear(4, 4, device="cpu").weight.__class__ is nn.Parameter


def test_weights_stored_in_fp8_are_not_requantized_for_fprop():
    with float8lab.quantized_model_init():
        layer = float8lab.Linear(33, 17, bias=False, device="cpu")
    x = torch.eye(33)
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling(power_of_2_scale=True)):
        y = layer(x)
    assert torch.equal(y, layer.weight.dequantize().t())


def test_preserve_high_precision_init_val_keeps_the_unquantized_weight():
    torch.manual_seed(3)
    with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
        layer = float8lab.Linear(16, 16, device="cpu")
    torch.manual_seed(3)
    plain = float8lab.Linear(16, 16, device="cpu")
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None
    with float8lab.fp8_model_init(), float8lab.fp8_model_init(enabled=False):
        assert not isinstance(float8lab.Linear(4, 4, device="cpu").weight, Float8Tensor)


def test_a_float8_tensor_input_equals_its_dequantized_values():
    layer = float8lab.Linear(32, 16, device="cpu")
    x = float8lab.quantize(torch.randn(4, 32))
    with float8lab.autocast(recipe=RECIPES["current"]):
        assert torch.equal(layer(x), layer(x.dequantize()))


def test_repr_shows_sizes_bias_and_split():
    layer = float8lab.Linear(16, 32, device="cpu")
    assert repr(layer) == "Linear(in_features=16, out_features=32, bias=True)"
    layer = float8lab.Linear(16, 32, bias=False, parameters_split={"q": 8, "kv": 24}, device="cpu")
    assert "bias=False, parameters_split={'q': 8, 'kv': 24}" in repr(layer)


def test_the_cast_for_dgrad_is_freed_before_wgrad(monkeypatch):
    original_dgrad, original_wgrad = gemm._dgrad, gemm._wgrad
    dy_storages, alive = [], []

    def recording_dgrad(dy, *args):
        dy_storages.append(StorageWeakRef(dy[0].untyped_storage()))
        return original_dgrad(dy, *args)

    def recording_wgrad(*args):
        alive.append(not dy_storages[0].expired())
        return original_wgrad(*args)

    monkeypatch.setattr(gemm, "_dgrad", recording_dgrad)
    monkeypatch.setattr(gemm, "_wgrad", recording_wgrad)
    layer = float8lab.Linear(32, 16, device="cpu")
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        y = layer(torch.randn(16, 32, requires_grad=True))
    y.sum().backward()
    assert alive == [False]


def test_a_weight_stored_under_another_recipe_warns_once_about_its_cast():
    with float8lab.fp8_model_init(recipe=recipes.Float8BlockScaling()):
        model = torch.nn.Sequential(*(float8lab.Linear(32, 16, device="cpu") for _ in range(2)))
    float8lab.convert_to_float8(model, exclude=["1"])
    x = torch.randn(4, 32)
    message = (
        r"0: its weight \(16, 32\) is stored as e4m3 128x128 fp32 and cast to e4m3 tensor fp32"
    )
    with pytest.warns(UserWarning, match=message) as warnings_caught:
        model[0](x)
    assert len(warnings_caught) == 1
    model[0](x)  # a warning would raise
    with float8lab.autocast(recipe=recipes.Float8BlockScaling()):
        model[1](x)
    before = {name: type(m) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match=r"  1: its weight is stored as e4m3 128x128 .* e4m3 row"):
        float8lab.convert_to_float8(
            model, recipes.Float8RowwiseScaling(), exclude=["0"], strict=True
        )
    assert {name: type(m) for name, m in model.named_modules()} == before
    float8lab.convert_to_float8(model, recipes.Float8BlockScaling(), strict=True)
    model[0](x)
