"""Each subject of the benchmarks on a CPU with tiny sizes, without the speed of a GPU."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import float8lab
from benchmarks import (
    accuracy,
    advise,
    attention,
    common,
    decode,
    experts,
    gemm,
    grouped,
    layer,
    linear,
    memory,
    mlp,
    model,
    norm_linear,
    overhead,
    permute,
    power,
    quantize,
    report,
)
from benchmarks.floor import cast_bytes, gemms_of_recipe
from benchmarks.models import Candidate, LayerSize, Trial, train_step
from benchmarks.recipes import RECIPES
from benchmarks.shapes import LinearShape
from float8lab import recipes

TINY = LinearShape("tiny", 64, 48, 32)
LAYER = LayerSize(D=64, H=4, G=2, F=96, batch=2, sequence=32)
RECIPES_WITH_FLOOR = [name for name in RECIPES if name != "mx"]  # mx has no FP8 GEMM
GPU_SUBJECTS = (
    advise, attention, decode, gemm, layer, linear, memory, mlp, model, norm_linear, overhead,
    permute, power, quantize,
)  # fmt: skip


@pytest.fixture
def few_recipes(setting):
    """The setting with the two recipes that differ most."""
    setting.recipes = ("delayed", "block")
    return setting


@pytest.fixture(autouse=True)
def modules_to_compile(monkeypatch):
    """The modules that should be compiled; they are recorded instead.

    Inductor takes seconds for each, also for baselines that are always compiled, and compiled
    layers have their own tests.
    """
    modules = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: modules.append(self))
    return modules


def assert_accepted(subject, rows, *, has_times=True):
    """Assert that rows are accepted, have times or none, and have a line in their case's table."""
    refused = {row.name: row.refusal for row in rows if row.refusal is not None}
    assert refused == {}
    for row in rows:
        assert bool(row.ms) == has_times
        assert not any(math.isnan(db) for db in row.sqnr_db.values())
    for case in dict.fromkeys(row.case for row in rows):
        members = [row for row in rows if row.case == case]
        table = report.tabulate(subject.columns, members).splitlines()
        assert len(table) == 2 + len(members)
        assert len({line.count("|") for line in table}) == 1


def names(rows):
    return {row.name for row in rows}


def test_gemm_has_rows_of_each_shape_and_backend(setting):
    rows = list(gemm.rows(setting, [TINY]))
    assert_accepted(gemm.SUBJECT, rows)
    assert list(dict.fromkeys(row.case.split(":")[0] for row in rows)) == [
        "tiny, fprop", "tiny, dgrad", "tiny, wgrad",
    ]  # fmt: skip
    assert names(rows) >= {"bfloat16", "row, fast", "1x128 by 128x128", "1x128 by 1x128"}
    assert {row.name for row in rows if "e5m2" in row.name and "fprop" not in row.case} == {
        "1x128 by 128x128, e5m2 by e4m3", "1x128 by 1x128, e5m2 by e4m3",
    }  # fmt: skip
    assert all(row.flops == 2 * 64 * 48 * 32 for row in rows)
    assert all(row.values["% of ceiling"] > 0 for row in rows)


def test_gemm_refuses_a_wrong_result(setting, monkeypatch):
    multiply = gemm.GemmOperands.multiply
    monkeypatch.setattr(gemm.GemmOperands, "multiply", lambda self: multiply(self) * 1.1)
    rows = list(gemm.rows(setting, [TINY]))
    assert all(row.refusal.startswith("wrong: y ") for row in rows)
    assert all(row.ms == () for row in rows)


def test_sustained_times_are_in_rows_and_table(setting):
    setting.sustained = partial(common.time_sustained, seconds=0.01, rounds=2)
    setting.names = ("current",)  # also the baseline
    rows = list(linear.rows(setting, [TINY]))
    assert [row.name for row in rows] == ["bfloat16, eager", "current, eager"]
    base, fp8 = rows
    assert fp8.values["sustained ms"] > 0
    table = report.tabulate(linear.SUBJECT.columns, rows)
    assert "x bf16, sustained" in table
    ratio = base.values["sustained ms"] / fp8.values["sustained ms"]
    assert f"{ratio:.2f}" in table


def test_linear_has_a_row_for_each_recipe(setting):
    rows = list(linear.rows(setting, [TINY]))
    assert_accepted(linear.SUBJECT, rows)
    assert [row.name for row in rows if row.baseline] == ["bfloat16, eager"]
    assert names(rows) == {f"{name}, eager" for name in ("bfloat16", *RECIPES)}
    for row in rows[1:]:
        assert (row.floor_ms is not None) == (row.name.split(",")[0] in RECIPES_WITH_FLOOR)
        assert row.values["saved MB"] < rows[0].values["saved MB"]


def test_linear_layers_have_targets_only_for_their_own_shapes():
    shape = LinearShape("up", 16384, 4096, 14336)
    delayed = linear.targets(shape)["delayed, eager"]
    assert [(t.quantity, t.relation, t.bound) for t in delayed] == [
        ("x floor", "<=", 1.01), ("x bf16", ">=", 1.81),
    ]  # fmt: skip
    assert linear.targets(LinearShape("up", 8, 4096, 14336)) == {}


class _Halved(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


def test_a_wrong_layer_is_not_timed(setting):
    problem = accuracy.make_problem(
        "gaussian", 64, 48, 32, seed=0, dtype=torch.bfloat16, device="cpu"
    )
    layer = _Halved(48, 32, bias=False, dtype=torch.bfloat16)
    layer.load_state_dict(accuracy.make_linear(problem).state_dict())
    gate = common.Gate(accuracy.linear_reference(problem), linear.FLOOR_DB)
    timed = []
    setting.time = setting.wall = lambda fn: timed.append(fn)
    trial = Trial("tiny", (problem.x, problem.dy), gate, 1.0, lambda recipe: 1.0)
    (row,) = trial.rows(setting, [Candidate("halved", lambda: layer, {"dW": "weight"})])
    assert timed == []
    assert (row.ms, row.wall_ms, row.values, row.floor_ms) == ((), (), {}, None)
    assert row.refusal.startswith("wrong: y 6.0 dB")
    line = report.tabulate(linear.SUBJECT.columns, [row]).splitlines()[-1]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[0] == "halved"
    assert cells[2] == row.refusal
    assert not any(cells[3:])


def test_a_missing_gradient_is_a_wrong_answer(setting):
    linear = nn.Linear(8, 8, bias=False)
    linear.weight.requires_grad_(False)
    x, dy = torch.randn(2, 4, 8)
    gate = common.Gate({"y": x @ linear.weight.t(), "dW": dy.t() @ x}, 20.0)
    trial = Trial("tiny", (x, dy), gate, 1.0, lambda recipe: 1.0)
    (row,) = trial.rows(setting, [Candidate("frozen", lambda: linear, {"dW": "weight"})])
    assert row.refusal == "wrong: dW nan dB, below 20 dB"


def test_a_failing_candidate_is_a_row_with_the_error(setting):
    def fail():
        raise NotImplementedError("no such kernel\nand more")

    gate = common.Gate({}, 0.0)
    trial = Trial("tiny", (torch.ones(1), torch.ones(1)), gate, 1.0, lambda recipe: 1.0)
    (row,) = trial.rows(setting, [Candidate("absent", fail)])
    assert row.refusal == "failed: NotImplementedError: no such kernel"


def test_saved_bytes_count_activations_but_no_parameters():
    layer = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
    x = torch.randn(64, 48, dtype=torch.bfloat16)
    assert linear.saved_bytes(layer, x) == x.numel() * 2
    measured = linear.Memory.measure(linear.saved_bytes, layer, x)
    assert measured == linear.Memory(activations=x.numel() * 2, constant=0)


def test_train_step_replaces_gradients_and_updates_weights():
    layer = nn.Linear(8, 8, bias=False)
    x, dy = torch.randn(4, 8).requires_grad_(), torch.randn(4, 8)
    version = layer.weight._version
    for _ in range(2):
        train_step(layer, x, dy)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x.detach())
    assert layer.weight._version > version


@pytest.mark.parametrize("jagged", [False, True], ids=["balanced", "jagged"])
def test_grouped_has_rows_of_each_recipe(setting, jagged):
    shape = grouped.Experts(96, 3, 64, 48, jagged)
    assert sum(shape.sizes()) == 96
    rows = list(grouped.rows(setting, [shape]))
    assert_accepted(grouped.SUBJECT, rows)
    assert names(rows) >= {"bfloat16, torch._grouped_mm", "delayed, eager", "block, eager"}


def test_experts_has_rows_of_each_recipe(few_recipes):
    rows = list(experts.rows(few_recipes, "tiny", experts.Layer(40, 4, 2, 64, 48), own_bf16=True))
    assert_accepted(experts.SUBJECT, rows)
    assert names(rows) >= {"bfloat16, ExpertMLP", "delayed, eager", "block, eager"}
    few_recipes.sustained = partial(common.time_sustained, seconds=1e-6, rounds=1)
    few_recipes.recipes = "block", "rowwise"
    rows = list(experts.rows(few_recipes, "tiny", experts.Layer(40, 4, 2, 64, 48)))
    assert_accepted(experts.SUBJECT, rows)
    assert [row.name for row in rows[::2]] == ["bfloat16, torch._grouped_mm"] * 2
    assert len({row.case for row in rows}) == 2
    assert all(row.values["sustained ms"] > 0 for row in rows)


def test_norm_linear_has_a_row_for_each_recipe(setting):
    rows = list(norm_linear.rows(setting, [TINY]))
    assert_accepted(norm_linear.SUBJECT, rows)
    assert {f"LayerNormLinear, {name}, eager" for name in RECIPES} < names(rows)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_mlp_has_a_row_for_each_recipe(setting, activation):
    rows = list(mlp.rows(setting, [mlp.MlpSize(48, 96, 64, activation)]))
    assert_accepted(mlp.SUBJECT, rows)
    assert {f"LayerNormMLP, {name}, eager" for name in RECIPES} < names(rows)


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({}, 800), ({"causal": False}, 1600), ({"packed": True}, 800), ({"window": 10}, 350),
        ({"window": 50, "packed": True}, 800),
    ],
    ids=str,
)  # fmt: skip
def test_attention_has_rows_and_flops_of_its_mask(few_recipes, fields, scores):
    few_recipes.recipes = ("delayed", "current", "block")
    size = attention.AttentionSize(2, 40, H=2, D=16, **fields)
    rows = list(attention.rows(few_recipes, [size]))
    assert_accepted(attention.SUBJECT, rows)
    assert names(rows) == {
        "math bfloat16", "DotProductAttention, bfloat16",
        "DotProductAttention, FP8 delayed", "DotProductAttention, FP8 current",
    }  # fmt: skip
    assert rows[0].flops == 3.5 * 4 * 2 * 2 * 16 * scores
    assert not any(row.refusal for row in rows)


def test_attention_has_rows_of_compiled_modules(few_recipes, modules_to_compile):
    few_recipes.recipes, few_recipes.compile = ("delayed",), True
    rows = list(attention.rows(few_recipes, [attention.AttentionSize(2, 40, H=2, D=16)]))
    assert_accepted(attention.SUBJECT, rows)
    attention_names = {"DotProductAttention, bfloat16", "DotProductAttention, FP8 delayed"}
    assert names(rows) == {
        "math bfloat16",
        *attention_names,
        *(f"{name}, compile" for name in attention_names),
    }
    assert len(modules_to_compile) == 2


def test_exact_attention_has_the_gradients_of_autograd():
    size = attention.AttentionSize(2, 24, H=3, D=8, window=5)
    problem = attention.Problem.make(size, torch.Generator().manual_seed(0))
    q, k, v = (x.double().requires_grad_() for x in problem[:3])
    out = attention.Sdpa(torch.nn.attention.SDPBackend.MATH, size)(q, k, v)
    out.backward(problem.dout.double().flatten(2))
    gradients = {"y": out.view(2, 24, 3, 8), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    gate = common.Gate({name: t.detach() for name, t in gradients.items()}, 100.0)
    assert gate.admits(attention.exact(problem, size.hidden(torch.device("cpu"))))


def test_layer_has_rows_of_modules_and_converted_layers(few_recipes):
    rows = list(layer.rows(few_recipes, LAYER))
    assert_accepted(layer.SUBJECT, rows)
    assert [row.name for row in rows if row.baseline] == ["plain bfloat16, compile"]
    assert {"TransformerLayer, block, eager", "converted, delayed, eager"} < names(rows)
    by_name = {row.name: row for row in rows}
    auto = by_name.pop("converted, auto, eager")
    assert auto.floor_ms is None
    assert all(row.floor_ms > 0 for row in by_name.values())
    best = min(by_name[f"converted, {name}, eager"].median for name in few_recipes.recipes)
    assert auto.values["x best recipe"] == best / auto.median


def test_auto_is_compared_with_the_fastest_recipe_of_its_mode():
    rows = [
        report.Row("layer", name, ms=(ms,) if ms else (), refusal=None if ms else "wrong")
        for name, ms in {
            "plain bfloat16, eager": 1.0, "converted, delayed, eager": 4.0,
            "converted, block, eager": 5.0, "converted, mx, eager": None, "peer": 2.0,
            "converted, auto, eager": 3.0, "converted, delayed, compile": 6.0,
            "converted, auto, compile": 8.0, "TransformerLayer, delayed, compile": 1.0,
        }.items()
    ]  # fmt: skip
    compared = list(layer.compare_auto(rows))
    assert {row.name: row.values for row in compared if row.values} == {
        "converted, auto, eager": {"x best recipe": 4 / 3},
        "converted, auto, compile": {"x best recipe": 6 / 8},
    }
    assert list(layer.compare_auto(rows[5:6])) == rows[5:6]  # there is nothing to compare with


def test_targets_of_the_layer_are_names_of_candidates(setting, monkeypatch):
    setting.compile, setting.recipes = True, tuple(RECIPES)
    plain = layer.plain_layer(LAYER, setting.device)
    names_of_candidates = {candidate.name for candidate in layer.candidates(setting, plain, LAYER)}
    assert layer.TARGETS.keys() <= names_of_candidates


def test_model_has_rows_whose_loss_decreases(few_recipes):
    few_recipes.wall = lambda fn: common.time_wall(fn, warm_up=1, samples=2, calls=3)
    rows = list(model.rows(few_recipes, LAYER, layers=2))
    assert_accepted(model.SUBJECT, rows)
    assert rows[0].baseline
    assert {"TransformerLayer, block, eager", "converted, delayed, eager"} < names(rows)
    assert "converted, auto, eager" in names(rows)
    for row in rows:
        assert row.values["last loss"] < row.values["first loss"]
        assert row.values["tokens/s"] == pytest.approx(64 / row.median * 1e3)


def test_permute_has_rows_of_each_step_of_moe_routing(setting):
    rows = list(permute.rows(setting, "tiny", permute.MoeShape(24, 8, 2, 128, "sigmoid", 4, 2)))
    assert_accepted(permute.SUBJECT, rows)
    assert names(rows) >= {"copy", "permute, FP8 1x128", "unpermute", "route backward"}
    assert {"moe_permute, mask", "torch: index_select"} < names(rows)


def test_decode_has_the_bytes_of_the_cache(setting):
    rows = list(decode.rows(setting, 2, 24, 8))
    assert_accepted(decode.SUBJECT, rows)
    other_bytes = 2 * 2 * 32 * 128 * 2 + 6 * 4 + 6 * 4  # queries, outputs, table, sequences
    bytes_moved = [2 * 24 * 2 * 8 * vector + other_bytes for vector in (256, 132, 132)]
    assert [row.bytes for row in rows] == bytes_moved


@pytest.mark.parametrize(
    ("first", "last", "refusal"),
    [
        (10.05, 4.0, None),
        (10.2, 4.0, "wrong: first loss 10.2000, not 10.0000"),
        (10.0, 6.0, "wrong: loss fell to 6.0000, not 4.0000"),
        (math.nan, 4.0, "wrong: first loss nan, not 10.0000"),
        (10.0, math.nan, "wrong: loss fell to nan, not 4.0000"),
    ],
)
def test_model_refuses_a_wrong_loss(first, last, refusal):
    assert model.wrong_loss(first, last, {"first loss": 10.0, "last loss": 4.0}) == refusal


def test_overhead_has_rows_of_linear_autocast_and_gpt(few_recipes):
    rows = [
        *overhead.linear_rows(few_recipes),
        *overhead.autocast_rows(few_recipes, (0, 2)),
        *overhead.gpt_rows(few_recipes, overhead.GptSize(32, 2, 48, 1, 64, 2, 16)),
    ]
    assert_accepted(overhead.SUBJECT, [row for row in rows if row.ms])
    assert_accepted(overhead.SUBJECT, [row for row in rows if not row.ms], has_times=False)
    assert [row.case.split(",")[0] for row in rows[::3][:1]] == ["Linear 128 -> 128"]
    layer = rows[1].values
    assert layer["both, of bf16 both"] == pytest.approx(
        layer["forward + backward us"] / rows[0].values["forward + backward us"]
    )
    assert sum("exit after all ran us" in row.values for row in rows) == 2
    gpt = {row.name: row for row in rows if row.case.startswith("GPT")}
    auto, plain = gpt["auto, eager"], gpt["bfloat16, eager"]
    assert auto.values["x bf16 in the same mode"] == plain.median / auto.median
    assert auto.values["one thread ms"] > 0
    assert "bfloat16, graphed" in gpt
    assert "auto, graphed" not in gpt
    assert layer["both, one thread us"] > 0
    assert torch.autograd.is_multithreading_enabled()
    assert [target.bound for target in auto.targets] == [0.97]


@pytest.mark.parametrize("mode", ["eager", "compile", "cuda_graph"])
def test_auto_leaves_the_small_gpt_of_overhead_in_bfloat16(mode):
    with torch.device("meta"):
        model = overhead.Gpt(overhead.SMALL)
    auto = recipes.Auto(tokens=overhead.SMALL.batch * overhead.SMALL.sequence, mode=mode)
    with pytest.warns(UserWarning, match="converted none of the 57 linear layers"):
        float8lab.convert_to_float8(model, auto, exclude=["lm_head"])
    report = float8lab.conversion_report(model)
    assert (len(report.layers), report.converted) == (57, ())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the profiler and of the attention backends
@pytest.mark.parametrize(
    ("program", "argv"),
    [
        (gemm, ["--layer", "attention out"]),
        (linear, ["--tokens", "512", "--layer", "attention out"]),
        (mlp, ["--tokens", "512"]),
        (attention, ["--shape", "1", "512", "causal"]),
        (layer, ["--batch", "1", "--sequence", "512"]),
        (model, ["--layers", "2", "--sequence", "512"]),
        (overhead, ["--recipe", "delayed"]),
        (advise, ["--layers", "1", "--recipe", "delayed"]),
        (memory, ["--batch", "1", "--sequence", "512", "--recipe", "delayed"]),
        (power, ["--batch", "1", "--sequence", "512", "--seconds", "0.5", "--rounds", "1"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_subjects_run_on_a_gpu(program, argv, tmp_path):
    path = tmp_path / "rows.json"
    rows = program.main([*argv, "--samples", "4", "--json", str(path)])
    assert {row.name: row.refusal for row in rows if row.refusal is not None} == {}
    facts, rows_read = report.read_json(path)
    assert rows_read == rows
    assert {"GPU", "copy", "ceiling"} <= facts.keys()
    for row in rows:
        assert row.floor_ms is None or row.floor_ms > 0
        if program is overhead and "launches" in row.values:
            assert row.values["launches"] >= 2


def test_saved_bytes_keeps_no_reference_to_the_layer():
    layer = float8lab.TransformerLayer(16, 32, 2, self_attn_mask_type="causal", device="cpu")
    references = [weakref.ref(parameter) for parameter in layer.parameters()]
    assert linear.saved_bytes(layer, torch.randn(4, 2, 16)) > 0
    del layer
    gc.collect()
    assert not any(parameter() is not None for parameter in references)


@pytest.mark.gpu
def test_count_launches_counts_kernels():
    x = torch.ones(1000, device="cuda")
    assert overhead.count_launches(lambda: x.mul_(2).add_(1)) == 2


def test_memory_has_the_bytes_of_each_way_to_save(few_recipes):
    few_recipes.recipes = ("delayed",)
    rows = [*memory.rows(few_recipes, LAYER), *memory.stack_rows(few_recipes, LAYER, layers=2)]
    rows += memory.growth_rows(few_recipes, LAYER, steps=(1, 2))
    assert_accepted(memory.SUBJECT, rows, has_times=False)
    assert {"delayed, FP8 weights", "delayed, fp8_activation_input"} < names(rows)
    by_name = {row.name: row.values for row in rows if row.case.startswith("2 layers")}
    # One byte per element, except in the norms and scales.
    weights = by_name["TransformerLayer, delayed"]["weights GB"]
    assert by_name["delayed, FP8 weights"]["weights GB"] == pytest.approx(weights / 2, rel=0.02)
    assert (
        by_name["TransformerLayer, delayed"]["saved GB"]
        < by_name["plain bfloat16, eager"]["saved GB"]
    )


def test_memory_has_rows_of_compiled_layers(few_recipes, modules_to_compile):
    few_recipes.recipes, few_recipes.compile = ("delayed",), True
    rows = [*memory.rows(few_recipes, LAYER), *memory.stack_rows(few_recipes, LAYER, layers=2)]
    assert_accepted(memory.SUBJECT, rows, has_times=False)
    assert {"TransformerLayer, delayed, compile", "delayed, FP8 weights, compile"} < names(rows)
    assert "plain, converted, delayed, compile" in names(rows)
    assert len(modules_to_compile) == 4 + 3 * 2  # with the plain layer, of one layer and of two


def test_growth_is_the_increase_of_allocated_memory(monkeypatch):
    class Allocator:
        cuda = True
        bytes = 5e6

        def __init__(self, device):
            pass

        def start_peak(self):
            pass

        def now(self):
            Allocator.bytes += 1e6
            return Allocator.bytes

        def peak(self):
            return 3 * Allocator.bytes

    monkeypatch.setattr(memory, "_Allocator", Allocator)
    data = torch.randn(2, 4, 8).unbind()
    result = memory.growth(nn.Linear(8, 8), data, (1, 3))
    assert result == {"growth MB": 1.0, "growth of peak MB": 3.0}
    target = report.Target("growth MB", "<=", 0.0)
    assert target.describe(result["growth MB"]) == "growth MB <= 0 missed"


@pytest.mark.parametrize("case", list(quantize.cases(torch.randn(64, 128))), ids=lambda c: c.name)
def test_cast_cases_equal_their_references(case):
    assert quantize.compare(case) is None
    assert case.bytes_moved(case.run()) > 0


def test_quantize_has_the_bytes_of_prologues(setting):
    rows = list(quantize.source_rows(setting, 64, 128, 96, torch.bfloat16))
    assert_accepted(quantize.SUBJECT, rows)
    bytes_moved = {(row.case.split(",")[0], row.name): row.bytes for row in rows}
    # Bytes per element, and some statistics and scales.
    for kind, name, count in (
        ("RMSNorm", "cast pair", 128 * 4),
        ("SwiGLU", "quantize pair tensor", 96 * 10),
        ("SwiGLU's gradient", "transpose 1x128", 192 * 4),
    ):
        assert bytes_moved[kind, name] == pytest.approx(64 * count, rel=0.05)


def test_quantize_has_the_bytes_of_each_cast(setting):
    rows = list(quantize.rows(setting, [(64, 128)], torch.bfloat16))
    assert_accepted(quantize.SUBJECT, rows)
    assert quantize.TARGETS.keys() <= names(rows)
    elements = 64 * 128
    bytes_moved = {row.name: row.bytes for row in rows}
    # Bytes per element, and some scales.
    for name, count in {"cast pair": 4, "quantize pair tensor": 6, "quantize tensor": 5}.items():
        assert bytes_moved[name] == pytest.approx(count * elements, rel=0.01)
    assert bytes_moved["copy"] == 4 * elements


def test_cast_gate_refuses_one_wrong_byte(setting):
    def off_by_one(q, align):
        wrong = q.view(torch.uint8).t().contiguous()
        wrong[0, 0] ^= 1
        return wrong.view(q.dtype)

    transpose = next(
        case for case in quantize.cases(torch.randn(64, 128)) if case.name == "transpose"
    )
    wrong_case = quantize.Case("bad", off_by_one, transpose.reference, transpose.arguments)
    row = quantize.measure(setting, "64 x 128", wrong_case)
    assert row.refusal == f"wrong: output 0, 1 of {64 * 128} bytes"
    assert (row.ms, row.floor_ms) == ((), None)


def test_casts_of_others_are_checked_by_their_values(setting):
    x = torch.randn(64, 128)
    right_cast = quantize.OtherCast(lambda: quantize.amax_and_cast, lambda r: r[0].float() * r[1])
    row = quantize.measure_other(setting, "64 x 128", "plain", x, right_cast)
    assert row.refusal is None
    assert row.bytes == 64 * 128 * 5
    wrong_cast = right_cast._replace(values=lambda r: r[0].float())
    row = quantize.measure_other(setting, "64 x 128", "plain", x, wrong_cast)
    assert row.refusal.startswith("wrong: values")
    assert row.ms == ()


def test_cast_bytes_of_each_recipe():
    assert cast_bytes(None, 100) == 0
    assert cast_bytes(recipes.DelayedScaling(), 100) == 400
    assert cast_bytes(recipes.Float8BlockScaling(), 100) == 400
    assert cast_bytes(recipes.Float8CurrentScaling(), 100) == 600
    assert cast_bytes(recipes.Float8RowwiseScaling(), 100, read=4.0) == 1000


def test_floor_uses_the_recipes_own_gemms(setting):
    gemms = gemms_of_recipe(recipes.Float8CurrentScaling())
    assert gemms["fprop"].fast_accum
    assert not gemms["dgrad"].fast_accum
    assert gemms["wgrad"].a.fp8_dtype == torch.float8_e5m2
    assert gemms_of_recipe(recipes.MXFP8BlockScaling()) is None
    with_high_wgrad = recipes.Float8CurrentScaling(override_linear_precision=(False, False, True))
    assert gemms_of_recipe(with_high_wgrad)["wgrad"].a is None
    timed = []
    setting.floor.time = lambda fn: timed.append(fn) or common.Timing((2.0,))
    assert setting.floor.gemms_ms([TINY], recipes.Float8CurrentScaling()) == 6.0
    assert setting.floor.gemms_ms([TINY], recipes.Float8CurrentScaling()) == 6.0
    assert len(timed) == 3  # measured once


def test_floor_of_a_linear_layer_is_its_gemms_and_casts(setting):
    setting.floor.time = lambda fn: common.Timing((2.0,))
    setting.floor.copy_rate = 1e-9  # TB/s: 1000 bytes a second
    elements = 64 * 48 + 48 * 32 + 64 * 32
    result = linear.floor_ms(setting.floor, TINY, recipes.Float8CurrentScaling())
    assert result == pytest.approx(6.0 + 6 * elements)
    assert linear.floor_ms(setting.floor, TINY, None) == 6.0


def test_accuracy_runs_on_a_cpu(capsys, tmp_path):
    path = tmp_path / "accuracy.json"
    rows = accuracy.main(["--shape", "64", "160", "96", "--json", str(path)])
    cases = list(dict.fromkeys(row.case for row in rows))
    assert [case.split(",")[0] for case in cases] == list(accuracy.DATA)
    for case in cases:
        assert [row.name for row in rows if row.case == case] == ["bfloat16", *RECIPES]
    assert all(db > linear.FLOOR_DB for row in rows for db in row.sqnr_db.values())
    assert "| implementation |   y / dX / dW (dB) |" in capsys.readouterr().out
    facts, rows_read = report.read_json(path)
    assert rows_read == rows
    assert facts["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("program", GPU_SUBJECTS, ids=lambda module: module.__name__)
def test_gpu_benchmarks_need_a_gpu(program):
    with pytest.raises(SystemExit, match="measures a CUDA GPU"):
        program.main([])


def test_advise_has_predicted_and_measured_times(few_recipes):
    rows = list(advise.rows(few_recipes, [LAYER], layers=1))
    assert_accepted(advise.SUBJECT, rows, has_times=False)
    assert [row.name for row in rows] == ["delayed", "block"]
    for row in rows:
        errors = []
        for precision in ("high precision", "FP8"):
            predicted, measured, percent = (
                row.values[f"{precision} {quantity}"]
                for quantity in ("predicted ms", "measured ms", "off %")
            )
            assert predicted > 0
            assert percent == pytest.approx(100 * (predicted - measured) / measured)
            errors.append(abs(percent))
        assert row.values[advise.MOST_OFF] == max(errors)
        assert [(t.relation, t.bound) for t in row.targets] == [("<=", 15.0)]


def test_advise_times_steps_in_high_precision_and_then_in_fp8(setting):
    gemm_counts = []

    def wall(step):
        with float8lab.count_gemms() as gemms:
            step()
        gemm_counts.append((gemms.fp8, gemms.high_precision))
        return common.Timing((2.0 if len(gemm_counts) == 1 else 1.0,))

    setting.wall, setting.recipes = wall, ("current",)
    (row,) = advise.rows(setting, [LAYER], layers=1)
    # Seven linear layers, forward and backward.
    assert gemm_counts == [(0, 21), (21, 0)]
    assert row.values["high precision measured ms"] == 2.0
    assert row.values["FP8 measured ms"] == 1.0
    assert row.values["FP8 off %"] == 100 * (row.values["FP8 predicted ms"] - 1.0)


def test_advise_refuses_a_wrong_layer(setting, monkeypatch):
    def convert(model, recipe):
        for parameter in model.parameters():
            parameter.data.mul_(2)

    setting.recipes = ("current",)
    monkeypatch.setattr(advise.float8lab, "convert_to_float8", convert)
    (row,) = advise.rows(setting, [LAYER], layers=1)
    assert row.refusal.startswith("wrong: y ")
    assert row.values == {}
