"""The key/value cache: steps equal one call with the full context; ragged batches; FP8; limits."""

import pytest
import torch

import float8lab
from float8lab.nn import DotProductAttention, InferenceParams, RotaryPositionEmbedding
from float8lab.nn.attention import BACKENDS, inference
from tests.recorder import Ops

B, S, H, G, D = 3, 9, 4, 2, 8


def make(qkv_format="bshd"):
    x = [torch.randn(B, S, n, D) for n in (H, G, G)]
    return x if qkv_format == "bshd" else [t.transpose(0, 1) for t in x]


def token_slice(x, qkv_format, start, end):
    return x[:, start:end] if qkv_format == "bshd" else x[start:end]


PAGED = {"is_paged": True, "page_size": 2}


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("steps", [(9,), (4, 1, 1, 1, 1, 1), (3, 3, 3)], ids=str)
@pytest.mark.parametrize("cache", [{}, PAGED], ids=["", "paged"])
@pytest.mark.parametrize("call", [
    {}, {"window_size": (3, 0)}, {"attn_mask_type": "causal_bottom_right"},
    {"core_attention_bias_type": "alibi"},
], ids=["causal", "window", "bottom-right", "alibi"])  # fmt: skip
def test_prefill_and_decode_steps_equal_one_full_call(qkv_format, steps, call, cache):
    attention = DotProductAttention(H, D, G, qkv_format=qkv_format, layer_number=1)
    q, k, v = make(qkv_format)
    expected = attention(q, k, v, **call)
    params = InferenceParams(B, S, **cache)
    outputs = []
    for n in steps:
        start = params.sequence_len_offset
        qkv_slices = [token_slice(x, qkv_format, start, start + n) for x in (q, k, v)]
        outputs.append(attention(*qkv_slices, inference_params=params, **call))
        params.sequence_len_offset += n
    y = torch.cat(outputs, dim=1 if qkv_format == "bshd" else 0)
    assert torch.allclose(y, expected, atol=1e-6)


def test_no_mask_attends_to_all_cached_keys():
    attention = DotProductAttention(
        H, D, G, qkv_format="bshd", layer_number=1, attn_mask_type="no_mask"
    )
    q, k, v = make()
    params = InferenceParams(B, S)
    with torch.inference_mode():  # the cache created here is usable outside
        attention(q[:, :5], k[:, :5], v[:, :5], inference_params=params)
    params.sequence_len_offset = 5
    y = attention(q[:, 5:], k[:, 5:], v[:, 5:], inference_params=params)
    assert torch.allclose(y, attention(q[:, 5:], k, v), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("backends", [BACKENDS, ("sdpa", "sdpa_masked")], ids=["pages", "read"])
def test_a_growing_cache_never_runs_cudnn(backends):
    """cuDNN would prepare each new length, which takes longer than the rest of a step.

    With "pages" a kernel reads the pages, without an op of torch; with "read" torch's attention
    gets the keys and values that were read from the pages.
    """
    attention = DotProductAttention(8, 64, 2, qkv_format="bshd", layer_number=1, backends=backends)
    q, k, v = (torch.randn(B, 40, n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    expected = attention(q, k, v)
    params = InferenceParams(B, 40)
    outputs = []
    with torch.no_grad():
        for start, end in ((0, 32), (32, 33), (33, 34), (34, 40)):
            with Ops() as ops:
                outputs.append(
                    attention(*(x[:, start:end] for x in (q, k, v)), inference_params=params)
                )
            params.sequence_len_offset = end
            if start:
                torch_ops = [name for name in ops.names if "attention" in name]
                assert len(torch_ops) == (backends != BACKENDS)
                assert not any("cudnn" in name for name in torch_ops)
    error = (torch.cat(outputs, dim=1) - expected).norm() / expected.norm()
    assert error < 4e-3  # one rounding to bfloat16


def test_left_padded_prompts_equal_separate_ones():
    """Prompts have padding on the left, as in batched generation; the mask covers the cache."""
    attention = DotProductAttention(
        H, D, G, qkv_format="bshd", layer_number=1, attn_mask_type="padding_causal"
    )
    q, k, v = make()
    padding = torch.tensor([0, 2, 4])
    mask = (torch.arange(S) < padding[:, None])[:, None, None]
    params = InferenceParams(B, S)
    first = attention(q[:, :6], k[:, :6], v[:, :6], mask[..., :6], inference_params=params)
    outputs = [first]
    for t in range(6, S):
        params.sequence_len_offset = t
        token = [x[:, t : t + 1] for x in (q, k, v)]
        outputs.append(attention(*token, mask[..., : t + 1], inference_params=params))
    y = torch.cat(outputs, dim=1)
    plain = DotProductAttention(H, D, G, qkv_format="bshd")
    for b, n in enumerate(padding.tolist()):
        expected = plain(*(x[b : b + 1, n:] for x in (q, k, v)))
        assert torch.allclose(y[b, n:], expected[0], atol=1e-6)
        assert torch.equal(y[b, :n], torch.zeros(n, H * D))


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("window", [None, (2, 0)], ids=str)
@pytest.mark.parametrize(
    "cache", [{}, {**PAGED, "total_num_pages": 10}, {**PAGED, "page_size": 9}],
    ids=["", "paged", "page-of-a-row"],
)  # fmt: skip
@pytest.mark.parametrize("backends", [None, ("reference",)], ids=["", "read"])
def test_ragged_continuous_batching_equals_separate_calls(qkv_format, window, cache, backends):
    """Sequences join, leave and advance by different lengths; each equals a separate call.

    This holds even if earlier sequences left numbers in the cache that are not finite.
    """
    attention = DotProductAttention(
        H, D, G, qkv_format=qkv_format, layer_number=1, window_size=window,
        attn_mask_type="padding_causal" if qkv_format == "thd" else "causal",
        **({} if backends is None else {"backends": backends}),
    )  # fmt: skip
    uncached = DotProductAttention(H, D, G, qkv_format="bshd", window_size=window)
    lengths = {"a": 9, "b": 5, "c": 7, "d": 6, "e": 3, "f": 1, "g": 5, "h": 1, "i": 3}
    data = {n: [torch.randn(1, s, h, D) for h in (H, G, G)] for n, s in lengths.items()}
    expected = {name: uncached(*qkv)[0] for name, qkv in data.items()}
    steps = [
        {"a": 4, "b": 2}, {"a": 1, "b": 3}, {"c": 5, "a": 1}, {"a": 1, "c": 1, "d": 6},
        {"a": 2, "c": 0}, {"c": 1}, {"e": 3},
        # The first step of i has the sizes of that of f, in other pages.
        {"f": 1}, {"g": 5, "f": 0, "h": 1}, {"i": 1}, {"i": 2},
    ]  # fmt: skip
    params = InferenceParams(3, 9, **cache)
    params.pre_step(dict.fromkeys("xyz", 3))
    params.append(1, *(torch.full((3, G, 3, D), x) for x in (torch.nan, torch.inf)))
    positions = dict.fromkeys(lengths, 0)
    for step in steps:
        params.pre_step(step)
        longest = max(step.values()) + 1  # every row has some padding
        is_token = torch.arange(longest) < torch.tensor(list(step.values()))[:, None]
        batch = []
        for operand, heads in enumerate((H, G, G)):
            rows = torch.randn(len(step), longest, heads, D)  # padding may be anything
            for row, (name, n) in enumerate(step.items()):
                rows[row, :n] = data[name][operand][0, positions[name] : positions[name] + n]
            by_format = {"bshd": rows, "sbhd": rows.transpose(0, 1), "thd": rows[is_token]}
            batch.append(by_format[qkv_format])
        y = attention(*batch, inference_params=params)
        if qkv_format == "thd":
            y = torch.zeros(*is_token.shape, H * D).index_put((is_token,), y)
        y = y.transpose(0, 1) if qkv_format == "sbhd" else y
        for row, (name, n) in enumerate(step.items()):
            start = positions[name]
            assert torch.allclose(y[row, :n], expected[name][start : start + n], atol=1e-6)
            assert torch.equal(y[row, n:], torch.zeros(longest - n, H * D))
            positions[name] += n
    assert positions == lengths


@pytest.mark.parametrize(
    ("dtype", "relative_error", "absolute_error"),
    [(torch.float8_e4m3fn, 1 / 16, 2.0**-18), (torch.float8_e5m2, 1 / 8, 2.0**-32)],
    ids=["e4m3", "e5m2"],
)
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
def test_fp8_cache_stays_within_its_stated_error(dtype, relative_error, absolute_error, ragged):
    params = InferenceParams(B, S, cache_dtype=dtype)
    _, k, v = (x.transpose(1, 2) for x in make())
    k = k * torch.logspace(-3, 3, G).view(1, G, 1, 1)  # heads of very different sizes
    k[..., ::3] *= 1e-5
    for start, end in ((0, 4), (4, 5), (5, 9)):
        if ragged:
            params.pre_step(dict.fromkeys("abc", end - start))
        cache_contents = params.append(1, k[:, :, start:end], v[:, :, start:end])
        params.sequence_len_offset = end
    for cached, exact in zip(cache_contents, (k, v), strict=True):
        largest = exact.abs().amax(-1, keepdim=True)
        bound = torch.maximum(exact.abs() * relative_error, largest * absolute_error)
        assert ((cached - exact).abs() <= bound * (1 + 1e-6)).all()
        assert not torch.equal(cached, exact)


def e4m3_rounded(x):
    """``[B, S, G, D]`` as an e4m3 cache returns it."""
    return float8lab.quantize(x.reshape(-1, x.shape[-1]), block=(1, -1)).dequantize().view(x.shape)


@pytest.mark.parametrize("cache", [{}, PAGED], ids=["", "paged"])
def test_attention_with_an_fp8_cache_equals_attention_to_rounded_keys_and_values(cache):
    """This holds also after rows are reordered, tokens are dropped, and the cache is reset."""
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    plain = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="causal_bottom_right")
    q, k, v = make()
    params = InferenceParams(B, S, cache_dtype=torch.float8_e4m3fn, **cache)
    held = [k[:, :0], v[:, :0]]  # the expected contents of the cache

    def advance(start, end):
        new = [x[:, start:end] for x in (q, k, v)]
        held[:] = [
            torch.cat((h, e4m3_rounded(x)), dim=1) for h, x in zip(held, new[1:], strict=True)
        ]
        y = attention(*new, inference_params=params)
        params.sequence_len_offset += end - start
        assert torch.allclose(y, plain(new[0], *held), atol=1e-6)

    advance(0, 5)
    advance(5, 6)
    order = [2, 0, 0]
    params.swap_key_value_dict(order)
    held = [x[order] for x in held]
    advance(6, 7)
    params.sequence_len_offset = 4  # drops three tokens
    held = [x[:, :4] for x in held]
    advance(7, 9)
    params.reset()
    held = [x[:, :0] for x in held]
    advance(2, 8)
    assert not torch.allclose(held[0], k[:, 2:8], atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("cache_dtype", "per_vector"),
    [(None, 4 * D), (torch.bfloat16, 2 * D), (torch.float8_e5m2, D + 4)],
    ids=["float32", "bfloat16", "e5m2"],
)
def test_nbytes_counts_all_layers_and_scales(cache_dtype, per_vector, device):
    params = InferenceParams(B, S, cache_dtype=cache_dtype)
    assert params.nbytes == 0
    _, k, v = (x.transpose(1, 2).to(device) for x in make())
    for number in (1, 2):
        params.append(number, k, v)
    assert params.nbytes == 2 * 2 * B * G * S * per_vector


def test_only_steps_captured_in_a_cuda_graph_are_kept_besides_the_last(monkeypatch):
    params = InferenceParams(1, S)
    results = []
    for tokens in (2, 3, 4, 2):  # the first call of 2 is captured
        monkeypatch.setattr(inference, "capturing", lambda first=not results: first)
        params.pre_step({tokens: tokens})
        params.append(1, *torch.randn(2, 1, G, tokens, D))
        results.append(params.sequences(torch.device("cpu")))
        assert len(params._places) == min(len(results), 2)
    assert results[3] is results[0]


def test_batch_offsets_and_reordered_rows_equal_a_full_call():
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
    params.pre_step({"a": 2, "b": 5})
    params.swap_key_value_dict([1])
    assert params.pre_step({"a": 1, "b": 1}).before == (5, 5)


def test_cached_keys_get_no_gradient():
    q, k, v = (x.requires_grad_() for x in make())
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    y = attention(q, k, v, inference_params=InferenceParams(B, S))
    dq, dk = torch.autograd.grad(y.sum(), (q, k), allow_unused=True)
    assert dq is not None
    assert dk is None


def two_layers(hidden, positions, *, device, **options):
    """A model of two transformer layers with rotary positions."""
    options |= {"num_gqa_groups": 2, "attn_input_format": "bshd", "device": device}
    layers = [
        float8lab.TransformerLayer(hidden, 2 * hidden, 4, layer_number=n, **options).eval()
        for n in (1, 2)
    ]
    rope = RotaryPositionEmbedding(hidden // 4, device=device)(positions)

    def model(x, params=None):
        for layer in layers:
            x = layer(x, rotary_pos_emb=rope, inference_params=params)
        return x

    return model


@pytest.mark.parametrize("ragged", [False, True], ids=["in-step", "ragged"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["", "fp8"])
def test_a_model_that_generates_equals_one_full_call(ragged, cache_dtype):
    model = two_layers(32, 16, device="cpu", init_method=torch.nn.init.xavier_normal_)
    x = torch.randn(2, 10, 32)
    expected = model(x)
    params = InferenceParams(2, 10, cache_dtype=cache_dtype)
    y = torch.zeros_like(x)
    if ragged:
        for step in ({"a": 5, "b": 3}, {"b": 4, "a": 1}, {"a": 4, "b": 3}):
            params_step = params.pre_step(step)
            batch = torch.zeros(2, max(step.values()), 32)
            rows = ["ab".index(name) for name in step]
            spans = [
                slice(b, b + n)
                for b, n in zip(params_step.before, params_step.lengths, strict=True)
            ]
            for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
                batch[i, : params_step.lengths[i]] = x[row, span]
            out = model(batch, params)
            for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
                y[row, span] = out[i, : params_step.lengths[i]]
    else:
        for start, end in ((0, 6), (6, 7), (7, 8), (8, 10)):
            y[:, start:end] = model(x[:, start:end], params)
            params.sequence_len_offset = end
    if cache_dtype is None:
        assert torch.allclose(y, expected, atol=1e-5)
    else:
        assert 0 < (y - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_lengths_may_repeat_those_of_the_step(qkv_format):
    """As programs for Transformer Engine give them, at each step."""
    mask = {"attn_mask_type": "padding_causal"}
    layer = float8lab.TransformerLayer(
        H * D, 32, H, num_gqa_groups=G, self_attn_mask_type="padding_causal", layer_number=1,
        attn_input_format=qkv_format, hidden_dropout=0.0, attention_dropout=0.0, device="cpu",
    )  # fmt: skip
    attention = DotProductAttention(H, D, G, qkv_format=qkv_format, layer_number=1, **mask)
    angles = RotaryPositionEmbedding(D)(9)
    outputs: list[list[torch.Tensor]] = [[], []]
    caches = [[InferenceParams(2, 9), InferenceParams(2, 9)] for _ in outputs]
    for step in ({"a": 4, "b": 2}, {"b": 1, "a": 1}, {"c": 5, "a": 1}):
        tokens = list(step.values())
        shape = {"sbhd": (max(tokens), 2), "bshd": (2, max(tokens)), "thd": (sum(tokens),)}
        x = torch.randn(*shape[qkv_format], H * D)
        qkv = [torch.randn(*shape[qkv_format], heads, D) for heads in (H, G, G)]
        starts = torch.tensor([0, tokens[0], sum(tokens)], dtype=torch.int32)
        repeated = {
            "cu_seqlens_q": starts, "cu_seqlens_kv": starts.clone(), "max_seqlen_q": max(tokens),
            "max_seqlen_kv": 9,
        }  # fmt: skip
        for (one, other), results, given in zip(caches, outputs, ({}, repeated), strict=True):
            one.pre_step(step)
            other.pre_step(step)
            results.append(layer(x, inference_params=one, rotary_pos_emb=angles, **given))
            results.append(attention(*qkv, inference_params=other, **given))
    assert all(map(torch.equal, *outputs))
    with pytest.raises(NotImplementedError, match="its lengths are the mask"):
        attention(*qkv, inference_params=other, **{**repeated, "cu_seqlens_q": 2 * starts})
    starts = torch.tensor([0, 1, sum(tokens)])
    with pytest.raises(NotImplementedError, match="its lengths are the mask"):
        layer(x, inference_params=one, cu_seqlens_q=starts)


def test_calls_that_do_not_fit_the_cache_are_refused():
    q, k, v = make()
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    with pytest.raises(ValueError, match="room for rows 0 to 3 and positions 0 to 9"):
        attention(q, k, v, inference_params=InferenceParams(3, 8))
    with pytest.raises(ValueError, match="room for rows 0 to 3"):
        attention(q, k, v, inference_params=InferenceParams(2, 9))
    params = InferenceParams(3, 9)
    for offset in ("batch_size_offset", "sequence_len_offset"):
        for value, error in ((-1, ValueError), (1.5, TypeError), (None, TypeError)):
            setattr(params, offset, value)
            with pytest.raises(error, match=f"{offset} must be an integer of at least 0; got"):
                attention(q, k, v, inference_params=params)
        setattr(params, offset, 0)
    params = InferenceParams(2, 4)
    with pytest.raises(ValueError, match="at most 2 sequences"):
        params.pre_step({"a": 1, "b": 1, "c": 1})
    with pytest.raises(ValueError, match=r"fit into 4 positions .*; got 5 for 'a' after 0"):
        params.pre_step({"a": 5})
    params.pre_step({"a": 2, "b": 3})
    with pytest.raises(ValueError, match="the batch must have 2 rows of 3 positions"):
        attention(*(x[:2, :2] for x in (q, k, v)), inference_params=params)
    params.append(1, *(x[:2, :3].transpose(1, 2) for x in (k, v)))
    with pytest.raises(
        ValueError,
        match=f"k must have {G} heads of {D} on cpu, as in layer 1 so far; .* on meta. Give",
    ):
        attention(*(x[:2, :3].to("meta") for x in (q, k, v)), inference_params=params)
    with pytest.raises(NotImplementedError, match="its lengths are the mask"):
        attention(
            *(x[:2, :3] for x in (q, k, v)), torch.zeros(2, 1, 1, 3).bool(),
            attn_mask_type="padding", inference_params=params,
        )  # fmt: skip
    with pytest.raises(ValueError, match="max_batch_size must be an integer of at least 1; got 0"):
        InferenceParams(0, 4)
    assert InferenceParams(2, 4, page_size=None).nbytes == 0  # Transformer Engine's default
    with pytest.raises(ValueError, match="dtype must be None beside cache_dtype"):
        InferenceParams(2, 4, cache_dtype=torch.float16, dtype=torch.float16)
    params.pre_step({"c": 4})
    thd = {"qkv_format": "thd", "attn_mask_type": "padding", "layer_number": 1, "device": "meta"}
    layer, x = float8lab.MultiheadAttention(8, 2, **thd), torch.zeros(4, 8, device="meta")
    with pytest.raises(ValueError, match="rotary_pos_emb must have at least 4 positions; got 3"):
        layer(x, inference_params=params, rotary_pos_emb=x[:3, :4])
    with pytest.raises(
        ValueError, match="head_dim_v must be that of the layers, 8 in layer 1; got 9"
    ):
        attention(q, k, v, inference_params=InferenceParams(B, S, head_dim_v=9))


def test_steps_beyond_the_pages_are_refused_and_leave_the_cache_unchanged():
    q, k, v = make()
    attention = DotProductAttention(H, D, G, qkv_format="bshd", layer_number=1)
    params = InferenceParams(3, S, is_paged=True, page_size=2, total_num_pages=5)
    params.pre_step({"a": 5, "b": 3})  # 3 and 2 pages
    attention(*(x[:2, :5] for x in (q, k, v)), inference_params=params)
    before = params.step
    with pytest.raises(ValueError, match=r"tokens must fit into 5 pages of 2 .* of \[5, 5\]"):
        params.pre_step({"a": 0, "b": 2})
    assert params.step == before
    params.pre_step({"a": 1, "b": 1})  # into what the pages still hold
    y = attention(*(x[:2, 5:6] for x in (q, k, v)), inference_params=params)
    assert torch.allclose(y[0], attention(*(x[:1, :6] for x in (q, k, v)))[0, -1:], atol=1e-6)
    params.pre_step({"b": 1, "c": 4})  # a is finished
    with pytest.raises(
        ValueError, match=r"must be rows that hold equally many pages; got .*\[2, 3\]"
    ):
        params.swap_key_value_dict([1, 0])
    params = InferenceParams(3, S, is_paged=True, page_size=2, total_num_pages=5)
    with pytest.raises(ValueError, match="inference_params must fit into 5 pages"):
        attention(*(x[:, :3] for x in (q, k, v)), inference_params=params)
    packed = [x[0] for x in (q, k, v)]
    call = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "inference_params": params}
    with pytest.raises(ValueError, match="must be told the lengths of sequences by pre_step"):
        attention(*packed, **call)
    params.pre_step({"a": 5, "b": 1})
    with pytest.raises(ValueError, match="as many tokens as there are; got Step"):
        attention(packed[0], packed[1][:5], packed[2][:5], **call)
    with pytest.raises(NotImplementedError, match="cu_seqlens must be None"):
        attention(*packed, cu_seqlens_q_padded=torch.tensor([0, 5, S]), **call)
    call |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": q[0, 0]}
    with pytest.raises(ValueError, match=rf"core_attention_bias .*, \[2, {H}, 5, 5\]; got"):
        attention(*packed, **call)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [{}, {"is_paged": True, "page_size": 16}], ids=["", "paged"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["", "fp8"])
def test_a_captured_step_replays_for_growing_sequences(cache, cache_dtype):
    """A graph is captured once and replayed for sequences that grow, join and leave."""
    options = {"params_dtype": torch.bfloat16, "self_attn_mask_type": "causal"}
    model = two_layers(64, 64, device="cuda", **options)
    tokens = torch.randn(20, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
    steps = [{"a": 1, "b": 1}] * 9 + [{"b": 1, "c": 1}] * 11
    eager, graphed = (InferenceParams(2, 64, cache_dtype=cache_dtype, **cache) for _ in range(2))
    static = tokens[0].clone()
    with torch.no_grad():
        for index, (x, step) in enumerate(zip(tokens, steps, strict=True)):
            eager.pre_step(step)
            graphed.pre_step(step)
            static.copy_(x)
            if index < 2:
                y = model(static, graphed)
            elif index == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = model(static, graphed)
            if index >= 2:
                graph.replay()
            assert torch.equal(y, model(x, eager))


@pytest.mark.gpu
def test_prompts_run_fp8_attention():
    recipe = float8lab.recipes.Float8CurrentScaling(fp8_dpa=True)
    attention = DotProductAttention(8, 64, 2, qkv_format="bshd", layer_number=1)
    q, k, v = (torch.randn(2, 256, n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2))
    with torch.no_grad(), float8lab.autocast(recipe=recipe):
        with Ops() as ops:
            y = attention(q, k, v, inference_params=InferenceParams(2, 300))
        assert "float8lab.fp8_attention" in " ".join(ops.names)
        assert torch.equal(y, attention(q, k, v))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "cache_dtype", [pytest.param(None, marks=pytest.mark.slow), torch.float8_e4m3fn], ids=str
)
def test_steps_with_a_cache_are_compiled_without_graph_breaks(cache_dtype):
    module = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", layer_number=1)
    tensors = [[torch.randn(2, n, heads, 16) for heads in (4, 2, 2)] for n in (5, 1)]
    outputs = []
    for attend in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        cache = InferenceParams(2, 8, cache_dtype=cache_dtype)
        for qkv in tensors:
            cache.pre_step(dict.fromkeys(range(2), qkv[0].shape[1]))
            with torch.no_grad():
                outputs.append(attend(*qkv, inference_params=cache))
    for eager, compiled in zip(outputs[:2], outputs[2:], strict=True):
        torch.testing.assert_close(compiled, eager)
