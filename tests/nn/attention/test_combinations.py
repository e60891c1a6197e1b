"""Every mask with every feature of attention: outputs and gradients against float64."""

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
    """The visibility of the oracle."""
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
    """Sk - Sq of each sequence, to which ALiBi is aligned."""
    if not mask.lengths:
        return [sizes.Sk - sizes.Sq] * sizes.B
    return [keys - queries for queries, keys in zip(*lengths_of(mask, sizes), strict=True)]


def packed(x, lengths, gaps):
    """``[B, S, ...]`` as thd; with NaN between the sequences if there are to be tokens."""
    rows = []
    for row, length in zip(x, lengths, strict=True):
        rows.append(row[:length])
        if gaps:
            rows.append(torch.full_like(row[length:], torch.nan))
    return torch.cat(rows)


def padded(y, lengths, longest, gaps):
    """The inverse: 0 where there is no token."""
    steps = [longest] * len(lengths) if gaps else lengths
    rows = [row[:n] for row, n in zip(y.split(steps), lengths, strict=True)]
    return torch.stack([F.pad(row, (0, 0, 0, longest - row.shape[0])) for row in rows])


def run(module, mask, sizes, inputs, call):
    """Output ``[B, Sq, H * Dv]``, and the largest scores if they are returned."""
    gaps = "gaps" in mask.lengths
    lengths = lengths_of(mask, sizes)
    if "thd" in mask.lengths:
        sides = (lengths[0], lengths[1], lengths[1])
        inputs = [packed(x, its, gaps) for x, its in zip(inputs, sides, strict=True)]
    y = module(*inputs, **call)
    y, largest = y if isinstance(y, tuple) else (y, None)
    if "thd" in mask.lengths:
        y = padded(y, lengths[0], sizes.Sq, gaps)
    return y, largest


@pytest.fixture
def tiny_blocks(monkeypatch):
    monkeypatch.setattr(backends, "MOST_SCORES", 0)
    monkeypatch.setattr(backends, "_LEAST_QUERIES", 2)


# In blocks of two queries, the module says so.
@pytest.mark.filterwarnings("ignore:this DotProductAttention runs by the backend")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", MASKS)
def test_against_float64(kind, feature, monkeypatch):
    mask, options = MASKS[kind], FEATURES[feature]
    sizes = sizes_of(mask)
    B, Sq, Sk, H, G, D, Dv = sizes
    q, k, v = torch.randn(B, Sq, H, D), torch.randn(B, Sk, G, D), torch.randn(B, Sk, G, Dv)
    dy = torch.randn(B, Sq, H * Dv)
    call = arguments(mask, options, sizes, torch.randn, mask.window)
    visible, extra = visible_of(mask, sizes), {}
    if mask.mask_type == "arbitrary":
        hidden = call["attention_mask"]
        hidden[:, :, 2] = True  # a query that sees nothing

        def visible(b, h, i, j):
            return not hidden[b, 0, i, j]

    module = build(
        mask, options, sizes, backends=("reference",) if "dropout" in feature else BACKENDS
    )
    parameters = [module.softmax_offset] if feature == "sinks" else []
    exact = oracle.leaves(*(x.double() for x in (q, k, v, *parameters)))
    for x in parameters:
        torch.nn.init.normal_(x)
        exact[3].data.copy_(x)
    if "core_attention_bias" in call:
        bias = call["core_attention_bias"].requires_grad_()
        parameters.append(bias)
        exact.append(bias.detach().double().requires_grad_())
        extra["bias"] = exact[-1].expand(B, H, Sq, Sk)
    if feature == "ALiBi":
        span = torch.tensor(spans_of(mask, sizes)).view(B, 1, 1, 1)
        distance = torch.arange(Sq).view(-1, 1) + span - torch.arange(Sk)
        extra["bias"] = -alibi_slopes(H).view(H, 1, 1) * distance
    if feature in ("off-by-one", "sinks"):
        extra["sinks"] = exact[3] if feature == "sinks" else torch.zeros(H).double()
    if feature == "dropout":
        torch.manual_seed(7)
        extra["kept"] = F.dropout(torch.ones(B, H, Sq, Sk), 0.25)
    maxima = [[] for _ in range(H)]
    softcap = options.get("softcap", 0.0)
    expected = oracle.attend(*exact[:3], visible, softcap=softcap, maxima=maxima, **extra)
    wanted = [expected, *oracle.gradients(expected, exact, dy)]
    for blocks in (False, True):
        if blocks:
            monkeypatch.setattr(backends, "MOST_SCORES", 0)
            monkeypatch.setattr(backends, "_LEAST_QUERIES", 2)
            if feature == "dropout":
                continue  # each block drops others
        mine = oracle.leaves(q, k, v)
        torch.manual_seed(7)
        y, largest = run(module, mask, sizes, mine, call)
        found = [y, *oracle.gradients(y, [*mine, *parameters], dy)]
        oracle.assert_close(found, wanted, torch.float32)
        assert (largest is None) is (feature != "max logit")
        if largest is not None:
            assert largest.tolist() == pytest.approx([max(scores) for scores in maxima], rel=1e-5)


@pytest.mark.filterwarnings("ignore:this DotProductAttention runs by the backend")
@pytest.mark.parametrize("kind", ["window `(w, 0)`", "padding, causal", "bottom-right causal"])
@pytest.mark.parametrize("names", [BACKENDS, ("reference",)], ids=["default", "reference"])
def test_blocks_drop_the_same_probabilities_in_backward(kind, names, tiny_blocks):
    """Values that are unit vectors show the probabilities: dv is theirs, transposed, times dy."""
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
def test_flex_takes_packed_sequences_where_they_lie(kind, feature, device):
    """What rows give; on a GPU gradients, too. No row is as long as the longest sequence."""
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
    for found, expected in zip(*results, strict=True):
        bound = 2.0**-7 if found.is_cuda else 1e-6  # TF32
        assert (found - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    "kind", ["causal", "window `(w, 0)`", "thd, causal", "thd, window `(w, 0)`"]
)
def test_sinks_in_fp8(kind, device):
    """As in high precision, to the noise of the casts; the sinks' gradient, too."""
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
        dy = y.detach() if dy is None else dy  # a loss of which the sinks' terms have one sign
        results.append([y, *oracle.gradients(y, [*inputs, module.softmax_offset], dy)])
    for expected, found in zip(*results, strict=True):
        noise = (found.double() - expected.double()).norm() / expected.double().norm()
        assert 0 < noise < 10 ** (-22 / 20)


def test_no_combination_holds_all_scores_and_the_page_says_what_runs():
    for kind, mask in MASKS.items():
        for name, feature in FEATURES.items():
            found = decide(mask, feature)
            linear = found.backend in ("sdpa", "flex") or found.block is not None
            assert linear or gives_matrix(mask, feature), (kind, name)
    for D, Dv in HEADS.values():
        found = decide(MASKS["causal"], {}, LARGE._replace(D=D, Dv=Dv))
        assert found.backend in ("sdpa", "flex")
    page = PAGE.read_text()
    assert page_with(render(), page) == page, "run python -m tests.docs.attention_table"


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_a_cache_has_softcaps_and_sinks(softcap, softmax_type):
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


def test_a_module_says_once_that_it_runs_in_blocks(tiny_blocks):
    module = DotProductAttention(2, 4, window_size=(2, 0))
    q, k, v = torch.randn(3, 5, 1, 2, 4)
    with pytest.warns(UserWarning, match="'sdpa_masked', 2 queries at a time: .* flex: it is fu"):
        module(q, k, v)
    module(q, k, v)  # a second warning would be an error
    assert repr(module.explain(q, k, v)).startswith("backend: sdpa_masked, 2 queries at a time\n")
