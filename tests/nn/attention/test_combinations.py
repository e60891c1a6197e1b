"""Attention with every combination of mask and feature: outputs and gradients against float64."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import float8lab
from float8lab import recipes
from float8lab.nn.attention import (
    BACKENDS,
    DotProductAttention,
    InferenceParams,
    alibi_slopes,
    backends,
)
from tests.docs.attention_table import (
    FEATURES,
    HEADS,
    LARGE,
    MASKS,
    PAGE,
    Sizes,
    arguments,
    build,
    decide,
    gives_matrix,
    lengths_of,
    page_with,
    render,
)
from tests.nn.attention import oracle
from tests.nn.attention.test_dot_product import MASKS as DIAGONALS


def sizes_of(mask):
    return Sizes(2, 5, 8 if mask.cross else 5, 4, 2, 8, 6)


def visible_of(mask, sizes):
    """The visibility function for the oracle."""
    if mask.mask_type == "arbitrary":
        return None
    causal, padded, diagonal = DIAGONALS[mask.mask_type]
    left, right = mask.window or (-1, -1)
    lengths = [(sizes.Sq, sizes.Sk)] * sizes.B
    if padded:
        lengths = list(zip(*lengths_of(mask, sizes), strict=True))
    spans = [diagonal(*pair) for pair in lengths]
    return oracle.visible_pairs(lengths, left, 0 if causal else right, spans)


def spans_of(mask, sizes):
    """Sk - Sq of each sequence; ALiBi is aligned to it."""
    if not mask.lengths:
        return [sizes.Sk - sizes.Sq] * sizes.B
    return [keys - queries for queries, keys in zip(*lengths_of(mask, sizes), strict=True)]


def packed(x, lengths, gaps):
    """``[B, S, ...]`` as thd; with ``gaps``, tokens of NaN lie between the sequences."""
    rows = []
    for row, length in zip(x, lengths, strict=True):
        rows.append(row[:length])
        if gaps:
            rows.append(torch.full_like(row[length:], torch.nan))
    return torch.cat(rows)


def padded(y, lengths, longest, gaps):
    """The inverse of ``packed``: ``[B, S, ...]`` with 0 as padding."""
    steps = [longest] * len(lengths) if gaps else lengths
    rows = [row[:n] for row, n in zip(y.split(steps), lengths, strict=True)]
    return torch.stack([F.pad(row, (0, 0, 0, longest - row.shape[0])) for row in rows])


def run(module, mask, sizes, inputs, call):
    """The output ``[B, Sq, H * Dv]``, and the largest scores if the module returns them."""
    gaps = "gaps" in mask.lengths
    lengths = lengths_of(mask, sizes)
    if "thd" in mask.lengths:
        lengths_of_inputs = (lengths[0], lengths[1], lengths[1])
        inputs = [
            packed(x, side_lengths, gaps)
            for x, side_lengths in zip(inputs, lengths_of_inputs, strict=True)
        ]
    y = module(*inputs, **call)
    y, largest = y if isinstance(y, tuple) else (y, None)
    if "thd" in mask.lengths:
        y = padded(y, lengths[0], sizes.Sq, gaps)
    return y, largest


@pytest.fixture
def tiny_blocks(monkeypatch):
    monkeypatch.setattr(backends, "MOST_SCORES", 0)
    monkeypatch.setattr(backends, "_LEAST_QUERIES", 2)


# The module warns about the blocks of two queries.
@pytest.mark.filterwarnings("ignore:this DotProductAttention runs by the backend")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", MASKS)
def test_every_mask_with_every_feature_equals_float64(kind, feature, monkeypatch):
    mask, options = MASKS[kind], FEATURES[feature]
    sizes = sizes_of(mask)
    B, Sq, Sk, H, G, D, Dv = sizes
    q, k, v = torch.randn(B, Sq, H, D), torch.randn(B, Sk, G, D), torch.randn(B, Sk, G, Dv)
    dy = torch.randn(B, Sq, H * Dv)
    call = arguments(mask, options, sizes, torch.randn, mask.window)
    visible, oracle_options = visible_of(mask, sizes), {}
    if mask.mask_type == "arbitrary":
        hidden = call["attention_mask"]
        hidden[:, :, 2] = True  # a fully masked query

        def visible(b, h, i, j):
            return not hidden[b, 0, i, j]

    module = build(
        mask, options, sizes, backends=("reference",) if "dropout" in feature else BACKENDS
    )
    parameters = [module.softmax_offset] if feature == "sinks" else []
    exact_leaves = oracle.leaves(*(x.double() for x in (q, k, v, *parameters)))
    for x in parameters:
        torch.nn.init.normal_(x)
        exact_leaves[3].data.copy_(x)
    if "core_attention_bias" in call:
        bias = call["core_attention_bias"].requires_grad_()
        parameters.append(bias)
        exact_leaves.append(bias.detach().double().requires_grad_())
        oracle_options["bias"] = exact_leaves[-1].expand(B, H, Sq, Sk)
    if feature == "ALiBi":
        span = torch.tensor(spans_of(mask, sizes)).view(B, 1, 1, 1)
        distance = torch.arange(Sq).view(-1, 1) + span - torch.arange(Sk)
        oracle_options["bias"] = -alibi_slopes(H).view(H, 1, 1) * distance.abs()
    if feature in ("off-by-one", "sinks"):
        oracle_options["sinks"] = exact_leaves[3] if feature == "sinks" else torch.zeros(H).double()
    if feature == "dropout":
        torch.manual_seed(7)
        oracle_options["dropout_factors"] = F.dropout(torch.ones(B, H, Sq, Sk), 0.25)
    maxima = [[] for _ in range(H)]
    softcap = options.get("softcap", 0.0)
    expected = oracle.attend(
        *exact_leaves[:3], visible, softcap=softcap, maxima=maxima, **oracle_options
    )
    expected_tensors = [expected, *oracle.gradients(expected, exact_leaves, dy)]
    for in_blocks in (False, True):
        if in_blocks:
            monkeypatch.setattr(backends, "MOST_SCORES", 0)
            monkeypatch.setattr(backends, "_LEAST_QUERIES", 2)
            if feature == "dropout":
                continue  # each block draws other dropout
        leaves = oracle.leaves(q, k, v)
        torch.manual_seed(7)
        y, largest = run(module, mask, sizes, leaves, call)
        actual_tensors = [y, *oracle.gradients(y, [*leaves, *parameters], dy)]
        oracle.assert_close(actual_tensors, expected_tensors, torch.float32)
        assert (largest is None) is (feature != "max logit")
        if largest is not None:
            assert largest.tolist() == pytest.approx([max(scores) for scores in maxima], rel=1e-5)


@pytest.mark.filterwarnings("ignore:this DotProductAttention runs by the backend")
@pytest.mark.parametrize("kind", ["window `(w, 0)`", "padding, causal", "bottom-right causal"])
@pytest.mark.parametrize("names", [BACKENDS, ("reference",)], ids=["default", "reference"])
def test_blocks_drop_the_same_probabilities_in_backward(kind, names, tiny_blocks):
    """With unit vectors as values, the output is the probabilities p, and dv must be p.T @ dy."""
    mask = MASKS[kind]
    sizes = sizes_of(mask)._replace(G=4, Dv=sizes_of(mask).Sk)
    module = build(mask, FEATURES["dropout"], sizes, backends=names)
    q, k = torch.randn(sizes.B, sizes.Sq, 4, 8), torch.randn(sizes.B, sizes.Sk, 4, 8)
    v = torch.eye(sizes.Sk)[None, :, None].expand(sizes.B, sizes.Sk, 4, -1).clone()
    v.requires_grad_()
    call = arguments(mask, {}, sizes, torch.randn, mask.window)
    p = module(q, k, v, **call).unflatten(-1, (4, -1))
    assert module.explain(q, k, v, **call).block == 2
    dy = torch.randn_like(p)
    (dv,) = torch.autograd.grad(p.flatten(2), v, dy.flatten(2))
    torch.testing.assert_close(dv, torch.einsum("bihj,bihd->bjhd", p, dy))
    assert 0.1 < (p == 0).sum() / p.numel() < 0.9


@pytest.mark.filterwarnings("ignore:.*flex_attention:UserWarning")  # uncompiled, as on the CPU
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in ("bias", "dropout")])
@pytest.mark.parametrize("kind", [kind for kind, mask in MASKS.items() if "thd" in mask.lengths])
def test_flex_attends_to_packed_sequences_without_unpacking(kind, feature, device):
    """Flex gives the results of the reference without unpacking, on a GPU gradients, too."""
    on_gpu = device.type == "cuda"
    if feature == "max logit" and not on_gpu:
        pytest.skip("flex does not give the largest scores there")
    torch._dynamo.reset()
    mask, options = MASKS[kind], FEATURES[feature]
    sizes = Sizes(3, 90, 90, 4, 2, 32, 16)
    q, k, v = (torch.randn(3, 90, *size, device=device) for size in ((4, 32), (2, 32), (2, 16)))
    call = arguments(mask, options, sizes, torch.randn, mask.window)
    call = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    call["cu_seqlens_kv"] = call["cu_seqlens_q"]
    results, dy = [], torch.randn(3, 90, 64, device=device)
    for name in ("flex", "reference"):
        module = build(mask, options, sizes, backends=(name,)).to(device)
        inputs = oracle.leaves(q, k, v) if on_gpu else (q, k, v)
        with mock.patch.object(backends.Packed, "unpack") if name == "flex" else nullcontext():
            y, largest = run(module, mask, sizes, inputs, call)
        grads = oracle.gradients(y, inputs, dy) if on_gpu else []
        results.append([y, *grads, *([] if largest is None else [largest])])
    for actual, expected in zip(*results, strict=True):
        bound = 2.0**-7 if actual.is_cuda else 1e-6  # TF32
        assert (actual - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    "kind", ["causal", "window `(w, 0)`", "thd, causal", "thd, window `(w, 0)`"]
)
def test_sinks_in_fp8_attention_stay_within_the_noise_of_casts(kind, device):
    """Results and the gradient of the sinks equal those in high precision but for cast noise."""
    mask = MASKS[kind]
    sizes = Sizes(2, 40, 40, 4, 2, 16, 16)
    module = build(mask, FEATURES["sinks"], sizes).to(device)
    torch.nn.init.normal_(module.softmax_offset, mean=1.0)
    q, k, v = torch.randn(3, 2, 40, 4, 16, device=device).bfloat16()
    inputs = oracle.leaves(q, k[:, :, :2], v[:, :, :2])
    call = arguments(mask, {}, sizes, torch.randn, mask.window)
    call = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    if mask.lengths:
        call["cu_seqlens_kv"] = call["cu_seqlens_q"]
    dy, results = None, []
    for enabled in (False, True):
        with float8lab.autocast(enabled, recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
            y, _ = run(module, mask, sizes, inputs, call)
        dy = y.detach() if dy is None else dy  # with this loss the sinks' terms have one sign
        results.append([y, *oracle.gradients(y, [*inputs, module.softmax_offset], dy)])
    for expected, actual in zip(*results, strict=True):
        noise = (actual.double() - expected.double()).norm() / expected.double().norm()
        assert 0 < noise < 10 ** (-22 / 20)


def test_memory_is_linear_for_every_combination_and_the_page_is_up_to_date():
    for kind, mask in MASKS.items():
        for name, feature in FEATURES.items():
            decision = decide(mask, feature)
            linear = decision.backend in ("sdpa", "flex") or decision.block is not None
            assert linear or gives_matrix(mask, feature), (kind, name)
    for D, Dv in HEADS.values():
        decision = decide(MASKS["causal"], {}, LARGE._replace(D=D, Dv=Dv))
        assert decision.backend in ("sdpa", "flex")
    page = PAGE.read_text()
    assert page_with(render(), page) == page, "run python -m tests.docs.attention_table"


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_cached_attention_applies_softcaps_and_sinks(softcap, softmax_type):
    module = DotProductAttention(2, 8, layer_number=1, softmax_type=softmax_type)
    q, k, v = torch.randn(3, 6, 1, 2, 8)
    cache, parts = InferenceParams(1, 8), []
    with torch.no_grad():
        for start, stop in (0, 4), (4, 5), (5, 6):
            cache.sequence_len_offset = start
            qkv = (x[start:stop] for x in (q, k, v))
            parts.append(module(*qkv, inference_params=cache, softcap=softcap))
        expected = module(q, k, v, softcap=softcap)
    torch.testing.assert_close(torch.cat(parts), expected)


def test_a_module_warns_once_that_it_runs_in_blocks(tiny_blocks):
    module = DotProductAttention(2, 4, window_size=(2, 0))
    q, k, v = torch.randn(3, 5, 1, 2, 4)
    with pytest.warns(UserWarning, match="'sdpa_masked', 2 queries at a time: .* flex: it is fu"):
        module(q, k, v)
    module(q, k, v)  # a second warning would be an error
    assert repr(module.explain(q, k, v)).startswith("backend: sdpa_masked, 2 queries at a time\n")
