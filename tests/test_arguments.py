"""Wrong arguments are refused by the name that the caller wrote.

``--cases N`` tries so many wrong calls of public functions; the default is few, for CI.
"""

from __future__ import annotations

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
from tests.public_calls import CALLS, H, S
from tests.wrong_calls import cases, complaint

MODULE = float8lab.RotaryPositionEmbedding(8, device="cpu")
X = torch.ones(4, 2, 1, 8)
PUBLIC = [
    name
    for module in (float8lab, float8lab.recipes, float8lab.optim)
    for name in module.__all__
    if callable(getattr(module, name))
]
NO_ARGUMENTS = {
    "Float4Tensor": "made by load_fp8",
    "Float8Tensor": "made by quantize",
    "Format": "an enumeration",
    "LinearPlan": "what a recipe makes",
    "Recipe": "a base class",
    "compute_intensive_ops": "takes none",
    "count_gemms": "takes none",
    "selfcheck": "takes minutes",
}


def test_wrong_calls_are_refused_by_name(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some values are names of files
    count = request.config.getoption("--cases")
    found = [complaint(case, tmp_path) for case in cases(count or 200)]
    assert [text for text in found if text] == []


def test_every_public_callable_is_called_wrongly() -> None:
    called = {name.split(".")[-1] for name in CALLS}
    assert [name for name in PUBLIC if name not in called | set(NO_ARGUMENTS)] == []


@pytest.mark.parametrize("name", ["Linear", "apply_rotary_pos_emb", "quantize", "Linear.forward"])
def test_the_calls_themselves_work(name: str, tmp_path: Path) -> None:
    call = CALLS[name]
    call.use(call.function(**call.arguments(tmp_path)))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "cache_dtype": (
        lambda: float8lab.InferenceParams(2, 8, cache_dtype=torch.int8), TypeError, "cache_dtype"
    ),
    "norm-int": (
        lambda: float8lab.LayerNorm(8)(torch.ones(2, 8, dtype=torch.int32)), TypeError, "inp"
    ),
    "norm-complex": (
        lambda: float8lab.RMSNorm(8)(torch.ones(2, 8, dtype=torch.complex64)), TypeError, "inp"
    ),
    "start_positions-beyond": (
        lambda: float8lab.apply_rotary_pos_emb(
            X, MODULE(8), start_positions=torch.tensor([7, 7])
        ),
        ValueError,
        "start_positions",
    ),
    "start_positions-negative": (
        lambda: float8lab.apply_rotary_pos_emb(
            X, MODULE(8), start_positions=torch.tensor([-1, 0])
        ),
        ValueError,
        "start_positions",
    ),
    "eps": (lambda: float8lab.LayerNorm(8, eps=float("nan")), ValueError, "eps"),
    "layernorm_epsilon": (
        lambda: float8lab.TransformerLayer(8, 8, 1, layernorm_epsilon=-1.0),
        ValueError,
        "layernorm_epsilon",
    ),
    "softmax_scale": (
        lambda: float8lab.DotProductAttention(1, 8, softmax_scale=float("nan")),
        ValueError,
        "softmax_scale",
    ),
    "rotary_base": (
        lambda: float8lab.RotaryPositionEmbedding(8, rotary_base=0), ValueError, "rotary_base"
    ),
    "layer_number": (
        lambda: float8lab.TransformerLayer(8, 8, 1, layer_number="1"), TypeError, "layer_number"
    ),
    "kv_channels": (lambda: float8lab.DotProductAttention(1, 0), ValueError, "kv_channels"),
    "heads": (
        lambda: float8lab.MultiheadAttention(8, 0), ValueError, "num_attention_heads"
    ),
    "parameters_split": (
        lambda: float8lab.Linear(8, 8, parameters_split=()), ValueError, "parameters_split"
    ),
    "model": (lambda: float8lab.convert_to_float8("model"), TypeError, "model"),
    "out_features": (lambda: float8lab.Linear(8, 1.5), TypeError, "out_features"),
    "attn_input_format": (
        lambda: float8lab.TransformerLayer(8, 8, 1, attn_input_format="x"),
        ValueError,
        "attn_input_format",
    ),
    "self_attn_mask_type": (
        lambda: float8lab.TransformerLayer(8, 8, 1, self_attn_mask_type="x"),
        ValueError,
        "self_attn_mask_type",
    ),
    "enc_dec_window_size": (
        lambda: float8lab.TransformerLayer(8, 8, 1, enc_dec_window_size=(1, -2)),
        ValueError,
        "enc_dec_window_size",
    ),
    "tp_group": (lambda: float8lab.Linear(8, 8, tp_group="world"), TypeError, "tp_group"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, kind, argument = REFUSED[name]
    with pytest.raises(kind, match=rf"^{argument}\b.* must .*; got "):
        call()


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
def test_messages(check: Any, value: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        check("n", value)
    assert str(raised.value).startswith(message)


def test_messages_of_flags_and_choices() -> None:
    with pytest.raises(TypeError, match=r"^bias must be True or False; got 'no'. Pass a bool\.$"):
        check_flags(other=True, bias="no")
    with pytest.raises(ValueError, match=r"^n must be 'a' or None; got 'b'. Choose one\.$"):
        check_choice("n", "b", ("a", None))


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
