"""The key/value cache: steps equal the whole context; ragged batches; FP8; limits."""

import pytest
import torch

import float8lab
from float8lab.nn import DotProductAttention, InferenceParams, RotaryPositionEmbedding
from tests.recorder import Ops

B, S, H, G, D = 3, 9, 4, 2, 8


def make(qkv_format="bshd"):
    x = [torch.randn(B, S, n, D) for n in (H, G, G)]
    return x if qkv_format == "bshd" else [t.transpose(0, 1) for t in x]


def part(x, qkv_format, start, end):
    return x[:, start:end] if qkv_format == "bshd" else x[start:end]


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("steps", [(9,), (4, 1, 1, 1, 1, 1), (1,) * 9, (3, 3, 3)], ids=str)
@pytest.mark.parametrize("call", [
    {}, {"window_size": (3, 0)}, {"attn_mask_type": "causal_bottom_right"},
    {"core_attention_bias_type": "alibi"},
], ids=["causal", "window", "bottom-right", "alibi"])  # fmt: skip
def test_prefill_and_decode_equal_the_whole(qkv_format, steps, call):
    attention = DotProductAttention(H, D, G, qkv_format=qkv_format, layer_number=1)
    q, k, v = make(qkv_format)
    whole = attention(q, k, v, **call)
    params = InferenceParams(B, S)
    outputs = []
    for n in steps:
        start = params.sequence_len_offset
        pieces = [part(x, qkv_format, start, start + n) for x in (q, k, v)]
        outputs.append(attention(*pieces, inference_params=params, **call))
        params.sequence_len_offset += n
    y = torch.cat(outputs, dim=1 if qkv_format == "bshd" else 0)
    assert torch.allclose(y, whole, atol=1e-6)


def test_no_mask_decodes_over_all_that_is_cached():
    attention = DotProductAttention(
        H, D, G, qkv_format="bshd", layer_number=1, attn_mask_type="no_mask"
    )
    q, k, v = make()
    params = InferenceParams(B, S)
    with torch.inference_mode():  # which makes the cache, and does not keep it
        attention(q[:, :5], k[:, :5], v[:, :5], inference_params=params)
    params.sequence_len_offset = 5
    y = attention(q[:, 5:], k[:, 5:], v[:, 5:], inference_params=params)
    assert torch.allclose(y, attention(q[:, 5:], k, v), atol=1e-6)


@pytest.mark.gpu
def test_a_growing_cache_does_without_cudnn():
    """Which prepares itself anew for each length, and takes longer for that than for the rest."""
    attention = DotProductAttention(8, 64, 2, qkv_format="bshd", layer_number=1)
    q, k, v = (torch.randn(B, 40, n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    whole = attention(q, k, v)
    params = InferenceParams(B, 40)
    outputs = []
    with torch.no_grad():
        for start, end in ((0, 32), (32, 33), (33, 34), (34, 40)):
            with Ops() as ops:
                outputs.append(
                    attention(*(x[:, start:end] for x in (q, k, v)), inference_params=params)
                )
            params.sequence_len_offset = end
            if end - start == 1:
                ours = [name for name in ops.names if "attention" in name]
                assert ours
                assert not any("cudnn" in name for name in ours)
    error = (torch.cat(outputs, dim=1) - whole).norm() / whole.norm()
    assert error < 4e-3  # bfloat16, rounded once


def test_padded_prompts():
    """Prompts padded on the left, as batched generation does; the mask covers the cache."""
    attention = DotProductAttention(
        H, D, G, qkv_format="bshd", layer_number=1, attn_mask_type="padding_causal"
    )
    q, k, v = make()
    before = torch.tensor([0, 2, 4])
    mask = (torch.arange(S) < before[:, None])[:, None, None]
    params = InferenceParams(B, S)
    first = attention(q[:, :6], k[:, :6], v[:, :6], mask[..., :6], inference_params=params)
    outputs = [first]
    for t in range(6, S):
        params.sequence_len_offset = t
        one = [x[:, t : t + 1] for x in (q, k, v)]
        outputs.append(attention(*one, mask[..., : t + 1], inference_params=params))
    y = torch.cat(outputs, dim=1)
    plain = DotProductAttention(H, D, G, qkv_format="bshd")
    for b, n in enumerate(before.tolist()):
        alone = plain(*(x[b : b + 1, n:] for x in (q, k, v)))
        assert torch.allclose(y[b, n:], alone[0], atol=1e-6)
        assert torch.equal(y[b, :n], torch.zeros(n, H * D))


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("window", [None, (2, 0)], ids=str)
def test_ragged_continuous_batching(qkv_format, window):
    """Sequences come, go and advance by different lengths; each equals itself alone."""
    attention = DotProductAttention(
        H, D, G, qkv_format=qkv_format, layer_number=1, window_size=window
    )
    alone = DotProductAttention(H, D, G, qkv_format="bshd", window_size=window)
    lengths = {"a": 9, "b": 5, "c": 7, "d": 6}
    data = {n: [torch.randn(1, s, h, D) for h in (H, G, G)] for n, s in lengths.items()}
    expected = {name: alone(*qkv)[0] for name, qkv in data.items()}
    steps = [
        {"a": 4, "b": 2}, {"a": 1, "b": 3}, {"c": 5, "a": 1}, {"a": 1, "c": 1, "d": 6},
        {"a": 2, "c": 0}, {"c": 1},
    ]  # fmt: skip
    params = InferenceParams(3, 9)
    done = dict.fromkeys(lengths, 0)
    for step in steps:
        params.pre_step(step)
        longest = max(step.values()) + 1  # some padding for all
        batch = []
        for which, heads in enumerate((H, G, G)):
            rows = torch.randn(len(step), longest, heads, D)  # padding may be anything
            for row, (name, n) in enumerate(step.items()):
                rows[row, :n] = data[name][which][0, done[name] : done[name] + n]
            batch.append(rows if qkv_format == "bshd" else rows.transpose(0, 1))
        y = attention(*batch, inference_params=params)
        y = y if qkv_format == "bshd" else y.transpose(0, 1)
        for row, (name, n) in enumerate(step.items()):
            start = done[name]
            assert torch.allclose(y[row, :n], expected[name][start : start + n], atol=1e-6)
            assert torch.equal(y[row, n:], torch.zeros(longest - n, H * D))
            done[name] += n
    assert done == {"a": 9, "b": 5, "c": 7, "d": 6}


@pytest.mark.parametrize(
    ("dtype", "share", "floor"),
    [(torch.float8_e4m3fn, 1 / 16, 2.0**-18), (torch.float8_e5m2, 1 / 8, 2.0**-32)],
    ids=["e4m3", "e5m2"],
)
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
def test_fp8_cache_within_its_stated_error(dtype, share, floor, ragged):
    params = InferenceParams(B, S, cache_dtype=dtype)
    _, k, v = (x.transpose(1, 2) for x in make())
    k = k * torch.logspace(-3, 3, G).view(1, G, 1, 1)  # heads of very different sizes
    k[..., ::3] *= 1e-5
    for start, end in ((0, 4), (4, 5), (5, 9)):
        if ragged:
            params.pre_step(dict.fromkeys("abc", end - start))
        found = params.append(1, k[:, :, start:end], v[:, :, start:end])
        params.sequence_len_offset = end
    for cached, exact in zip(found, (k, v), strict=True):
        largest = exact.abs().amax(-1, keepdim=True)
        bound = torch.maximum(exact.abs() * share, largest * floor)
        assert ((cached - exact).abs() <= bound * (1 + 1e-6)).all()
        assert not torch.equal(cached, exact)
    keys = params.key_value_memory_dict[1][0]
    assert keys.data.dtype == dtype
    assert keys.data.numel() * 1 + keys.scale.numel() * 4 == B * G * S * (D + 4)


def rounded(x):
    """``[B, S, G, D]`` as an e4m3 cache returns it."""
    return float8lab.quantize(x.reshape(-1, x.shape[-1]), block=(1, -1)).dequantize().view(x.shape)


def test_fp8_cache_is_attention_to_rounded_keys_and_values():
    """Also after rows were reordered, tokens taken back, and a new start in the used memory."""
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    plain = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="causal_bottom_right")
    q, k, v = make()
    params = InferenceParams(B, S, cache_dtype=torch.float8_e4m3fn)
    held = [k[:, :0], v[:, :0]]  # what the cache should hold

    def advance(start, end):
        new = [x[:, start:end] for x in (q, k, v)]
        held[:] = [torch.cat((h, rounded(x)), dim=1) for h, x in zip(held, new[1:], strict=True)]
        y = attention(*new, inference_params=params)
        params.sequence_len_offset += end - start
        assert torch.allclose(y, plain(new[0], *held), atol=1e-6)

    advance(0, 5)
    advance(5, 6)
    order = [2, 0, 0]
    params.swap_key_value_dict(order)
    held = [x[order] for x in held]
    advance(6, 7)
    params.sequence_len_offset = 4  # takes three tokens back
    held = [x[:, :4] for x in held]
    advance(7, 9)
    params.reset()
    held = [x[:, :0] for x in held]
    advance(2, 8)
    assert not torch.allclose(held[0], k[:, 2:8], atol=1e-6)


@pytest.mark.parametrize(
    ("cache_dtype", "per_vector"),
    [(None, 4 * D), (torch.bfloat16, 2 * D), (torch.float8_e5m2, D + 4)],
    ids=["float32", "bfloat16", "e5m2"],
)
def test_nbytes_counts_all_layers_and_scales(cache_dtype, per_vector):
    params = InferenceParams(B, S, cache_dtype=cache_dtype)
    assert params.nbytes == 0
    _, k, v = (x.transpose(1, 2) for x in make())
    for number in (1, 2):
        params.append(number, k, v)
    assert params.nbytes == 2 * 2 * B * G * S * per_vector


def test_fp8_cache_gives_nearly_the_same_attention():
    attention = DotProductAttention(H, 64, G, qkv_format="bshd", layer_number=1)
    q, k, v = (torch.randn(2, 32, n, 64) for n in (H, G, G))
    whole = attention(q, k, v)
    params = InferenceParams(2, 32, cache_dtype=torch.float8_e4m3fn)
    y = attention(q, k, v, inference_params=params)
    # k and v are each rounded with 31.5 dB: 28.5 dB of the scores' and the values' errors together.
    assert (y - whole).norm() <= 10 ** (-28.0 / 20) * whole.norm()


def test_batch_offset_and_beam_search():
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    q, k, v = make()
    params = InferenceParams(B, S)
    for row in range(B):
        params.batch_size_offset = row
        attention(*(x[row : row + 1, :8] for x in (q, k, v)), inference_params=params)
    params.batch_size_offset = 0
    params.swap_key_value_dict([2, 0, 2])
    params.sequence_len_offset = 8
    order = [2, 0, 2]
    y = attention(*(x[order, 8:] for x in (q, k, v)), inference_params=params)
    assert torch.allclose(y, attention(q, k, v)[order, 8:], atol=1e-6)
    params.reset()
    assert (params.sequence_len_offset, params.step) == (0, None)


def test_layers_have_caches_of_their_own():
    params = InferenceParams(B, S)
    q, k, v = make()
    for number in (1, 2):
        attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=number)
        attention(q, k * number, v, inference_params=params)
    assert sorted(params.key_value_memory_dict) == [1, 2]
    first, second = (params.key_value_memory_dict[n][0].data for n in (1, 2))
    assert torch.equal(first * 2, second)


def test_no_gradients_in_the_cache():
    q, k, v = (x.requires_grad_() for x in make())
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    y = attention(q, k, v, inference_params=InferenceParams(B, S))
    dq, dk = torch.autograd.grad(y.sum(), (q, k), allow_unused=True)
    assert dq is not None
    assert dk is None


@pytest.mark.parametrize("ragged", [False, True], ids=["in-step", "ragged"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["", "fp8"])
def test_a_model_of_layers_generates(ragged, cache_dtype):
    rope = RotaryPositionEmbedding(8, device="cpu")(16)
    layers = [
        float8lab.TransformerLayer(
            32, 64, 4, num_gqa_groups=2, layer_number=n, device="cpu", attn_input_format="bshd",
            init_method=torch.nn.init.xavier_normal_,
        ).eval()
        for n in (1, 2)
    ]  # fmt: skip

    def model(x, params=None):
        for layer in layers:
            x = layer(x, rotary_pos_emb=rope, inference_params=params)
        return x

    x = torch.randn(2, 10, 32)
    whole = model(x)
    params = InferenceParams(2, 10, cache_dtype=cache_dtype)
    y = torch.zeros_like(x)
    if ragged:
        for step in ({"a": 5, "b": 3}, {"b": 4, "a": 1}, {"a": 4, "b": 3}):
            known = params.pre_step(step)
            batch = torch.zeros(2, max(step.values()), 32)
            rows = ["ab".index(name) for name in step]
            spans = [slice(b, b + n) for b, n in zip(known.before, known.lengths, strict=True)]
            for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
                batch[i, : known.lengths[i]] = x[row, span]
            out = model(batch, params)
            for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
                y[row, span] = out[i, : known.lengths[i]]
    else:
        for start, end in ((0, 6), (6, 7), (7, 8), (8, 10)):
            y[:, start:end] = model(x[:, start:end], params)
            params.sequence_len_offset = end
    if cache_dtype is None:
        assert torch.allclose(y, whole, atol=1e-5)
    else:
        assert 0 < (y - whole).norm() <= 0.05 * whole.norm()


def test_what_does_not_fit_is_refused():
    q, k, v = make()
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    with pytest.raises(ValueError, match="room for rows up to 3 and positions up to 9"):
        attention(q, k, v, inference_params=InferenceParams(3, 8))
    with pytest.raises(ValueError, match="room for rows up to 3"):
        attention(q, k, v, inference_params=InferenceParams(2, 9))
    params = InferenceParams(2, 4)
    with pytest.raises(ValueError, match="at most 2 sequences"):
        params.pre_step({"a": 1, "b": 1, "c": 1})
    with pytest.raises(ValueError, match=r"fit into 4 positions .*; got 5 for 'a' after 0"):
        params.pre_step({"a": 5})
    params.pre_step({"a": 2, "b": 3})
    with pytest.raises(ValueError, match="the batch must have 2 rows of 3 positions"):
        attention(*(x[:2, :2] for x in (q, k, v)), inference_params=params)
    with pytest.raises(NotImplementedError, match="its lengths are the mask"):
        attention(
            *(x[:2, :3] for x in (q, k, v)), torch.zeros(2, 1, 1, 3).bool(),
            attn_mask_type="padding", inference_params=params,
        )  # fmt: skip
    with pytest.raises(ValueError, match="max_batch_size must be an integer of at least 1; got 0"):
        InferenceParams(0, 4)
