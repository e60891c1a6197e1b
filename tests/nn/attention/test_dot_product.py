"""DotProductAttention: the effect of every parameter; outputs and gradients against float64."""

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

import float8lab
from float8lab import recipes
from float8lab.nn.attention import BACKENDS, DotProductAttention, alibi_slopes
from float8lab.nn.attention.backends import (
    Problem,
    _flex_modifiers,
    _Places,
    _without_cudnn,
    reference_attention,
)
from float8lab.nn.attention.layout import Packed
from float8lab.nn.attention.masks import make_mask, window_of
from tests.nn.attention import oracle

B, SQ, SK, H, G, D = 2, 5, 7, 4, 2, 8
Q_LENGTHS, KV_LENGTHS = [3, 5], [7, 4]

# Mask type -> whether it is causal, whether it has padding, and the key at which query 0 is, as a
# function of (Sq, Sk).
MASKS = {
    "no_mask": (False, False, lambda sq, sk: sk - sq),
    "padding": (False, True, lambda sq, sk: sk - sq),
    "causal": (True, False, lambda sq, sk: 0),
    "padding_causal": (True, True, lambda sq, sk: 0),
    "causal_bottom_right": (True, False, lambda sq, sk: sk - sq),
    "padding_causal_bottom_right": (True, True, lambda sq, sk: sk - sq),
}
each_mask = pytest.mark.parametrize("mask_type", MASKS)
each_window = pytest.mark.parametrize("window", [None, (2, 1), (0, 0)], ids=str)


def make(sq=SQ, sk=SK, *, h=H, g=G, d=D, dv=D, dtype=torch.float32, device="cpu"):
    shapes = [(B, sq, h, d), (B, sk, g, d), (B, sk, g, dv), (B, sq, h * dv)]
    return [torch.randn(s, device=device).to(dtype) for s in shapes]


def visible_of(mask_type, window, sq=SQ, sk=SK):
    """The visibility function for the oracle; padded types have the lengths above."""
    causal, padded, diagonal = MASKS[mask_type]
    left, right = window or (-1, -1)
    right = 0 if causal else right
    lengths = list(zip(Q_LENGTHS, KV_LENGTHS, strict=True)) if padded else [(sq, sk)] * B
    return oracle.visible_pairs(lengths, left, right, [diagonal(*pair) for pair in lengths])


def bshd_attention(**options):
    return DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", **options)


def padding_mask(lengths, size):
    return (torch.arange(size) >= torch.tensor(lengths)[:, None])[:, None, None]


def masks_of(mask_type):
    """The padding masks of the queries and of the keys if the type has padding."""
    padded = "padding" in mask_type
    return (padding_mask(Q_LENGTHS, SQ), padding_mask(KV_LENGTHS, SK)) if padded else None


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def sbhd(*tensors):
    return [t.transpose(0, 1) for t in tensors]


def check(module, tensors, visible, *, bias=None, scale=None, **kwargs):
    """Compares the output and every gradient of a bshd call with the oracle."""
    *inputs, dy = tensors
    leaves, exact_leaves = oracle.leaves(*inputs), oracle.leaves(*(t.double() for t in inputs))
    y, expected = (
        module(*leaves, **kwargs),
        oracle.attend(*exact_leaves, visible, bias=bias, scale=scale),
    )
    oracle.assert_close(
        [y, *oracle.gradients(y, leaves, dy)],
        [expected, *oracle.gradients(expected, exact_leaves, dy)],
        inputs[0].dtype,
    )


@each_mask
@each_window
@pytest.mark.parametrize("backends", [BACKENDS, ("reference",)], ids=["default", "reference"])
def test_every_mask_and_window_equals_float64(mask_type, window, backends):
    module = bshd_attention(
        attn_mask_type=mask_type, window_size=window, attention_type="cross", backends=backends
    )
    mask = masks_of(mask_type)
    check(module, make(), visible_of(mask_type, window), attention_mask=mask)


# FlexAttention warns that it is slow when it is not compiled, as on the CPU.
@pytest.mark.filterwarnings("ignore:.*flex_attention:UserWarning")
@each_mask
@pytest.mark.parametrize("window", [None, (3, 1)], ids=str)
def test_the_forward_of_flex_equals_the_reference(mask_type, window):
    module = bshd_attention(
        attn_mask_type=mask_type, window_size=window, attention_type="cross", backends=("flex",)
    )
    mask = masks_of(mask_type)
    q, k, v, _ = make()
    for bias_type, softcap in (("no_bias", 0.0), ("alibi", 0.0), ("alibi", 1.0)):
        module.softmax_type = "off-by-one" if softcap else "vanilla"
        plain = copy.deepcopy(module)
        plain.backends = ("reference",)
        call = {"attention_mask": mask, "core_attention_bias_type": bias_type, "softcap": softcap}
        oracle.assert_close([module(q, k, v, **call)], [plain(q, k, v, **call)], torch.float32)


@each_mask
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_every_format_equals_float64(mask_type, qkv_format):
    """All formats give the results of bshd with masks."""
    _, padded, _ = MASKS[mask_type]
    if qkv_format == "thd" and not padded:
        pytest.skip("thd has several lengths")
    q, k, v, dy = make()
    visible = visible_of(mask_type, (4, 3))
    exact_leaves = oracle.leaves(*(t.double() for t in (q, k, v)))
    expected = oracle.attend(*exact_leaves, visible)
    expected_grads = oracle.gradients(expected, exact_leaves, dy)
    leaves = oracle.leaves(q, k, v)
    module = DotProductAttention(
        H, D, num_gqa_groups=G, attn_mask_type=mask_type, attention_type="cross"
    )
    lengths = {}
    if padded:
        lengths = {
            "cu_seqlens_q": cumulative(Q_LENGTHS), "cu_seqlens_kv": cumulative(KV_LENGTHS)
        }  # fmt: skip
    inputs = leaves
    if qkv_format == "sbhd":
        inputs = sbhd(*leaves)
    if qkv_format == "thd":
        sizes = (Q_LENGTHS, KV_LENGTHS, KV_LENGTHS)
        inputs = [
            torch.cat([x[b, :n] for b, n in enumerate(side_lengths)])
            for x, side_lengths in zip(leaves, sizes, strict=True)
        ]
    y = module(*inputs, qkv_format=qkv_format, window_size=(4, 3), **lengths)
    if qkv_format == "sbhd":
        assert y.shape == (SQ, B, H * D)
        y = y.transpose(0, 1)
    if qkv_format == "thd":
        assert y.shape == (sum(Q_LENGTHS), H * D)
        padded_y = torch.zeros(B, SQ, H * D)
        for b, part in enumerate(y.split(Q_LENGTHS)):
            padded_y[b, : len(part)] = part
        y = padded_y
    grads = oracle.gradients(y, leaves, dy)
    oracle.assert_close([y, *grads], [expected, *expected_grads], torch.float32)


@pytest.mark.parametrize("names", [("q", "kv"), ("q",)], ids=["", "those-of-queries"])
@pytest.mark.parametrize("pad_between_seqs", [None, True])
def test_thd_ignores_unused_tokens_and_takes_given_maximum_lengths(pad_between_seqs, names):
    """cu_seqlens_*_padded are the starts of sequences; max_seqlen_* saves reading the lengths."""
    q, k, v, _ = make(5, 5)
    starts, lengths = [0, 4], [3, 2]
    module = DotProductAttention(H, D, num_gqa_groups=G, qkv_format="thd",
                                 attn_mask_type="padding,causal")  # fmt: skip
    compact = [torch.cat([x[0, :3], x[1, :2]]) for x in (q, k, v)]
    call = {"cu_seqlens_q": cumulative(lengths), "attn_mask_type": "causal,padding"}
    expected = module(*compact, **call)
    with_gaps = [torch.full((7, *x.shape[2:]), torch.nan) for x in (q, k, v)]
    for x, c in zip(with_gaps, compact, strict=True):
        x[0:3], x[4:6] = c[:3], c[3:]
    padded = torch.tensor([*starts, 7], dtype=torch.int32)
    call = {f"cu_seqlens_{name}": cumulative(lengths) for name in names}
    call |= {f"cu_seqlens_{name}_padded": padded for name in names}
    y = module(
        *with_gaps, **call, max_seqlen_q=4, max_seqlen_kv=4, pad_between_seqs=pad_between_seqs
    )
    assert torch.allclose(torch.cat([y[0:3], y[4:6]]), expected, atol=1e-6)
    assert torch.equal(y[[3, 6]], torch.zeros(2, H * D))


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_packed_inputs_equal_separate_ones_with_their_gradients(qkv_format, dim, compiled):
    """The gradient of the packed tensor holds the gradients of its parts."""
    lengths = {}
    if qkv_format == "thd":
        lengths = {"cu_seqlens_q": cumulative([3, 2]), "max_seqlen_q": 3, "max_seqlen_kv": 3}
    q, k, v = torch.randn(3, *((5,) if qkv_format == "thd" else (5, 2)), H, D)
    mask_type = "padding_causal" if qkv_format == "thd" else "causal"
    module = DotProductAttention(H, D, qkv_format=qkv_format, attn_mask_type=mask_type)
    torch._dynamo.reset()
    call = torch.compile(module, fullgraph=True, backend="eager") if compiled else module
    parts = oracle.leaves(q, k, v)
    expected = module(*parts, **lengths)
    dy = torch.randn_like(expected)
    expected_grads = oracle.gradients(expected, parts, dy)
    (qkv,) = oracle.leaves(torch.stack((q, k, v), dim))
    query, kv = oracle.leaves(q, torch.stack((k, v), dim))
    for inputs, packed in (
        ({"qkv_layer": qkv}, [qkv]),
        ({"query_layer": query, "kv_layer": kv}, [query, kv]),
    ):
        y = call(**inputs, qkv_interleave_dim=dim, **lengths)
        grads = oracle.gradients(y, packed, dy)
        assert torch.equal(y, expected)
        assert torch.equal(grads[-1], torch.stack(expected_grads[3 - grads[-1].shape[dim] :], dim))
        assert len(grads) == 1 or torch.equal(grads[0], expected_grads[0])


@pytest.mark.parametrize("shape", [(SQ, SK), (1, 1, SK), (B, 1, SQ, SK), (B, H, SQ, SK)], ids=str)
def test_an_arbitrary_mask_equals_float64(shape):
    masked = torch.rand(shape) < 0.4
    masked[..., 0] = False
    if len(shape) == 4:
        masked[1, 0, 2] = True  # a fully masked query
    full = masked.expand(B, H, SQ, SK)
    module = bshd_attention(attn_mask_type="arbitrary")
    check(module, make(), lambda b, h, i, j: not full[b, h, i, j], attention_mask=masked)


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding"])
@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("shape", [(1, H, SQ, SK), (B, H, SQ, SK), (1, 1, SQ, SK)], ids=str)
def test_a_bias_and_its_gradient_equal_float64(mask_type, bias_type, shape):
    q, k, v, dy = make()
    scale = 0.5
    bias = torch.randn(shape)
    leaves = oracle.leaves(q, k, v, bias)
    exact_leaves = oracle.leaves(*(t.double() for t in (q, k, v, bias)))
    module = bshd_attention(attn_mask_type=mask_type, attention_type="cross", softmax_scale=scale)
    y = module(
        *leaves[:3], masks_of(mask_type),
        core_attention_bias_type=bias_type, core_attention_bias=leaves[3],
    )  # fmt: skip
    oracle_bias = exact_leaves[3] * (scale if bias_type == "pre_scale_bias" else 1.0)
    expected = oracle.attend(
        *exact_leaves[:3],
        visible_of(mask_type, None),
        bias=oracle_bias.expand(B, H, SQ, SK),
        scale=scale,
    )
    oracle.assert_close(
        [y, *oracle.gradients(y, leaves, dy)],
        [expected, *oracle.gradients(expected, exact_leaves, dy)],
        torch.float32,
    )


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("slopes", [None, "heads", "batch"])
def test_alibi_equals_a_float64_bias(mask_type, slopes):
    given = {"heads": torch.rand(H), "batch": torch.rand(B, H), None: None}[slopes]
    slope = alibi_slopes(H) if given is None else given
    padded = "padding" in mask_type
    span = [k - q for q, k in zip(Q_LENGTHS, KV_LENGTHS, strict=True)] if padded else [SK - SQ] * B
    i, j = torch.arange(SQ)[:, None], torch.arange(SK)
    bias = torch.stack(
        [-slope.view(-1, H)[b % slope.view(-1, H).shape[0]].view(H, 1, 1) * (i + span[b] - j).abs()
         for b in range(B)]
    ).double()  # fmt: skip
    module = bshd_attention(attn_mask_type=mask_type, attention_type="cross")
    mask = masks_of(mask_type)
    check(
        module, make(), visible_of(mask_type, None), bias=bias, attention_mask=mask,
        core_attention_bias_type="alibi", alibi_slopes=given,
    )  # fmt: skip


def test_default_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(12).tolist()[8:] == pytest.approx([2.0 ** -(n + 0.5) for n in range(4)])


def test_alibi_in_bfloat16_keeps_its_bias_in_float32():
    q, k, v = torch.randn(3, 1, 600, 1, 8).bfloat16()
    module = DotProductAttention(1, 8, qkv_format="bshd")
    explanation = module.explain(q, k, v, core_attention_bias_type="alibi")
    assert explanation.backend == "reference"
    assert explanation.rejected["sdpa_masked"] == "it would round the bias to bfloat16"


@pytest.mark.parametrize("groups", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("channels", [8, (8, 5)], ids=["", "v-channels"])
@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right", "no_mask"])
def test_groups_and_channel_sizes_equal_float64(groups, channels, mask_type):
    module = DotProductAttention(
        4, channels, num_gqa_groups=groups, qkv_format="bshd", attn_mask_type=mask_type
    )
    dv = channels if isinstance(channels, int) else channels[1]
    tensors = make(6, 6, g=groups, dv=dv)
    right = -1 if mask_type == "no_mask" else 0
    check(module, tensors, oracle.visible_window(-1, right, 0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("mask_type", ["causal", "padding"])
def test_every_dtype_is_near_float64(dtype, mask_type):
    module = bshd_attention(attn_mask_type=mask_type, attention_type="cross")
    visible = visible_of(mask_type, None)
    check(module, make(dtype=dtype), visible, attention_mask=masks_of(mask_type))


@pytest.mark.parametrize(("sq", "sk"), [(0, 3), (3, 0), (1, 1), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
def test_edge_lengths_equal_float64(sq, sk, mask_type, device):
    module = bshd_attention(attn_mask_type=mask_type)
    check(module, make(sq, sk, device=device), visible_of(mask_type, None, sq, sk))


@pytest.mark.parametrize("ends", [None, [0], [0, 0, 0]], ids=["sbhd", "thd", "thd-of-empty"])
def test_an_empty_batch_gives_empty_outputs_and_gradients(ends, device):
    call = {}
    if ends is not None:
        ends = torch.tensor(ends, device=device)
        call = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": ends}
    shape = (5, 0) if ends is None else (0,)
    module = DotProductAttention(2, 4)
    q, k, v = oracle.leaves(*torch.randn(3, *shape, 2, 4, device=device))
    y = module(q, k, v, **call)
    assert y.shape == (*shape, 8)
    dy = torch.randn(*shape, 8, device=device)
    assert all(g.shape == q.shape for g in oracle.gradients(y, [q, k, v], dy))


def test_softmax_scale_takes_effect_and_defaults_to_the_inverse_root():
    q, k, v, _ = make()
    plain = bshd_attention()
    scaled = bshd_attention(softmax_scale=0.25)
    assert plain.softmax_scale == D**-0.5
    assert torch.allclose(scaled(q, k, v), plain(q * 0.25 * D**0.5, k, v), atol=1e-6)


def test_torch_autocast_equals_inputs_of_its_dtype():
    q, k, v, _ = make()
    module = bshd_attention()
    for backends in (BACKENDS, ("reference",)):
        module.backends = backends
        with torch.autocast("cpu", torch.bfloat16):
            y = module(q, k, v)
        assert torch.equal(y, module(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_float8_tensor_inputs_equal_their_dequantized_values():
    q, k, v, _ = make()
    module = bshd_attention()
    stored = [float8lab.quantize(x, block=(1, 1, 1, -1)) for x in (q, k, v)]
    assert torch.equal(module(*stored), module(*(x.dequantize() for x in stored)))


class Tracker:
    """An RNG state tracker with a separate generator state, as in tensor-parallel training."""

    def __init__(self, seed):
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(seed).get_state()}
        self.forks = 0

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    def fork(self, name="model-parallel-rng"):
        tracker = self

        class Fork:
            def __enter__(self):
                self.outer = torch.get_rng_state()
                torch.set_rng_state(tracker.states[name])
                tracker.forks += 1

            def __exit__(self, *exc):
                tracker.states = {**tracker.states, name: torch.get_rng_state()}
                torch.set_rng_state(self.outer)

        return Fork()


def test_dropout_acts_in_training_only_and_keeps_the_mean():
    module = DotProductAttention(2, 4, attention_dropout=0.25, attn_mask_type="no_mask")
    q, k = torch.zeros(40, 2, 2, 4), torch.zeros(50, 2, 2, 4)
    v = torch.ones(50, 2, 2, 4)
    y, second_y = module(q, k, v), module(q, k, v)
    assert torch.equal(module.eval()(q, k, v).round(decimals=3), torch.ones(40, 2, 8))
    assert not torch.equal(y, second_y)
    # Dropout zeroes each of 50 equal probabilities with probability 1/4 and scales the rest by 4/3.
    counts = y * 50 * 0.75
    assert torch.allclose(counts, counts.round(), atol=0.05)
    assert y.mean().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_rng_tracker_unless_sequence_parallel(sequence_parallel):
    tracker = Tracker(7)
    module = DotProductAttention(
        2, 4, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    q, k, v = torch.randn(3, 6, 2, 2, 4)
    state = torch.get_rng_state()
    module(q, k, v)
    assert torch.equal(torch.get_rng_state(), state) != sequence_parallel
    module.eval()(q, k, v)
    assert tracker.forks == (0 if sequence_parallel else 1)


@pytest.mark.parametrize("fp8", [None, "current", "delayed"])
@pytest.mark.parametrize("with_tracker", [False, True], ids=["", "tracker"])
def test_checkpoint_core_attention_saves_memory_and_changes_no_result(fp8, with_tracker):
    recipe = None
    if fp8 is not None:
        recipe_class = recipes.DelayedScaling if fp8 == "delayed" else recipes.Float8CurrentScaling
        recipe = recipe_class(fp8_dpa=True)
    results, saved = [], []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        tracker = Tracker(5)
        module = bshd_attention(
            attention_dropout=0.0 if fp8 else 0.3,
            window_size=None if fp8 else (8, 0),
            get_rng_state_tracker=(lambda t=tracker: t) if with_tracker else None,
        )
        q, k, v, dy = make(24, 24)
        leaves = oracle.leaves(q, k, v)
        input_storages = {t.untyped_storage().data_ptr() for t in leaves}
        storage_bytes = {}

        def pack(t, input_storages=input_storages, storage_bytes=storage_bytes):
            if t.untyped_storage().data_ptr() not in input_storages:
                storage_bytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        for _ in range(2):  # the delayed scales of the second step come from the first
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
                float8lab.autocast(enabled=recipe is not None, recipe=recipe),
            ):
                y = module(*leaves, checkpoint_core_attention=checkpointed)
            grads = oracle.gradients(y, leaves, dy)
        results.append([y, *grads])
        saved.append(sum(storage_bytes.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert saved[1] < 0.5 * saved[0]


def test_a_checkpointed_bias_has_the_same_gradient():
    module = bshd_attention()
    q, k, v, dy = make(6, 6)
    results = []
    for checkpointed in (False, True):
        leaves = oracle.leaves(q, k, v, torch.ones(1, H, 6, 6))
        y = module(
            *leaves[:3], core_attention_bias_type="pre_scale_bias", core_attention_bias=leaves[3],
            checkpoint_core_attention=checkpointed,
        )  # fmt: skip
        results.append(oracle.gradients(y, leaves, dy))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (5, 5), (1, 4)], ids=str)
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
def test_masks_know_from_their_sizes_if_a_query_is_fully_masked(shape, mask_type):
    sq, sk = shape
    for window in [(left, right) for left in (-1, 0, 2) for right in (-1, 0, 2)]:
        limits = window_of(mask_type, window)
        mask = make_mask(mask_type, limits, sq, sk)
        visible = visible_of(mask_type, window, sq, sk)
        has_fully_masked = any(not any(visible(0, 0, i, j) for j in range(sk)) for i in range(sq))
        assert mask.leaves_no_query_blind(sq, sk) is not has_fully_masked
        assert mask.lets_all is all(visible(0, 0, i, j) for i in range(sq) for j in range(sk))


def test_explain_names_the_backend_and_the_reasons():
    q, k, v, _ = make(5, 5)
    module = bshd_attention()
    assert module.explain(q, k, v).backend == "sdpa"
    assert module.explain(q, k, v, attn_mask_type="no_mask").backend == "sdpa"
    explanation = module.explain(q, k, v, window_size=(2, 0))
    assert explanation.backend == "sdpa_masked"
    assert explanation.rejected["sdpa"] == "the sliding window (2, 0) must be a matrix to it"
    assert "not flex: it is fused on CUDA only" in repr(explanation)
    assert module.explain(q, k, v, window_size=(4, 0)).backend == "sdpa"  # wide enough
    assert module.explain(q[:, -1:], k, v, attn_mask_type="causal_bottom_right").backend == "sdpa"
    with float8lab.autocast(recipe=recipes.DelayedScaling(fp8_dpa=True)):
        assert module.explain(q, k, v).backend == "fp8"
        assert module.explain(q.double(), k.double(), v.double()).backend == "sdpa"
    with float8lab.autocast(recipe=recipes.DelayedScaling()):
        assert "fp8_dpa" in module.explain(q, k, v).rejected["fp8"]


def test_backends_are_tried_in_the_given_order():
    q, k, v, _ = make(5, 5)
    module = bshd_attention(backends=("reference", "sdpa"))
    assert module.explain(q, k, v).backend == "reference"
    sdpa_only = bshd_attention(backends=("sdpa",))
    with pytest.raises(NotImplementedError, match=r"sliding window \(2, 0\).*Add 'sdpa_masked'"):
        sdpa_only(q, k, v, window_size=(2, 0))


@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "causal_bottom_right"])
def test_mask_types_that_ignore_attention_mask_warn(mask_type):
    """As in Transformer Engine, these mask types ignore attention_mask; the module warns of it."""
    module = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type=mask_type)
    q, k, v, _ = make()
    mask = torch.ones(B, 1, 1, SK, dtype=torch.bool)
    with pytest.warns(UserWarning, match=f"attention_mask is not used with .*'{mask_type}'"):
        y = module(q, k, v, mask)
    assert torch.equal(y, module(q, k, v))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(compiled(q, k, v, mask), y)


CALLS = {
    "mask type": ({"attn_mask_type": "diagonal"}, ValueError, "attn_mask_type must be one of"),
    "window": ({"window_size": (-2, 0)}, ValueError, r"window_size\[0\] must be an"),
    "format": ({"qkv_format": "bhsd"}, ValueError, "qkv_format must be one of"),
    "thd without padding": ({"qkv_format": "thd"}, ValueError, "query_layer must have 3 dim"),
    "no padding mask": ({"attn_mask_type": "padding"}, ValueError, "attention_mask must be one"),
    "mask of floats": (
        {"attn_mask_type": "padding", "attention_mask": torch.ones(2, 1, 1, 5)},
        TypeError, "attention_mask must be bool",
    ),
    "mask of a wrong length": (
        {"attn_mask_type": "padding", "attention_mask": torch.ones(2, 1, 1, 4).bool()},
        ValueError, r"attention_mask must be \[B, 1, 1, 5\]",
    ),
    "arbitrary without a mask": (
        {"attn_mask_type": "arbitrary"}, ValueError, "attention_mask must be a bool tensor"
    ),
    "arbitrary mask of floats": (
        {"attn_mask_type": "arbitrary", "attention_mask": torch.ones(5, 5)},
        ValueError, "attention_mask must be a bool tensor",
    ),
    "arbitrary mask of other queries": (
        {"attn_mask_type": "arbitrary", "attention_mask": torch.ones(4, 5).bool()},
        ValueError, "attention_mask must be a bool tensor",
    ),
    "unused mask of other keys": (
        {"attention_mask": torch.ones(2, 1, 1, 4).bool()}, ValueError, "attention_mask must broad"
    ),
    "sequences longer than the tensors": (
        {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 6, 9])},
        ValueError, "cu_seqlens_q must be of sequences of at most 5 tokens",
    ),
    "sequences of another batch": (
        {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 5])},
        ValueError, r"cu_seqlens_q must be \[B \+ 1\], 3",
    ),
    "keys on another device": (
        {"key_layer": torch.ones(2, 5, 2, 8, device="meta")}, ValueError, "key_layer must be on"
    ),
    "bias type": ({"core_attention_bias_type": "bias"}, ValueError, "core_attention_bias_type m"),
    "bias without a type": (
        {"core_attention_bias": torch.ones(1, 4, 5, 5)}, ValueError, "core_attention_bias must be N"
    ),
    "type without a bias": (
        {"core_attention_bias_type": "post_scale_bias"}, ValueError, "must be a tensor"
    ),
    "slopes without alibi": ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes must be N"),
    "slopes of other heads": (
        {"alibi_slopes": torch.ones(3), "core_attention_bias_type": "alibi"},
        ValueError, r"alibi_slopes must be \[4\] or \[2, 4\]",
    ),
    "no query": ({"query_layer": None}, ValueError, "query_layer, key_layer and .*; got key"),
    "packed and not": (
        {"qkv_layer": torch.ones(2, 5, 3, 4, 8)}, ValueError, "or qkv_layer alone; got que"
    ),
    "packed twice": (
        {
            **dict.fromkeys(("query_layer", "key_layer", "value_layer")),
            "qkv_layer": torch.ones(2, 5, 3, 4, 8), "kv_layer": torch.ones(2, 5, 2, 4, 8),
        },
        ValueError, "got kv_layer, qkv_layer",
    ),
    "packed elsewhere": (
        {"key_layer": None, "value_layer": None, "kv_layer": torch.ones(2, 2, 5, 4, 8)},
        ValueError, "kv_layer must have size 2 in dimension -3",
    ),
    "no dimension of packed tensors": (
        {
            "key_layer": None, "value_layer": None, "kv_layer": torch.ones(2, 5, 4, 8, 2),
            "qkv_interleave_dim": -1,
        },
        ValueError, "qkv_interleave_dim must be -3 or -2",
    ),
    "gaps": ({"pad_between_seqs": True}, ValueError, "cu_seqlens_q_padded must be given for pad"),
    "softcap and a bias before it": (
        {
            "softcap": 3.0, "core_attention_bias_type": "pre_scale_bias",
            "core_attention_bias": torch.ones(5, 5),
        },
        NotImplementedError, "softcap must be 0 with",
    ),
    "no layer number": (
        {"inference_params": float8lab.InferenceParams(2, 8)}, ValueError, "layer_number must"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls_are_refused(case):
    kwargs, error, message = CALLS[case]
    q, k, v, _ = make(5, 5)
    module = bshd_attention()
    call = {"query_layer": q, "key_layer": k, "value_layer": v, **kwargs}
    with pytest.raises(error, match=message):
        module(**call)


CONSTRUCTIONS = {
    "groups": ({"num_gqa_groups": 3}, ValueError, "num_gqa_groups must divide"),
    "no groups": ({"num_gqa_groups": 0}, ValueError, "num_gqa_groups must be an integer"),
    "flag": ({"sequence_parallel": "no"}, TypeError, "sequence_parallel must be True or False"),
    "type": ({"attention_type": "inter"}, ValueError, "attention_type must be 'self' or 'cross'"),
    "dropout": ({"attention_dropout": 1.0}, ValueError, "attention_dropout must be a finite"),
    "format": ({"qkv_format": "sb3hd"}, ValueError, "qkv_format must be one of"),
    "tp": ({"tp_size": 3}, ValueError, "num_gqa_groups must be a multiple of the 3 tensor-par"),
    "backends": ({"backends": ("cudnn",)}, ValueError, "backends must be names"),
    "softmax": ({"softmax_type": "sink"}, ValueError, "softmax_type must be one of 'vanilla'"),
    "no backends": ({"backends": ()}, ValueError, "backends must be names"),
}


@pytest.mark.parametrize("case", CONSTRUCTIONS)
def test_wrong_constructions_are_refused(case):
    kwargs, error, message = CONSTRUCTIONS[case]
    with pytest.raises(error, match=message):
        DotProductAttention(4, 8, **kwargs)


def test_wrong_heads_and_thd_lengths_are_refused():
    module = DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd")
    q, k, v, _ = make(5, 5)
    with pytest.raises(ValueError, match=r"key_layer must have 4 .* last two \[2, 8\]"):
        module(q, q, v)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="attn_mask_type must be padding"):
        module(*flat, qkv_format="thd")
    with pytest.raises(ValueError, match="cu_seqlens_q must be given"):
        module(*flat, qkv_format="thd", attn_mask_type="padding")
    lengths = torch.tensor([0, 4, 8])
    for wrong, message in (
        ({"cu_seqlens_q": lengths[1:]}, r"cu_seqlens_q must be .* from 0 on, .*got \[4, 8\]"),
        ({"cu_seqlens_q_padded": torch.tensor([0, 3, 8])}, r"q_padded must leave .*; got \[3, 5\]"),
        ({"cu_seqlens_kv_padded": lengths - 1}, r"cu_seqlens_kv_padded must be .* none less than"),
        (
            {"cu_seqlens_kv": lengths, "cu_seqlens_q_padded": lengths, "pad_between_seqs": True},
            "cu_seqlens_kv_padded must be given for pad_between_seqs=True",
        ),
    ):
        call = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": lengths, **wrong}
        with pytest.raises(ValueError, match=message):
            module(*flat, **call)


def test_parallel_arguments_have_no_effect_on_one_rank():
    module = DotProductAttention(
        2, 4, sequence_parallel=True, tp_size=1, tp_group=None, cp_group=None, cp_global_ranks=[0],
        cp_stream=None, cp_comm_type="a2a",
    )  # fmt: skip
    module.set_tensor_parallel_group(None)
    module.set_context_parallel_group(None, [0], None)
    q, k, v = torch.randn(3, 4, 1, 2, 4)
    plain = DotProductAttention(2, 4)
    assert torch.equal(module(q, k, v), plain(q, k, v))
    assert torch.equal(module(q, k, v, fast_zero_fill=False), plain(q, k, v))


@pytest.mark.parametrize(
    ("variant", "fp8"),
    [
        *((variant, False) for variant in ("window", "padding", "alibi", "softcap")),
        ("causal", True),
        ("checkpointed", True),
    ],
)
def test_compiled_attention_equals_eager(variant, fp8):
    torch._dynamo.reset()
    module = bshd_attention()
    kwargs = {
        "causal": {},
        "window": {"window_size": (2, 0)},
        "padding": {"attn_mask_type": "padding", "attention_mask": padding_mask([3, 5], 5)},
        "alibi": {"core_attention_bias_type": "alibi", "alibi_slopes": torch.rand(H)},
        "softcap": {"softcap": 2.0, "window_size": (2, 0)},
        "checkpointed": {"checkpoint_core_attention": True},
    }[variant]
    q, k, v, dy = make(5, 5)
    module._warned.add("high precision")  # the FP8 kernel does not take most of these variants
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, module):
        leaves = oracle.leaves(q, k, v)
        with float8lab.autocast(enabled=fp8, recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
            y = function(*leaves, **kwargs)
        results.append([y, *oracle.gradients(y, leaves, dy)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:.*flex_attention:UserWarning")  # not compiled
def test_flex_compiles_once_per_kind_of_mask():
    """Dynamo stops compiling after 8 versions; uncompiled flex would hold all scores in memory."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    q, k, v = (x.transpose(1, 2) for x in make(SQ, SK, g=H)[:3])
    padding = (padding_mask(Q_LENGTHS, SQ)[:, 0, 0], padding_mask(KV_LENGTHS, SK)[:, 0, 0])
    for kind in ("causal", "no_mask", "padding_causal"):
        for window in [(3, 1), (2, 2), (4, -1), (1, 0), (-1, 1), (0, 3)]:
            padded = padding if kind == "padding_causal" else None
            mask = make_mask(kind, window_of(kind, window), SQ, SK, padding=padded)
            problem = Problem(mask, 0.3)
            score_mod, block_mask = _flex_modifiers(q, k, problem, _Places.of(q, k, None))
            out = compiled(q, k, v, score_mod, block_mask, 0.3)
            expected, _ = reference_attention(q, k, v, problem)
            if padded:
                out = out.masked_fill(padded[0][:, None, :, None], 0.0)
            assert torch.allclose(out, expected, atol=1e-5)
    assert counter.frame_count <= 3  # 2 with torch 2.13: without padding and with it


@pytest.mark.parametrize("lengths", ["", "padded", "packed"])
@pytest.mark.parametrize("kind", ["causal", "no_mask"])
def test_block_masks_of_flex_cover_exactly_the_visible_pairs(kind, lengths):
    """Blocks equal those of all pairs; flex may also visit blocks of padding and unseen keys."""
    sq, sk, packed, padding = 300, 520, None, None
    if lengths == "padded":
        padding = (padding_mask([300, 90], sq)[:, 0, 0], padding_mask([520, 256], sk)[:, 0, 0])
    if lengths == "packed":  # with tokens between and after the sequences
        sizes = [20, 0, 130, 140], [150, 40, 0, 300]
        starts = [0, 30, 30, 160, sq], [0, 160, 200, 200, sk]
        packed = [Packed.of(cumulative(n), torch.tensor(start), None)
                  for n, start in zip(sizes, starts, strict=True)]  # fmt: skip
        padding = [side.padding() for side in packed]
    B = 1 if packed else 2
    q, k = torch.empty(B, 1, sq, 4), torch.empty(B, 1, sk, 4)
    for window in [(200, 0), (130, 5), (-1, 140), (300, -1), (0, 0)]:
        kind_of_padding = "padding_causal" if kind == "causal" else "padding"
        longest = [side.longest for side in packed] if packed else (sq, sk)
        mask = make_mask(
            kind_of_padding if padding else kind, window_of(kind, window), *longest, padding=padding
        )
        pairs = mask.allowed(*longest, q.device).expand(len(sizes[0]) if packed else 2, 1, -1, -1)
        if packed:
            rows, pairs = pairs[:, 0], torch.zeros(1, 1, sq, sk, dtype=torch.bool)
            starts_and_sizes = zip(rows, starts[0], sizes[0], starts[1], sizes[1], strict=False)
            for row, i, m, j, n in starts_and_sizes:
                pairs[0, 0, i : i + m, j : j + n] = row[:m, :n]
        pairs = torch.nn.functional.pad(pairs, (0, -sk % 128, 0, -sq % 128))
        blocks = pairs.unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
        visible_blocks, full_blocks = blocks.any(5).any(3), blocks.all(5).all(3)
        starts_and_sizes = _Places.of(q, k, packed)
        _, block_mask = _flex_modifiers(q, k, Problem(mask, 1.0, packed=packed), starts_and_sizes)
        shape = block_mask.kv_num_blocks.shape[0], 1, *visible_blocks.shape[2:]
        partial_listed, full_listed = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
        for dense, counts, indices in (
            (partial_listed, block_mask.kv_num_blocks, block_mask.kv_indices),
            (full_listed, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        ):
            for b, i in itertools.product(range(shape[0]), range(shape[2])):
                dense[b, 0, i, indices[b, 0, i, : counts[b, 0, i]].long()] = True
        assert not (partial_listed & full_listed).any()
        assert torch.equal(full_listed.expand_as(full_blocks), full_blocks)
        assert (~visible_blocks | partial_listed | full_listed).all()
        assert lengths or torch.equal(
            (partial_listed | full_listed).expand_as(visible_blocks), visible_blocks
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@each_mask
@pytest.mark.parametrize("window", [None, (70, 20)], ids=str)
def test_backends_are_near_the_float64_reference_on_a_gpu(mask_type, window, backend, dtype):
    torch._dynamo.reset()  # otherwise the variants of this test exceed the limit of compilations
    sq, sk, d = 150, 200, 64
    shapes = [(2, sq, H, d), (2, sk, G, d), (2, sk, G, d), (2, sq, H * d)]
    q, k, v, dy = (torch.randn(s, device="cuda", dtype=dtype) for s in shapes)
    mask = None
    if "padding" in mask_type:
        pair = (padding_mask([150, 90], sq), padding_mask([200, 120], sk))
        mask = tuple(m.cuda() for m in pair)
    module = DotProductAttention(
        H, d, num_gqa_groups=G, qkv_format="bshd", attn_mask_type=mask_type, window_size=window,
        attention_type="cross",
    )  # fmt: skip
    results = []
    for backends, high in (((backend,), False), (("reference",), True)):
        module.backends = backends
        leaves = oracle.leaves(*((t.double() if high else t) for t in (q, k, v)))
        tensors = []
        for bias in ("no_bias", "alibi") if backend in ("flex", "reference") else ("no_bias",):
            try:
                y = module(*leaves, mask, core_attention_bias_type=bias)
            except NotImplementedError:
                pytest.skip("not for this backend")
            tensors += [y, *oracle.gradients(y, leaves, dy)]
        results.append(tensors)
    for a, e in zip(*results, strict=True):
        error = (a.double() - e).norm() / e.norm()
        # Every GEMM rounds its operands to dtype (to TF32 in flex under float32).
        assert error <= 8 * (2.0**-10 if dtype == torch.float32 else 2.0**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [64, 128, (192, 128), 256], ids=str)
def test_flex_is_near_float64_for_every_head_size_on_a_gpu(channels, dtype):
    """The blocks fit into shared memory, also in backward, with softcap, sinks and maxima."""
    torch._dynamo.reset()
    options = {"qkv_format": "bshd", "softmax_type": "learnable", "return_max_logit": True}
    module = DotProductAttention(H, channels, G, **options, window_size=(90, 0)).cuda()
    torch.nn.init.normal_(module.softmax_offset)
    d, dv = module.qk_channels, module.v_channels
    shapes = [(2, 300, H, d), (2, 300, G, d), (2, 300, G, dv), (2, 300, H * dv)]
    q, k, v, dy = (torch.randn(s, device="cuda", dtype=dtype) for s in shapes)
    results = []
    for names, high in (("flex",), False), (("reference",), True):
        module.backends = names
        leaves = oracle.leaves(*((t.double() if high else t) for t in (q, k, v)))
        y, largest = module(*leaves, softcap=3.0)
        grads = oracle.gradients(y, [*leaves, module.softmax_offset], dy)
        results.append([y, largest, *grads])
    for a, e in zip(*results, strict=True):
        error = (a.double() - e.double()).norm() / e.double().norm()
        assert error <= 8 * (2.0**-10 if dtype == torch.float32 else 2.0**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dropout", "float32 groups", "values of another size", "float64"])
def test_no_backend_stores_the_matrix_of_scores_on_a_gpu(kind):
    """The tensors of forward and backward take less than half of the memory of all scores."""
    channels = (64, 32) if kind == "values of another size" else 64
    dtype = {"float32 groups": torch.float32, "float64": torch.float64}.get(kind, torch.bfloat16)
    module = DotProductAttention(
        16, channels, 4, attention_dropout=0.1 if kind == "dropout" else 0.0, qkv_format="bshd"
    )
    sizes = (16, module.qk_channels), (4, module.qk_channels), (4, module.v_channels)
    q, k, v = (torch.randn(1, 8192, *size, device="cuda", dtype=dtype) for size in sizes)
    leaves = oracle.leaves(q, k, v)
    module._warned.add("blocks")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    window = (1000, 0) if kind == "dropout" else None
    module(*leaves, window_size=window).sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    scores = 16 * 8192 * 8192 * q.element_size()
    assert torch.cuda.max_memory_allocated() - before < 0.5 * scores


@pytest.mark.gpu
def test_default_backends_on_a_gpu_follow_the_features_of_the_call():
    q, k, v = torch.randn(3, 2, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    module = DotProductAttention(4, 64, qkv_format="bshd")
    assert module.explain(q, k, v, softcap=9.0).backend == "flex"
    assert module.explain(q, k, v).backend == "sdpa"
    assert module.explain(q, k, v, window_size=(64, 0)).backend == "flex"
    assert module.explain(q, k, v, core_attention_bias_type="alibi").backend == "flex"
    assert module.explain(q[:, :1], k, v, window_size=(64, 0)).backend == "sdpa_masked"


SDP = ("cudnn_sdp", "flash_sdp", "mem_efficient_sdp", "math_sdp")


def sdp_enabled():
    return {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in SDP}


@pytest.mark.parametrize("off", [(), ("cudnn_sdp",), ("flash_sdp",), SDP[1:]], ids=str)
def test_cudnn_is_disabled_only_inside_the_context(off):
    """Backends that the user turned off stay off, unless no backend would take every call."""
    before = sdp_enabled()
    try:
        for name in off:
            getattr(torch.backends.cuda, f"enable_{name}")(False)
        enabled_before = sdp_enabled()
        with contextlib.suppress(KeyError), _without_cudnn():
            enabled_inside = sdp_enabled()
            raise KeyError
        assert sdp_enabled() == enabled_before
    finally:
        for name, on in before.items():
            getattr(torch.backends.cuda, f"enable_{name}")(on)
    assert not enabled_inside.pop("cudnn_sdp")
    expected_inside = {name: off == SDP[1:] or name not in off for name in SDP[1:]}
    assert enabled_inside == expected_inside
