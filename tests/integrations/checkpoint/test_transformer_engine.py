"""Scaling state that Transformer Engine saved: pickles of the form of its modules, made here."""

import enum
import io
import os
import pickle
import sys
import types
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.inspect import CheckpointError
from float8lab.integrations import load_te_scaling
from tests.integrations.checkpoint.layouts import CallOnUnpickling, pickled, saved_file

NAME = "transformer_engine.common.recipe"


@pytest.fixture
def transformer_engine_classes(monkeypatch):
    """Classes named as Transformer Engine's in pickles; a test removes them after saving."""
    module = types.ModuleType(NAME)
    pair = namedtuple("_FormatHelper", ["max_fwd", "max_bwd"])

    class Format(enum.Enum):
        E4M3 = pair(448, 448)
        HYBRID = pair(448, 57344)

    @dataclass
    class DelayedScaling:
        margin: int = 0
        fp8_format: Format = Format.HYBRID
        amax_history_len: int = 1024
        amax_compute_algo: str = "max"

    for cls in (pair, Format, DelayedScaling):
        cls.__module__, cls.__qualname__ = NAME, cls.__name__
        setattr(module, cls.__name__, cls)
    for name in ("transformer_engine", "transformer_engine.common", NAME):
        monkeypatch.setitem(sys.modules, name, module)
    return module


def scaling_state(gemms, length, recipe=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    forward, backward = 3 * gemms, 2 * gemms
    state = {
        "recipe": recipe,
        "scale_fwd": torch.rand(forward, generator=generator) * 100 + 1,
        "amax_history_fwd": torch.rand(length, forward, generator=generator),
        "scale_bwd": torch.rand(backward, generator=generator) * 1000 + 1,
        "amax_history_bwd": torch.rand(length, backward, generator=generator),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": gemms},
    }
    state["amax_history_fwd"][0] = state["amax_history_bwd"][0] = 0.0  # as after an update
    return state


def slots_of(layer, recipe):
    slots = [s for _, p in float8lab.nn.precision.precisions(layer) for s in p.slots.values()]
    return [slot.tensors() for slot in slots if slot.pack.recipe == recipe]


@pytest.mark.parametrize("serialize", [pickled, saved_file])
@pytest.mark.parametrize("length", [1, 4])
def test_scales_continue_as_in_transformer_engine(
    transformer_engine_classes, monkeypatch, serialize, length
):
    saved_recipe = transformer_engine_classes.DelayedScaling(margin=1, amax_history_len=length)
    state = scaling_state(1, length, saved_recipe)
    states = {"_extra_state": serialize(state), "weight": torch.randn(32, 16)}
    for name in list(sys.modules):
        if name.startswith("transformer_engine"):
            monkeypatch.delitem(sys.modules, name)
    layer = float8lab.Linear(16, 32, bias=False, device="cpu")
    report = load_te_scaling(states, layer)
    assert report.loaded == ("",)
    assert report.recipe == recipes.DelayedScaling(
        margin=1, amax_history_len=length, amax_compute_algo="max", power_of_2_scale=False
    )
    (tensors,) = slots_of(layer, report.recipe)
    encode = torch.stack([state["scale_fwd"][0], state["scale_fwd"][1], state["scale_bwd"][0]])
    assert torch.equal(tensors["scale"], 1 / encode)
    # Two steps, each with the update that Transformer Engine documents: write the amax of the step
    # into row 0, compute a scale from the largest amax, shift rows by one, and set row 0 to zero.
    x = torch.randn(8, 16, requires_grad=True)
    for _ in range(2):
        with float8lab.autocast(recipe=report.recipe):
            y = layer(x)
        y.backward(torch.ones_like(y))
    # The third forward uses the gradient amax of the second step.
    with float8lab.autocast(recipe=report.recipe):
        layer(x)
    step_amax = torch.stack([x.abs().max(), layer.weight.abs().max(), torch.tensor(1.0)]).detach()
    history = torch.stack(
        [*state["amax_history_fwd"][:, :2].unbind(1), state["amax_history_bwd"][:, 0]], 1
    )
    largest = torch.tensor([448.0, 448.0, 57344.0])
    encodes = []
    for _ in range(3):
        history[0] = step_amax
        encodes.append(largest / history.amax(0) / 2.0**saved_recipe.margin)
        history = history.roll(-1, 0)
        history[0] = 0.0
    (tensors,) = slots_of(layer, report.recipe)
    # Three forwards and two gradients have contributed.
    expected = 1 / torch.stack([encodes[2][0], encodes[2][1], encodes[1][2]])
    assert torch.allclose(tensors["scale"], expected, rtol=1e-6, atol=0)


def test_amaxes_since_the_last_update_are_kept():
    state = scaling_state(1, 3)
    state["amax_history_fwd"][0, 0] = 7.0
    layer = float8lab.Linear(16, 16, device="cpu")
    recipe = recipes.DelayedScaling(amax_history_len=8, amax_compute_algo="max")
    load_te_scaling({"_extra_state": pickled(state)}, layer, recipe)
    (tensors,) = slots_of(layer, recipe)
    assert tensors["amax"][0] == 7.0
    assert torch.equal(tensors["history"][:2, 0], state["amax_history_fwd"][1:, 0].flip(0))
    assert not tensors["history"][2:].any()


def test_scales_of_the_modules_of_a_transformer_layer_are_loaded():
    layer = float8lab.TransformerLayer(32, 64, 4, device="cpu")
    names = {"self_attention.layernorm_qkv": 1, "self_attention.proj": 1, "layernorm_mlp": 2}
    states = {f"{n}._extra_state": pickled(scaling_state(k, 4, seed=k)) for n, k in names.items()}
    # Attention has another kind of scales there, and a module that never ran in FP8 has none.
    states["self_attention.core_attention._extra_state"] = pickled(scaling_state(3, 4))
    report = load_te_scaling(states, layer)
    assert report.loaded == tuple(names)
    assert report.ignored == ("self_attention.core_attention",)
    first, second = slots_of(layer.layernorm_mlp, report.recipe)
    state = scaling_state(2, 4, seed=2)
    for tensors, i in ((first, 0), (second, 1)):
        scales = [
            state["scale_fwd"][3 * i], state["scale_fwd"][3 * i + 1], state["scale_bwd"][2 * i],
        ]  # fmt: skip
        assert torch.equal(tensors["scale"], 1 / torch.stack(scales))


def test_a_converted_layer_keeps_its_recipe():
    model = nn.Sequential(nn.Linear(16, 16))
    recipe = recipes.DelayedScaling(amax_history_len=2)
    float8lab.convert_to_float8(model, recipe)
    state = scaling_state(1, 4)
    load_te_scaling({"0._extra_state": pickled(state)}, model)
    (tensors,) = slots_of(model[0], recipe)
    assert torch.equal(tensors["scale"][0], 1 / state["scale_fwd"][0])
    assert torch.equal(tensors["history"][:, 0], state["amax_history_fwd"][[3, 2], 0])


def test_unused_scales_are_not_loaded():
    state = scaling_state(1, 4)
    for key in state:
        if isinstance(state[key], torch.Tensor):
            state[key].fill_(float(key.startswith("scale")))
    layer = float8lab.Linear(16, 16, device="cpu")
    report = load_te_scaling({"_extra_state": pickled(state)}, layer)
    (tensors,) = slots_of(layer, report.recipe)
    assert not tensors["seeded"].any()


def test_scales_are_loaded_from_a_file(tmp_path):
    state = scaling_state(1, 2)
    torch.save({"_extra_state": pickled(state), "weight": torch.ones(2)}, tmp_path / "te.pt")
    layer = float8lab.Linear(16, 16, device="cpu")
    assert load_te_scaling(tmp_path / "te.pt", layer).loaded == ("",)


def states_with_calls(path):
    inner = io.BytesIO()
    torch.save(CallOnUnpickling(os.mkdir, path), inner)
    nested = pickle.dumps(CallOnUnpickling(torch.storage._load_from_bytes, inner.getvalue()))
    yield pickled({"scale_fwd": CallOnUnpickling(os.mkdir, path)})
    yield saved_file({"scale_fwd": CallOnUnpickling(os.mkdir, path)})
    yield torch.frombuffer(bytearray(nested), dtype=torch.uint8)
    for attribute in ("os\nmkdir", "builtins\neval", "torch\nload", "torch.serialization\nload"):
        text = f"c{attribute}\n(V{path}\ntR.".encode()
        yield torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dotted = b"\x80\x04\x8c\x1btransformer_engine.common.os\x8c\x05mkdir\x93" + (
        b"\x8c" + bytes([len(path)]) + path.encode() + b"\x85R."
    )
    yield torch.frombuffer(bytearray(dotted), dtype=torch.uint8)


def test_pickled_code_is_not_run(tmp_path):
    layer = float8lab.Linear(16, 16, device="cpu")
    created = tmp_path / "made"
    count = 0
    for state in states_with_calls(str(created)):
        with pytest.raises((CheckpointError, ValueError)):
            load_te_scaling({"_extra_state": state}, layer)
        assert not created.exists()
        count += 1
    assert count == 8
    pickle.loads(pickle.dumps(CallOnUnpickling(os.mkdir, str(created))))
    assert created.exists()  # only this test itself lets it run


def state_with(**changes):
    return {**scaling_state(1, 4), **changes}


WRONG_STATES = {
    "damaged": (torch.tensor([1, 2, 3], dtype=torch.uint8), CheckpointError, "is damaged"),
    "no dict": (pickled([1, 2]), CheckpointError, "must be a dict; it is a list"),
    "no history": (
        pickled(state_with(amax_history_bwd=None)), CheckpointError, "must have amax_history_bwd",
    ),
    "dtype": (
        pickled(state_with(scale_bwd=torch.ones(2).double())), CheckpointError, "torch.float64",
    ),
    "shape": (pickled(state_with(scale_fwd=torch.ones(5))), CheckpointError, "5 scales and 3"),
    "zero": (pickled(state_with(scale_fwd=torch.zeros(3))), CheckpointError, "positive scale"),
    "none": (pickled(None), ValueError, "has no _extra_state with scales"),
    "empty": (torch.empty(0, dtype=torch.uint8), ValueError, "has no _extra_state with scales"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_STATES)
def test_wrong_states_raise_and_change_nothing(case):
    value, error, message = WRONG_STATES[case]
    model = nn.ModuleDict({n: float8lab.Linear(16, 16, device="cpu") for n in "ab"})
    states = {"b._extra_state": value}
    if case not in ("none", "empty"):
        states = {"a._extra_state": pickled(scaling_state(1, 4)), **states}
    with pytest.raises(error, match=message):
        load_te_scaling(states, model)
    for layer in model.values():
        assert not any(s["seeded"].any() for s in slots_of(layer, recipes.DelayedScaling()))


def test_missing_modules_are_named():
    layer = nn.ModuleDict({"a": float8lab.Linear(16, 16, device="cpu")})
    with pytest.raises(ValueError, match=r"it has b\.c"):
        load_te_scaling({"b.c._extra_state": pickled(scaling_state(1, 2))}, layer)
