"""Wrong arguments raise errors that begin with the name that the caller wrote.

``--cases N`` tries N wrong calls of public functions; the default is few, for CI.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import float8lab
from float8lab import nn
from float8lab.arguments import (
    check_choice,
    check_device,
    check_flags,
    check_group,
    check_names,
    check_number,
    check_size,
)
from float8lab.formats import Float8Spec
from tests.public_calls import CALLS, H, S
from tests.wrong_calls import admits, cases, complaint, parameters

ATTENTION = float8lab.DotProductAttention(1, 8)
MODULES = {
    "": float8lab, "distributed.": float8lab.distributed, "inspect.": float8lab.inspect,
    "integrations.": float8lab.integrations, "nn.": nn, "optim.": float8lab.optim,
    "recipes.": float8lab.recipes, "router.": float8lab.router,
}  # fmt: skip
RESULTS = (
    "Advice", "BlockStats", "CheckpointDiff", "CheckpointError", "CheckpointReport",
    "Comparison", "ConversionReport", "Damage", "Diagnosis", "DispatchHandle", "ExportReport",
    "Finding", "Float8ReduceScatter", "GemmCounts", "Histogram", "LayerAdvice", "LayerMemory",
    "LoadReport", "MegatronCheckpoint", "MemoryReport", "NonFinite", "RunComparison",
    "ScalingReport", "Sensitivity", "TensorStats",
)  # fmt: skip
NOT_CALLED = {
    **dict.fromkeys(RESULTS, "what functions return; nobody else makes one"),
    **dict.fromkeys(("CPAttentionLoadBalancingStrategy", "Format"), "an enumeration"),
    "LinearPlan": "what a recipe makes",
    "Recipe": "a base class",
    "selfcheck": "takes minutes",
    "ExportReport.tables": "it has none",
    "Float8Tensor.replace": "by functions of this package, with parts of a tensor",
    "Float8Tensor.map": "by functions of this package",
    "Float4Tensor.map": "by functions of this package",
    "Float4Tensor.numpy": "refuses every call without force, as for Float8Tensor",
    "Float8Tensor.apply_": "torch's, on the values",
    "Float8Tensor.fsdp_pre_all_gather": "by FSDP2",
    "Float8Tensor.fsdp_post_all_gather": "by FSDP2",
    "Linear.register_parameter": "torch's",
    "DotProductAttention.check_arguments": "by the modules around it",
    "DotProductAttention.rules_of_call": "by the modules around it",
    "MultiheadAttention.check_arguments": "by the layer around it",
    **dict.fromkeys(
        [f"InferenceParams.{name}" for name in ("check_room", "packed", "sequences", "write")],
        "by attention",
    ),
    "watch.saw_cast": "by casts",
    "watch.saw_gemm": "by GEMMs",
}


def _public() -> dict[str, Callable[..., Any]]:
    """What users call, each once: functions, classes, and the methods that take arguments."""
    name_of_callable: dict[Callable[..., Any], str] = {}
    for module in MODULES.values():
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value):
                continue
            name_of_callable.setdefault(value, name)
            for method in dir(value) if isinstance(value, type) else ():
                function = inspect.getattr_static(value, method)
                function = getattr(function, "__func__", function)
                if _is_public_method(method, function):
                    name_of_callable.setdefault(function, f"{name}.{method}")
    return {name: value for value, name in name_of_callable.items() if _takes_arguments(value)}


def _is_public_method(name: str, function: Any) -> bool:
    is_own = inspect.isfunction(function) and function.__module__.startswith("float8lab")
    return is_own and not name.startswith("_") and _takes_arguments(function, 1)


def _takes_arguments(value: Callable[..., Any], bound: int = 0) -> bool:
    return len(inspect.signature(value).parameters) > bound


def test_wrong_calls_raise_with_the_name_of_the_argument(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some values are names of files
    count = request.config.getoption("--cases")
    complaints = [complaint(case, tmp_path) for case in cases(count or 200)]
    assert [text for text in complaints if text] == []


def test_every_public_callable_has_wrong_calls() -> None:
    called = {inspect.unwrap(getattr(c.function, "__func__", c.function)) for c in CALLS.values()}
    public = {name: inspect.unwrap(value) for name, value in _public().items()}
    assert [name for name in NOT_CALLED if name not in public and name != "GemmCounts"] == []
    missing = [name for name, value in public.items() if value not in called]
    assert [name for name in missing if name not in NOT_CALLED] == []


def test_every_argument_of_a_forward_gets_a_wrong_value() -> None:
    """Parameters that are skipped take any value, and no module's forward has one."""
    forwards = {name: call for name, call in CALLS.items() if ".forward" in name}
    assert {name: call.skip for name, call in forwards.items() if call.skip} == {}
    drawn = {(case.call, case.argument) for case in cases(10**9) if case.must_raise}
    for name, call in forwards.items():
        assert [p for p in parameters(call) if (name, p) not in drawn] == [], name
    assert {call.function for call in forwards.values()} >= {
        getattr(nn, name).forward for name in nn.__all__ if hasattr(getattr(nn, name), "forward")
    }


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int | None, 1.5, False), (int | None, None, True), (int, np.int64(3), True),
        (int, True, False), (float, 1, True), (float, torch.ones(2), False), (bool, 1, True),
        (bool, np.bool_(True), True), (bool, 2, False), (tuple[int, int], [1, 2], True),
        (tuple[int, int], (1, 2, 3), False), (tuple[int, ...], torch.Size([1, 2]), True),
        (Any, "x", True),
    ],
)  # fmt: skip
def test_annotations_admit_values_of_their_types(kind: Any, value: Any, expected: bool) -> None:
    assert admits(kind, value) is expected


@pytest.mark.parametrize("name", ["Linear", "apply_rotary_pos_emb", "quantize", "Linear.forward"])
def test_valid_calls_work(name: str, tmp_path: Path) -> None:
    call = CALLS[name]
    owner = [] if call.owner is None else [call.owner(tmp_path)]
    call.use(call.function(*owner, **call.arguments(tmp_path)))


X, MAP = torch.ones(S, H), torch.eye(S, dtype=torch.bool)
INT, COMPLEX = torch.ones(2, H).int(), torch.ones(2, H, dtype=torch.complex64)
Q = torch.linspace(-1, 1, S * 2 * 2 * 8).view(S, 2, 2, 8)  # like the queries of the call
WRONG_ARGUMENTS: tuple[tuple[str, str, Any, type[Exception]], ...] = (
    ("InferenceParams", "cache_dtype", torch.int8, TypeError),
    ("LayerNorm.forward", "inp", INT, TypeError),
    ("RMSNorm.forward", "inp", COMPLEX, TypeError),
    ("apply_rotary_pos_emb", "start_positions", torch.tensor([7, 7]), ValueError),
    ("apply_rotary_pos_emb", "start_positions", torch.tensor([-1, 0]), ValueError),
    ("LayerNorm", "eps", float("nan"), ValueError),
    ("TransformerLayer", "layernorm_epsilon", -1.0, ValueError),
    ("DotProductAttention", "softmax_scale", float("nan"), ValueError),
    ("RotaryPositionEmbedding", "rotary_base", 0, ValueError),
    ("TransformerLayer", "layer_number", "1", TypeError),
    ("DotProductAttention", "kv_channels", 0, ValueError),
    ("MultiheadAttention", "num_attention_heads", 0, ValueError),
    ("Linear", "parameters_split", (), ValueError),
    ("convert_to_float8", "model", "model", TypeError),
    ("Linear", "out_features", 1.5, TypeError),
    ("TransformerLayer", "attn_input_format", "x", ValueError),
    ("TransformerLayer", "self_attn_mask_type", "x", ValueError),
    ("TransformerLayer", "enc_dec_window_size", (1, -2), ValueError),
    ("Linear", "tp_group", "world", TypeError),
    ("DotProductAttention.forward", "key_layer", Q.half(), TypeError),
    ("DotProductAttention.forward", "value_layer", Q.double(), TypeError),
    ("DotProductAttention.forward", "attention_mask", "mask", TypeError),
    ("DotProductAttention.forward", "attention_mask", torch.ones(5, 7).bool(), ValueError),
    ("DotProductAttention.forward", "cu_seqlens_q", torch.tensor([0, 3, 6]), ValueError),
    ("DotProductAttention.forward", "cu_seqlens_q", [0, 3, 6], TypeError),
    ("MultiheadAttention", "layer_number", 0, ValueError),
    ("DotProductAttention", "backends", "sdpa", TypeError),
    ("CudaRNGStatesTracker.add", "name", 3, TypeError),
    ("CudaRNGStatesTracker.add", "seed", 1.5, TypeError),
    ("recipes.Auto", "candidates", (), ValueError),
    ("Float8Tensor", "amax", None, TypeError),
    ("inspect.sensitivity", "loss_fn", lambda output: output.sum(), TypeError),
    ("Linear.forward", "is_first_microbatch", "yes", TypeError),
    ("Linear.forward", "input", X, TypeError),
    ("GroupedLinear.forward", "inp", INT, TypeError),
    ("optim.MasterWeights", "stochastic_rounding", X, TypeError),
    ("inspect.track", "to", None, TypeError),
    ("inspect.compare", "names", (), ValueError),
    ("inspect.report", "names", (1, 2), TypeError),
    ("autocast", "amax_reduction_group", "world", TypeError),
    ("autocast", "recipe", "world", TypeError),
    ("fp8_autocast", "fp8_group", "world", TypeError),
    ("fp8_autocast", "fp8_recipe", "world", TypeError),
    ("checkpoint", "function", X, TypeError),
    ("checkpoint", "get_rng_state_tracker", 5, TypeError),
    ("graphed", "module", 3, TypeError),
    ("graphed", "max_graphs", 0, ValueError),
    ("graphed", "enabled", "x", TypeError),
    ("parallel_cross_entropy", "inp", X.int(), TypeError),
    ("parallel_cross_entropy", "inp", X[0, 0], ValueError),
    ("parallel_cross_entropy", "target", X[:, 0], TypeError),
    ("parallel_cross_entropy", "target", torch.arange(2), ValueError),
    ("parallel_cross_entropy", "label_smoothing", 1.5, ValueError),
    ("parallel_cross_entropy", "dist_process_group", 2, TypeError),
    ("moe_dispatch", "probs", X, ValueError),
    ("moe_dispatch", "group", 3, TypeError),
    ("moe_dispatch", "gradient", Float8Spec(), ValueError),
    ("moe_combine", "out", X[:2], ValueError),
    ("moe_permute", "inp", X.to(torch.float8_e4m3fn), TypeError),
    ("moe_permute", "inp", X[None], ValueError),
    ("moe_permute", "routing_map", MAP.float(), TypeError),
    ("moe_permute", "routing_map", MAP[1:], ValueError),
    ("moe_permute", "num_out_tokens", -2, ValueError),
    ("moe_permute", "max_token_num", -2, ValueError),
    ("moe_permute", "map_type", "x", ValueError),
    ("moe_permute_with_probs", "inp", X[None], ValueError),
    ("moe_permute_with_probs", "probs", X, ValueError),
    ("moe_permute_and_pad_with_probs", "tokens_per_expert", MAP[0].int(), ValueError),
    ("moe_permute_and_pad_with_probs", "inp", X[None], ValueError),
    ("moe_permute_and_pad_with_probs", "align_size", 0, ValueError),
    ("moe_unpermute", "inp", X[None], ValueError),
    ("moe_unpermute", "row_id_map", MAP, ValueError),
    ("moe_unpermute", "row_id_map", MAP[0].int(), ValueError),
    ("moe_unpermute", "pad_offsets", X[0], TypeError),
    ("moe_unpermute", "restore_shape", (1, 2), ValueError),
    ("moe_unpermute", "probs", MAP.float(), ValueError),
    ("moe_sort_chunks_by_index", "inp", X[None], ValueError),
    ("moe_sort_chunks_by_index_with_probs", "probs", X, ValueError),
    ("moe_sort_chunks_by_index", "split_sizes", torch.tensor([2, 2]), ValueError),
    ("moe_sort_chunks_by_index", "split_sizes", torch.tensor([4, -1]), ValueError),
    ("moe_sort_chunks_by_index", "sorted_index", torch.tensor([1]), ValueError),
    ("router.fused_topk_with_score_function", "topk", 9, ValueError),
    ("router.fused_topk_with_score_function", "score_function", "relu", ValueError),
    ("router.fused_topk_with_score_function", "num_groups", 3, ValueError),
    ("router.fused_compute_score_for_moe_aux_loss", "logits", X.int(), TypeError),
    ("router.fused_moe_aux_loss", "probs", X[0, 1:], ValueError),
    ("router.fused_moe_aux_loss", "total_num_tokens", X[0], TypeError),
)
"""Calls with a wrong argument, and the error that they raise."""


@pytest.mark.parametrize(("name", "argument", "value", "kind"), WRONG_ARGUMENTS)
def test_wrong_argument_raises_with_its_name(
    name: str, argument: str, value: Any, kind: type[Exception], tmp_path: Path
) -> None:
    call = CALLS[name]
    owner = [] if call.owner is None else [call.owner(tmp_path)]
    with pytest.raises(kind, match=rf"^{argument}\b.* must .*; got "):
        call.function(*owner, **{**call.arguments(tmp_path), argument: value})


def test_numbers_of_numpy_are_numbers() -> None:
    assert type(check_size("n", np.int64(3))) is int
    assert check_number("eps", np.float32(0.5), minimum=0) == 0.5
    assert check_number("eps", torch.tensor(0.5)) == 0.5
    check_flags(bias=np.bool_(True), other=1)
    layer = float8lab.Linear(np.int64(H), np.int32(S), bias=np.True_, device="cpu")
    assert layer(torch.ones(2, H)).shape == (2, S)


@pytest.mark.parametrize(
    ("check", "value", "kind", "message"),
    [
        (check_size, True, TypeError, "n must be an integer of at least 0; got True. Pass an int."),
        (check_size, -1, ValueError, "n must be an integer of at least 0; got -1. Pass a larger"),
        (check_number, "1", TypeError, "n must be a finite number; got '1'. Pass a float."),
        (check_number, float("inf"), ValueError, "n must be a finite number; got inf. Pass one"),
        (check_device, "x", ValueError, "n must be None or a device, such as 'cuda:0'; got 'x'."),
        (check_group, "world", TypeError, "n must be None or a torch.distributed process group"),
        (check_names, 3, TypeError, "n must be a string or a sequence of strings; got 3."),
    ],
)
def test_checks_have_exact_messages(
    check: Any, value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as raised:
        check("n", value)
    assert str(raised.value).startswith(message)


def test_checks_of_flags_and_choices_have_exact_messages() -> None:
    with pytest.raises(TypeError, match=r"^bias must be True or False; got 'no'. Pass a bool\.$"):
        check_flags(other=True, bias="no")
    with pytest.raises(ValueError, match=r"^n must be 'a' or None; got 'b'. Choose one\.$"):
        check_choice("n", "b", ("a", None))


def test_valid_calls_near_wrong_ones_work() -> None:
    """Attention takes what Transformer Engine, Megatron and torch.autocast pass to it."""
    q = torch.randn(4, 2, 1, 8)
    want = ATTENTION(q, q, q)
    masks = [
        torch.zeros(shape, dtype=dtype)
        for shape in ((4, 4), (1, 1, 4, 4), (2, 1, 4, 4), (2, 1, 1, 4), (2, 4))
        for dtype in (torch.bool, torch.float32)
    ]
    for mask in masks:
        with pytest.warns(UserWarning, match="attention_mask is not used"):
            assert torch.equal(ATTENTION(q, q, q, mask), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert ATTENTION(q.bfloat16(), q, q.half()).dtype == torch.bfloat16
    decoder = float8lab.TransformerLayer(
        H, H, 4, layer_type="decoder", enc_dec_attn_mask_type="padding", device="cpu"
    ).eval()
    x, offsets = torch.randn(4, 2, H), torch.tensor([0, 4, 6], dtype=torch.int32)
    y_of_offsets = decoder(x, encoder_output=x, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    padding = torch.arange(4) >= torch.tensor([[4], [2]])
    mask = padding.view(2, 1, 1, 4)
    torch.testing.assert_close(
        y_of_offsets, decoder(x, encoder_output=x, enc_dec_attn_mask=(mask, mask))
    )
    layer = float8lab.Linear(8, 8, device="cpu")
    for flag in (None, True, np.bool_(False), 0):
        assert layer(torch.ones(2, 8), is_first_microbatch=flag).shape == (2, 8)
    cache = float8lab.InferenceParams(2, 8)
    cache.pre_step({"a": np.int64(1)})
    cache.append(1, *torch.ones(2, 1, 1, 1, 8))
    cache.swap_key_value_dict(np.array([1, 0]))


@pytest.mark.parametrize("attn_input_format", ["sbhd", "bshd"])
def test_drop_path_of_everything_leaves_the_residual(attn_input_format: str) -> None:
    layer = nn.TransformerLayer(
        H, H, 2, drop_path_rate=1.0, hidden_dropout=1.0, attn_input_format=attn_input_format,
        device="cpu",
    )  # fmt: skip
    x = torch.randn(S, 2, H, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not torch.equal(layer.eval()(x), x)
