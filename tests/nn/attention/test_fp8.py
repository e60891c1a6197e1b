"""FP8 attention: accuracy of output and gradients, delayed state, and which calls run in FP8."""

import copy

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.nn.attention import DotProductAttention
from float8lab.nn.attention.fp8 import K, Q, V
from float8lab.nn.attention.layout import padding_from_lengths
from float8lab.ops import declare
from float8lab.ops.attention import LARGEST_FP8_BACKWARD_HEAD
from float8lab.recipes import Format
from tests.nn.attention import oracle
from tests.nn.composition import sqnr

# The SQNR in dB of output, dq, dk and dv against float64 for normally distributed tensors, as
# stated in docs/modules/attention.md. Rounding one operand to e4m3 leaves 31.5 dB. Rounding q and k
# leaves 28.5 dB in scores of variance 1, and thus in the probabilities and dv. The rounding of the
# probabilities and of v leaves 25.5 dB in the output; dq and dk, computed from probabilities, v and
# k (or q), have 25.5 dB, too. Half a dB is left for the sample. SQNR_OF_FP8_BACKWARD holds for a
# backward in FP8.
SQNR = (25.0, 25.0, 25.0, 28.0)
SQNR_OF_FP8_BACKWARD = (25.0, 24.0, 24.0, 24.0)
RECIPES = {
    "delayed": recipes.DelayedScaling(fp8_dpa=True),
    "current": recipes.Float8CurrentScaling(fp8_dpa=True),
    "e4m3": recipes.Float8CurrentScaling(fp8_dpa=True, fp8_format=Format.E4M3),
    "rowwise": recipes.Float8RowwiseScaling(fp8_dpa=True),
    "block": recipes.Float8BlockScaling(fp8_dpa=True),
    "mx": recipes.MXFP8BlockScaling(fp8_mha=True),
}
each_recipe = pytest.mark.parametrize("name", RECIPES)


def run(module, tensors, recipe, **kwargs):
    *inputs, dy = tensors
    leaves = oracle.leaves(*inputs)
    with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(*leaves, **kwargs)
    y, *largest = y if isinstance(y, tuple) else (y,)
    return [y, *oracle.gradients(y, leaves, dy), *largest]


def check_sqnr(results, exact):
    """Asserts the stated SQNR of the output, dq, dk and dv."""
    heads = [x.shape[-1] for x in results[1:]]
    is_fp8 = results[0].is_cuda and max(heads) <= LARGEST_FP8_BACKWARD_HEAD
    floors = SQNR_OF_FP8_BACKWARD if is_fp8 else SQNR
    measured = [sqnr(a, e) for a, e in zip(results, exact, strict=True)]
    assert all(m >= s for m, s in zip(measured, floors, strict=True)), measured
    assert min(measured) < 40  # higher ratios would mean high precision


def make(S=96, device="cpu", dtype=torch.float32):
    shapes = [(2, S, 4, 64), (2, S, 2, 64), (2, S, 2, 64), (2, S, 256)]
    return [torch.randn(s, device=device).to(dtype) for s in shapes]


@each_recipe
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("no_mask", torch.float32),
        *(("causal", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_sqnr_of_output_and_gradients_is_as_documented(name, mask, dtype, device):
    recipe = RECIPES[name]
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask)
    tensors = make(device=device, dtype=dtype)
    run(module, tensors, recipe)  # delayed scaling: give it a history
    results = run(module, tensors, recipe)
    exact = run(module, [t.double() for t in tensors], None)
    assert all(t.dtype == dtype for t in results)
    check_sqnr(results, exact)


FP8_CALLS = {
    "window": (128, 128, {"window_size": (40, 0)}),
    "window-two-sided": (128, 128, {"window_size": (20, 9), "attn_mask_type": "no_mask"}),
    "bottom-right": (96, 160, {"attn_mask_type": "causal_bottom_right"}),
    "top-left": (96, 160, {}),
    "blind": (160, 96, {"attn_mask_type": "causal_bottom_right"}),
    "cross": (96, 160, {"attn_mask_type": "no_mask"}),
    "cross-window": (96, 160, {"attn_mask_type": "causal_bottom_right", "window_size": (40, 0)}),
    "padding": (96, 96, {"attn_mask_type": "padding"}),
    "padding-causal": (96, 96, {"attn_mask_type": "padding_causal"}),
    "padding-cross": (96, 160, {"attn_mask_type": "padding"}),
    "lengths-window": (96, 96, {"attn_mask_type": "padding_causal", "window_size": (17, 0)}),
    "lengths-cross": (96, 160, {"attn_mask_type": "padding_causal_bottom_right"}),
    "lengths-cross-window": (96, 160, {"attn_mask_type": "padding", "window_size": (17, 9)}),
}


def padding_of(size, device):
    """The first row has padding at the start, in the middle and at the end, the second has none."""
    hidden = torch.zeros(2, 1, 1, size, dtype=torch.bool, device=device)
    hidden[0, ..., :7] = hidden[0, ..., 20:30] = hidden[0, ..., 80:] = True
    return hidden


def test_a_window_of_only_the_fp8_backward_runs_in_fp8_for_small_heads(device):
    shapes = (2, 160, 2, 64), (2, 20, 2, 64), (2, 20, 2, 64), (2, 160, 128)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    options = {"attn_mask_type": "no_mask", "window_size": (5, -1), "qkv_format": "bshd"}
    check_fp8(DotProductAttention(2, 64, **options), tensors)
    large_heads = DotProductAttention(2, 192, **options)
    with float8lab.autocast(recipe=RECIPES["current"]):
        explanation = large_heads.explain(
            *[torch.randn(2, S, 2, 192, device=device) for S in (160, 20, 20)]
        )
    assert "no such window" in explanation.rejected["fp8"]


@pytest.mark.parametrize("heads", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("case", FP8_CALLS)
def test_masks_of_the_kernel_run_in_fp8_with_the_documented_sqnr(case, heads, device):
    Sq, Sk, options = FP8_CALLS[case]
    D, Dv = heads
    module = DotProductAttention(2, heads, num_gqa_groups=1, qkv_format="bshd", **options)
    shapes = (2, Sq, 2, D), (2, Sk, 1, D), (2, Sk, 1, Dv), (2, Sq, 2 * Dv)
    tensors, call = [torch.randn(shape, device=device) for shape in shapes], {}
    if "padding" in case or "lengths" in case:
        queries, keys = padding_of(Sq, device), padding_of(Sk, device)
        call = {"attention_mask": queries if Sq == Sk else (queries, keys)}
        if "lengths" in case:
            cu_seqlens = [cu_seqlens_of([S // 3, S], device) for S in (Sq, Sk)]
            queries, keys = (
                padding_from_lengths(offsets.diff(), S)[:, None, None]
                for offsets, S in zip(cu_seqlens, (Sq, Sk), strict=True)
            )
            call = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_kv": cu_seqlens[Sq != Sk]}
        module.attention_type = "self" if Sq == Sk else "cross"
        for x, hidden in zip(tensors, (queries, keys, keys), strict=False):
            x.masked_fill_(hidden.view(2, -1, 1, 1), 1e30)  # no scale may depend on padding
    results = check_fp8(module, tensors, **call)
    if call:
        for x, hidden in zip(results, (queries, queries, keys, keys), strict=True):
            assert not x[hidden[:, 0, 0]].any()


@pytest.mark.parametrize(
    ("mask", "window"),
    [("padding", None), ("padding_causal", None), ("padding_causal", (17, 0))],
    ids=str,
)
@pytest.mark.parametrize("Sk", [None, [61, 100, 60, 30]], ids=["self", "cross"])
def test_packed_sequences_run_in_fp8_with_the_documented_sqnr(Sk, mask, window, device):
    lengths = [50, 1, 60, 20]
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="thd", window_size=window)
    call = {"cu_seqlens_q": cu_seqlens_of(lengths, device), "attn_mask_type": mask}
    if Sk is not None:
        call["attn_mask_type"] = mask.replace("causal", "causal_bottom_right")
        call["cu_seqlens_kv"] = cu_seqlens_of(Sk, device)
    T, Tk = sum(lengths) + 5, sum(Sk or lengths) + 5  # the last 5 tokens are in no sequence
    shapes = (T, 4, 64), (Tk, 2, 64), (Tk, 2, 64), (T, 256)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    results = check_fp8(module, tensors, **call)
    assert not any(x[sum(lengths) :].any() for x in results[:2])
    assert not any(x[sum(Sk or lengths) :].any() for x in results[2:])


@pytest.mark.parametrize("longest", [None, 70])
def test_tokens_between_packed_sequences_change_no_result(longest, device):
    """Tokens between the sequences may be NaN; results equal those of the sequences bit for bit."""
    starts, lengths, recipe = [0, 60, 60, 130], [50, 0, 61, 20], RECIPES["current"]
    module = DotProductAttention(4, 64, qkv_format="thd", attn_mask_type="padding_causal")
    token_index = torch.cat(
        [start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)]
    )
    compact = [torch.randn(131, 4, 64, device=device) for _ in range(3)]
    compact.append(torch.randn(131, 256, device=device))
    call = {"cu_seqlens_q": cu_seqlens_of(lengths, device)}
    if longest is not None:
        call.update(max_seqlen_q=longest, max_seqlen_kv=longest + 1)
    expected = run(module, compact, recipe, **call)
    with_gaps = [x.new_full((160, *x.shape[1:]), torch.nan).index_copy(0, token_index.to(device), x)
              for x in compact]  # fmt: skip
    padded = torch.tensor([*starts, 155], dtype=torch.int32, device=device)
    call.update(cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    for actual, x in zip(run(module, with_gaps, recipe, **call), expected, strict=True):
        assert torch.equal(actual[token_index], x)
        assert not actual.index_fill(0, token_index.to(device), 0.0).any()


@pytest.mark.parametrize("B", [0, 3])
def test_sequences_without_tokens_give_zeros(B, device):
    module = DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="padding_causal")
    tensors = [torch.randn(B, 5, *size, device=device) for size in ((4, 64),) * 3 + ((256,),)]
    call = {"cu_seqlens_q": torch.zeros(B + 1, dtype=torch.int32, device=device)}
    with float8lab.autocast(recipe=RECIPES["current"]):
        assert module.explain(*tensors[:3], **call).backend == "fp8"
    for x, input_like in zip(
        run(module, tensors, RECIPES["current"], **call), tensors[3:] + tensors, strict=False
    ):
        assert x.shape == input_like.shape
        assert not x.any()


@pytest.mark.parametrize("case", ["window", "packed", "padding"])
def test_compiled_fp8_attention_has_no_graph_breaks_and_equals_eager(case):
    recipe, call = RECIPES["current"], {}
    if case == "packed":
        call = {
            "cu_seqlens_q": cu_seqlens_of([20, 30], "cpu"),
            "max_seqlen_q": 30,
            "max_seqlen_kv": 30,
        }
        module = DotProductAttention(
            4, 64, qkv_format="thd", attn_mask_type="padding_causal", return_max_logit=True
        )
        tensors = [torch.randn(50, 4, 64) for _ in range(3)]
    elif case == "padding":
        module = DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="padding_causal")
        tensors, call = [torch.randn(2, 96, 4, 64) for _ in range(3)], {
            "attention_mask": padding_of(96, "cpu")
        }  # fmt: skip
    else:
        module = DotProductAttention(4, 64, qkv_format="bshd", window_size=(16, 0))
        tensors = [torch.randn(2, 50, 4, 64) for _ in range(3)]
    tensors.append(torch.randn(*tensors[0].shape[:-2], 256))
    expected = run(module, tensors, recipe, **call)
    module.compile(fullgraph=True, backend="aot_eager")
    results = run(module, tensors, recipe, **call)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_packed_sequences_outside_the_kernels_limits_warn():
    q = k = v = torch.randn(10, 4, 64)
    module = DotProductAttention(4, 64, qkv_format="thd", attn_mask_type="padding_causal")
    cu_seqlens = cu_seqlens_of([4, 4], "cpu")
    call = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens_of([5, 5], "cpu")}
    with float8lab.autocast(recipe=RECIPES["current"]):
        assert "at the last one" in module.explain(q, k, v, **call).rejected["fp8"]
        with pytest.warns(UserWarning, match="at the last one"):
            module(q, k, v, **call)


def cu_seqlens_of(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def check_fp8(module, tensors, **call):
    """Asserts that a call runs in FP8 with the stated SQNR, and returns its results."""
    with float8lab.autocast(recipe=RECIPES["current"]):
        assert module.explain(*tensors[:3], **call).backend == "fp8"
    module.return_max_logit = True
    *results, largest = run(module, tensors, RECIPES["current"], **call)
    *exact, exact_largest = run(module, [t.double() for t in tensors], None, **call)
    check_sqnr(results, exact)
    assert (largest - exact_largest).abs().max() < 0.25  # the errors of scores are about 0.04
    return results


HIGH_PRECISION_CALLS = {
    "padding": (
        {
            "attn_mask_type": "padding_causal", "window_size": (9, 0),
            "attention_mask": (torch.arange(96) >= torch.tensor([[70], [96]]))[:, None, None],
        },
        "packs what is not padding",
    ),
    "arbitrary": (
        {
            "attn_mask_type": "arbitrary",
            "attention_mask": torch.ones(96, 96, dtype=torch.bool).triu(9),
        },
        "arbitrary mask",
    ),
    "alibi": ({"core_attention_bias_type": "alibi"}, "ALiBi"),
    "bias": (
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.linspace(-1, 1, 96),
        },
        "core_attention_bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", HIGH_PRECISION_CALLS)
def test_calls_outside_the_kernels_limits_run_in_high_precision_and_warn_once(variant, device):
    call, reason = HIGH_PRECISION_CALLS[variant]
    call = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    tensors = make(device=device)
    high = run(module, tensors, None, **call)
    with pytest.warns(UserWarning, match=f"asks for FP8 attention.*{reason}"):
        results = run(module, tensors, RECIPES["delayed"], **call)
    assert all(torch.equal(a, b) for a, b in zip(results, high, strict=True))
    run(module, tensors, RECIPES["delayed"], **call)  # a warning would be an error
    with float8lab.autocast(recipe=RECIPES["delayed"]):
        explanation = module.explain(*tensors[:3], **call)
    assert explanation.backend != "fp8"
    assert reason in explanation.rejected["fp8"]


def test_large_heads_and_dropout_run_in_high_precision(device):
    for heads, options, reason in (
        (264, {}, "up to 256"),
        (64, {"attention_dropout": 0.1}, "dropout"),
    ):
        q, k, v = torch.randn(3, 1, 6, 2, heads, device=device)
        module = DotProductAttention(2, heads, qkv_format="bshd", **options)
        with float8lab.autocast(recipe=RECIPES["current"]):
            assert reason in module.explain(q, k, v).rejected["fp8"]
            with pytest.warns(UserWarning, match=reason):
                module(q, k, v)
            assert (module.eval().explain(q, k, v).backend == "fp8") == (reason == "dropout")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_a_gpu_without_the_kernel_attends_in_high_precision(mask, capability, monkeypatch):
    """torch's fused attention runs after one warning, not the reference with its score matrix."""
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask)
    tensors = make()
    high = run(module, tensors, None)
    monkeypatch.setattr(declare, "_capability_of", lambda device: capability)
    for attention in (module, copy.deepcopy(module)):
        with pytest.warns(UserWarning, match="needs a Hopper GPU"):
            results = run(attention, tensors, RECIPES["delayed"])
        run(attention, tensors, RECIPES["delayed"])  # a warning would be an error
        assert all(torch.equal(a, b) for a, b in zip(results, high, strict=True))
    with float8lab.autocast(recipe=RECIPES["current"]):
        explanation = module.explain(*tensors[:3])
    assert explanation.backend == "sdpa"
    assert "Hopper" in explanation.rejected["fp8"]


@pytest.mark.gpu
def test_a_window_and_large_heads_take_memory_linear_in_the_length():
    peaks = []
    for heads, window, dtype in (
        (64, (1024, 0), torch.bfloat16),
        (256, (1024, 0), torch.bfloat16),
        (256, (1024, 0), torch.float32),
        (256, None, torch.bfloat16),
    ):
        module = DotProductAttention(4, heads, qkv_format="bshd", window_size=window)
        module._warned.add("high precision")
        for S in (4096, 8192, 16384):
            q, k, v = (
                torch.randn(1, S, 4, heads, device="cuda", dtype=dtype, requires_grad=True)
                for _ in range(3)
            )
            for _ in range(2):  # the first call compiles
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                with float8lab.autocast(recipe=RECIPES["current"]):
                    y = module(q, k, v)
                y.sum().backward()
                q.grad = k.grad = v.grad = None
                peaks.append(torch.cuda.max_memory_allocated() - before)
                del y
        first, _, last = peaks[-5::2]
        assert last <= 4.5 * first, (heads, window, dtype, peaks)


@each_recipe
@pytest.mark.parametrize(
    ("b", "sq", "sk"), [(1, 0, 3), (1, 3, 0), (1, 1, 1), (1, 5, 9), (0, 3, 3)], ids=str
)
def test_edge_lengths_are_near_float64(name, b, sq, sk, device):
    module = DotProductAttention(2, 4, attn_mask_type="no_mask", qkv_format="bshd")
    shapes = (b, sq, 2, 4), (b, sk, 2, 4), (b, sk, 2, 4), (b, sq, 8)
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    results = run(module, tensors, RECIPES[name])
    exact = run(module, [t.double() for t in tensors], None)
    for a, e in zip(results, exact, strict=True):
        assert a.shape == e.shape
        assert (a - e).norm() <= 0.25 * e.norm() + 1e-6


def test_inputs_are_saved_in_fp8():
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    leaves = oracle.leaves(*make(256, dtype=torch.bfloat16)[:3])
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = (t.dtype, t.numel())
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        float8lab.autocast(recipe=RECIPES["current"]),
    ):
        module(*leaves)
    by_dtype = {}
    for dtype, count in saved.values():
        by_dtype[dtype] = by_dtype.get(dtype, 0) + count
    elements = 2 * 256 * 64
    assert by_dtype[torch.float8_e4m3fn] == elements * (4 + 2 + 2)
    assert by_dtype[torch.bfloat16] == elements * 4  # the output
    assert by_dtype[torch.float32] == 2 * 2 * 4 * 256 + 3  # two numbers per query, and the scales


@pytest.mark.parametrize(
    ("recipe", "asks_for_fp8"),
    [
        (recipes.DelayedScaling(), False),
        (recipes.DelayedScaling(fp8_dpa=True), True),
        (recipes.Float8CurrentScaling(fp8_mha=True), True),
        (recipes.Float8BlockScaling(), False),
    ],
    ids=repr,
)
def test_attention_runs_in_fp8_only_if_the_recipe_asks_for_it(recipe, asks_for_fp8):
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    tensors = make(16)
    high = run(module, tensors, None)
    equal = all(torch.equal(a, b) for a, b in zip(run(module, tensors, recipe), high, strict=True))
    assert equal is not asks_for_fp8
    with float8lab.autocast(recipe=recipe), float8lab.autocast(enabled=False):
        assert torch.equal(module(*tensors[:3]), high[0])


def test_delayed_scales_come_from_earlier_steps():
    recipe = recipes.DelayedScaling(fp8_dpa=True, amax_history_len=2, amax_compute_algo="max")
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    q, k, v, dy = make(16)
    for factor in (1.0, 4.0, 2.0):
        run(module, [q * factor, k, v, dy * factor], recipe)
    slots = module._fp8.slots[recipe, None]
    state = slots.tensors()
    assert state["steps"].tolist() == [3, 3, 3]
    assert state["history"][:, Q].tolist() == [q.abs().max() * 2, q.abs().max() * 4]
    encode = 1 / state["scale"]
    for index, x in ((Q, q * 4), (K, k), (V, v)):
        assert encode[index] == 2.0 ** torch.floor(torch.log2(448 / x.abs().max()))


def test_converted_attention_that_is_called_alone_advances_its_scales():
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    recipe = recipes.DelayedScaling(fp8_dpa=True)
    float8lab.convert_to_float8(nn.Sequential(module, nn.Linear(4, 4)), recipe)
    for _ in range(2):
        module(*make(16)[:3])
    assert module._fp8.slots[recipe, None].tensors()["steps"][[Q, K, V]].tolist() == [2, 2, 2]


def test_eval_freezes_the_scales_and_calibration_collects_them():
    recipe = recipes.DelayedScaling(fp8_dpa=True)
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd").eval()
    q, k, v, _ = make(16)
    with float8lab.autocast(enabled=False, calibrating=True, recipe=recipe):
        expected = module(q, k, v)
    assert torch.equal(expected, module(q, k, v))
    state = module._fp8.slots[recipe, None].tensors()
    assert state["history"][0, [Q, K, V]].tolist() == [t.abs().max() for t in (q, k, v)]
    with float8lab.autocast(recipe=recipe):
        module(q * 8, k, v)
    assert state["history"][0, Q] == q.abs().max()


def test_copies_and_loaded_scaling_states_give_equal_results():
    recipe = recipes.DelayedScaling(fp8_dpa=True)
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    tensors = make(16)
    run(module, tensors, recipe)
    twin, fresh = copy.deepcopy(module), DotProductAttention(4, 64, 2, qkv_format="bshd")
    state = float8lab.nn.ScalingState(module, recipe).state_dict()
    float8lab.nn.ScalingState(fresh, recipe).load_state_dict(state)
    larger = [t * 100 for t in tensors]
    results = [run(m, larger, recipe) for m in (module, twin, fresh)]
    for a, b, c in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_double_backward_is_refused():
    module = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd")
    leaves = oracle.leaves(*make(8)[:3])
    with float8lab.autocast(recipe=RECIPES["current"]):
        y = module(*leaves).square().sum()
    with pytest.raises(NotImplementedError, match=r"differentiated again; .*to_high_precision"):
        torch.autograd.grad(y, leaves[0], create_graph=True)
