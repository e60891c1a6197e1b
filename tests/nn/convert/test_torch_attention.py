"""Converted torch.nn.MultiheadAttention equals torch in high precision and is close in FP8."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab.recipes import DelayedScaling, Float8CurrentScaling
from tests.nn.models import gemms_of
from tests.pairwise import pairwise

E, H, L, S, N = 32, 4, 6, 5, 3
HIGH = Float8CurrentScaling(override_linear_precision=(True, True, True))


_MASKS = ("", "padding", "bool", "float 3-D", "merged", "causal", "causal, padding")


def _masks(kind: str, unbatched: bool, keys: int) -> dict[str, Any]:
    """The arguments that mask keys; every query keeps at least one visible key."""
    padding = torch.zeros(keys, dtype=torch.bool) if unbatched else torch.zeros(N, keys).bool()
    padding[..., -1] = True
    causal = torch.ones(L, keys).triu(1).bool()
    heads = H if unbatched else N * H
    masks: dict[str, dict[str, Any]] = {
        "": {},
        "padding": {"key_padding_mask": padding},
        "bool": {"attn_mask": causal},
        "float 3-D": {"attn_mask": torch.randn(heads, L, keys)},
        "merged": {"attn_mask": causal.expand(heads, L, keys), "key_padding_mask": padding},
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal, padding": {
            "attn_mask": causal, "is_causal": True, "key_padding_mask": padding
        },
    }  # fmt: skip
    return masks[kind]


def _inputs(sources: str, layout: str, kdim: int, vdim: int) -> list[Tensor]:
    def sequence(length: int, features: int) -> Tensor:
        x = torch.randn(N, length, features)
        x = {"batch": x, "sequence": x.transpose(0, 1), "unbatched": x[0]}[layout]
        return x.contiguous().requires_grad_()

    query = sequence(L, E)
    if sources == "self":
        return [query] * 3
    key = sequence(S, kdim)
    return [query, key, key if sources == "cross" else sequence(S, vdim)]


def _run(layer: nn.Module, inputs: list[Tensor], **arguments: Any) -> list[Tensor | None]:
    torch.manual_seed(1)
    y, weights = layer(*inputs, **arguments)
    loss = y.square().sum() + (0 if weights is None else weights.square().sum())
    tensors = [*dict.fromkeys(inputs), *layer.parameters()]
    return [y, weights, *torch.autograd.grad(loss, tensors)]


def _snr(y: Tensor, reference: Tensor) -> float:
    y, reference = y.detach(), reference.detach()
    return float(20 * (reference.norm() / (y - reference).norm()).log10())


@pytest.mark.parametrize(
    ("sources", "layout", "masks", "need_weights", "options"),
    pairwise(
        {name: name for name in ("self", "cross", "separate", "kdim")},
        {name: name for name in ("batch", "sequence", "unbatched")},
        {name: name for name in _MASKS},
        {"": False, "weights": True, "heads": "each head"},
        {
            "": {}, "no_bias": {"bias": False}, "bias_kv": {"add_bias_kv": True},
            "zero": {"add_zero_attn": True},
        },
    ),
)  # fmt: skip
def test_high_precision_equals_torch(
    sources: str, layout: str, masks: str, need_weights: bool | str, options: dict[str, Any]
):
    sizes = {"kdim": 16, "vdim": 24} if sources == "kdim" else {"kdim": E, "vdim": E}
    plain = nn.MultiheadAttention(E, H, batch_first=layout == "batch", **sizes, **options)
    layer = float8lab.convert_to_float8(copy.deepcopy(plain), HIGH)
    inputs = _inputs(sources, layout, **sizes)
    arguments = {
        **_masks(masks, layout == "unbatched", inputs[1].shape[layout == "batch"]),
        "need_weights": bool(need_weights),
        "average_attn_weights": need_weights != "each head",
    }
    for y, reference in zip(
        _run(layer, inputs, **arguments), _run(plain, inputs, **arguments), strict=True
    ):
        torch.testing.assert_close(y, reference)


@pytest.mark.parametrize("sources", ["self", "cross", "separate"])
def test_fp8_is_close_to_high_precision_and_can_be_undone(sources: str):
    plain = nn.MultiheadAttention(E, H)
    layer = float8lab.convert_to_float8(copy.deepcopy(plain))
    assert isinstance(layer, nn.MultiheadAttention)
    assert [r.converted for r in float8lab.conversion_report(layer).layers] == [True, True]
    inputs = _inputs(sources, "sequence", E, E)
    for high_precision in (True, False):
        with float8lab.count_gemms() as counts, float8lab.autocast(enabled=not high_precision):
            results = _run(layer, inputs, need_weights=False)
        gemms = {"self": 2, "cross": 3, "separate": 4}[sources]
        assert counts.fp8 == (0 if high_precision else 3 * gemms)
        if high_precision:
            references = results
    for y, reference in zip(results, references, strict=True):
        if reference is not None and y.norm() > 1e-3:
            assert _snr(y, reference) > 18
    with float8lab.autocast(enabled=False):
        assert torch.equal(layer(*inputs)[0], plain(*inputs)[0])
    assert type(float8lab.to_high_precision(layer)) is nn.MultiheadAttention
    assert type(layer.out_proj) is type(plain.out_proj)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(layer(*inputs)[0], plain(*inputs)[0])


def test_invalid_arguments_raise_what_torch_raises():
    layer = float8lab.convert_to_float8(nn.MultiheadAttention(E, H))
    x = torch.randn(L, N, E)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(AssertionError, match="2-D"):
        layer(x, x, x, key_padding_mask=torch.zeros(L).bool())
    with pytest.raises(RuntimeError, match="should be"):
        layer(x, x, x, attn_mask=torch.zeros(L, L + 1))


def test_a_converted_encoder_trains_checkpoints_evaluates_and_copies():
    block = nn.TransformerEncoderLayer(E, H, 64, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(block, 2)
    model = float8lab.convert_to_float8(copy.deepcopy(plain), DelayedScaling())
    model.load_state_dict(plain.state_dict())
    x, padding = torch.randn(N, L, E), torch.zeros(N, L).bool()
    padding[0, 4:] = True
    for _ in range(3):
        y = model(x, src_key_padding_mask=padding)
        y.sum().backward()
    assert model.layers[0].self_attn.in_proj_weight.grad.isfinite().all()
    checkpoint(model, x, None, padding, use_reentrant=False).sum().backward()
    model.eval(), plain.eval()
    with torch.no_grad(), float8lab.count_gemms() as counts:
        y = model(x, src_key_padding_mask=padding)
    assert counts.fp8 == 8, "no fused path"
    assert _snr(y[~padding], plain(x, src_key_padding_mask=padding)[~padding]) > 18
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x)[0], model(x)[0])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are a prototype
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        attention, reference = model.layers[0].self_attn, plain.layers[0].self_attn
        for a, b in zip(
            attention(*[nested] * 3)[0].unbind(), reference(*[nested] * 3)[0].unbind(), strict=True
        ):
            assert torch.equal(a, b)


def test_a_converted_transformer_compiles_in_one_graph():
    model = nn.Transformer(E, H, 1, 1, 64, dropout=0.0, batch_first=True)
    float8lab.convert_to_float8(model)
    assert not float8lab.conversion_report(model).skipped
    x, target = torch.randn(N, S, E), torch.randn(N, L, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    eager = model(x, target, tgt_mask=mask, tgt_is_causal=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert _snr(compiled(x, target, tgt_mask=mask, tgt_is_causal=True), eager) > 40


def test_attention_with_its_own_forward_or_excluded_is_skipped():
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = nn.ModuleDict({"a": Own(E, H), "b": nn.MultiheadAttention(E, H), "c": nn.Linear(E, E)})
    report = float8lab.conversion_report(float8lab.convert_to_float8(model, exclude=["b.out_proj"]))
    notes = {layer.name: layer.note for layer in report.skipped}
    assert notes == {
        "a": "Own has a forward of its own; name it in overrides to convert",
        "a.out_proj": "its weight is used by torch.nn.MultiheadAttention directly",
        "b.out_proj": "excluded by 'b.out_proj'",
    }
    x = torch.randn(L, N, E)
    assert gemms_of(model["b"], x, x, x, need_weights=False) == (1, 1)
    float8lab.convert_to_float8(model, overrides={"a": Float8CurrentScaling()})
    assert gemms_of(model["a"], x, x, x, need_weights=False)[0] == 2


def test_a_lazy_linear_converts_when_it_materializes():
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 8))
    model = copy.deepcopy(float8lab.convert_to_float8(model, Float8CurrentScaling()))
    report = float8lab.conversion_report(model)
    assert report.skipped[0].note.endswith("converts when it materialises")
    assert gemms_of(model, torch.randn(4, 32))[0] == 2
    assert type(model[0]) is float8lab.Linear
    assert not float8lab.conversion_report(model).skipped


def test_calibration_observes_all_projections():
    layer = float8lab.convert_to_float8(nn.MultiheadAttention(E, H), DelayedScaling())
    plain = copy.deepcopy(layer)
    inputs = _inputs("cross", "sequence", E, E)
    with float8lab.autocast(enabled=False, calibrating=True):
        observed = layer(*inputs)[0]
    with float8lab.autocast(enabled=False):
        torch.testing.assert_close(observed, plain(*inputs)[0])
    precisions = (layer._fp8, layer._fp8_key, layer.out_proj._fp8)
    assert all(precision.slots for precision in precisions)
    assert not layer._fp8_value.slots, "key and value are one tensor"


def test_cross_attention_of_changing_lengths_trains_under_delayed_scaling():
    plain = nn.TransformerDecoderLayer(E, H, 64, dropout=0.0)
    layer = float8lab.convert_to_float8(copy.deepcopy(plain), DelayedScaling())
    for step in range(3):
        target, memory = torch.randn(L, N, E) * (1 + step), torch.randn(S + step, N, E)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(target, memory)
        y.float().sum().backward()
    assert _snr(y.float(), plain(target, memory)) > 18
    assert layer.multihead_attn.in_proj_weight.grad.isfinite().all()


def test_freezing_reports_weights_that_torch_reads_in_high_precision():
    block = nn.TransformerEncoderLayer(E, H, 64, dropout=0.0)
    float8lab.convert_to_float8(block, freeze_weights=True)
    notes = float8lab.conversion_report(block).notes
    assert sum("reads it in high precision" in note for note in notes) == 2
    assert block(torch.randn(L, N, E)).isfinite().all()


@pytest.mark.parametrize("recipe", [float8lab.recipes.Auto(), None], ids=["auto", "excluded"])
def test_the_output_projection_stays_in_high_precision_with_its_attention(recipe: Any):
    attention = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"a": attention, "b": nn.Linear(E, E)})
    arguments = {"recipe": recipe} if recipe else {"overrides": {"a": None, "a.out_proj": HIGH}}
    if recipe:  # the model is so small that high precision is faster
        with pytest.warns(UserWarning, match="converted none"):
            float8lab.convert_to_float8(model, **arguments)
    else:
        float8lab.convert_to_float8(model, **arguments)
    notes = {layer.name: layer.converted for layer in float8lab.conversion_report(model).layers}
    assert not notes["a"]
    assert not notes["a.out_proj"]


def test_attention_with_a_parametrized_weight_converts():
    layer = nn.MultiheadAttention(E, H)
    nn.utils.parametrizations.weight_norm(layer, "in_proj_weight")
    x = torch.randn(L, N, E)
    reference = layer(x, x, x)[0]
    float8lab.convert_to_float8(layer)
    assert _snr(layer(x, x, x)[0], reference) > 18
