"""ScalingState: the states that it loads, the states that it refuses, and its messages."""

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import float8lab
from float8lab import recipes
from float8lab.nn import ScalingState

RECIPE = recipes.DelayedScaling(amax_history_len=4)
LONGER = recipes.DelayedScaling(amax_history_len=8)


def trained_model(recipe=RECIPE):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    float8lab.convert_to_float8(model, recipe)
    for scale in (1.0, 8.0):
        model(torch.randn(4, 16) * scale).sum().backward()
    return model


def state_lists(model):
    return {k: v.tolist() for k, v in ScalingState(model).state_dict().items()}


def without(state, *endings):
    return {k: v for k, v in state.items() if not k.endswith(endings)}


INVALID_STATES = {
    "empty": (
        lambda s: {},
        r"2 \(0/DelayedScaling.*, 1/DelayedScaling.*\) are missing, 0 are extra",
    ),
    "a module": (lambda s: without(s, *[k for k in s if k.startswith("1/")]), r"1 \(1/D.* missing"),
    "a tensor": (lambda s: without(s, "seeded"), r"2 \(0/D.* missing"),
    **{
        name: (
            lambda s, name=name: {
                k: v * torch.nan if k == min(n for n in s if name in n) else v for k, v in s.items()
            },
            r"1 \(0/D.* have other shapes, are no tensors, or hold a scale that is not positive",
        )
        for name in ("/scale", "/encode")
    },
    "extra": (
        lambda s: s | {"2/other/scale": torch.ones(3)},
        r"0 are missing, 1 \(2/other\) are ext",
    ),
    "another recipe": (
        lambda s: ScalingState(trained_model(LONGER)).state_dict(),
        r"2 \(0/.*history_len=4.*missing, 2 \(0/.*history_len=8.*extra",
    ),
    "another shape": (lambda s: {k: v[..., :1] for k, v in s.items()}, r"2 \(0/.*other shapes"),
    "arrays": (lambda s: {k: v.numpy() for k, v in s.items()}, r"2 \(0/.*are no tensors"),
    "no tensors": (lambda s: dict.fromkeys(s, "garbage"), r"2 \(0/.*are no tensors"),
}


@pytest.mark.parametrize(("change", "message"), INVALID_STATES.values(), ids=INVALID_STATES)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(change, message):
    model = trained_model()
    before = state_lists(model)
    with pytest.raises(ValueError, match=message):
        ScalingState(model).load_state_dict(change(ScalingState(trained_model()).state_dict()))
    assert state_lists(model) == before


def test_a_state_that_is_not_a_mapping_is_refused():
    with pytest.raises(TypeError, match=r"^state must be a mapping of names to tensors; got list"):
        ScalingState(trained_model()).load_state_dict([])


def test_strict_false_loads_what_fits_and_warns_about_the_rest():
    model, source = trained_model(), trained_model()
    state = ScalingState(source).state_dict()
    partial = {k: v for k, v in state.items() if k.startswith("0/")} | {"garbage": 1}
    expected = {k: v for k, v in state_lists(model).items() if k.startswith("1/")}
    expected |= {k: v for k, v in state_lists(source).items() if k.startswith("0/")}
    with pytest.warns(UserWarning, match=r"1 \(1/D.* missing, 1 \(garbage\) are extra"):
        ScalingState(model).load_state_dict(partial, strict=False)
    assert state_lists(model) == expected


@pytest.mark.parametrize("layer_recipe", [None, recipes.Float8CurrentScaling(), LONGER])
def test_a_state_of_autocasts_recipe_loads_only_with_that_recipe_and_says_so(layer_recipe):
    layer = torch.nn.Sequential(*(float8lab.Linear(16, 16, device="cpu") for _ in range(2)))
    if layer_recipe is not None:  # autocast's recipe takes precedence, but not in layer 1
        float8lab.convert_to_float8(layer, layer_recipe, overrides={"1": None})
    fresh = copy.deepcopy(layer)
    with float8lab.autocast(recipe=RECIPE):
        layer(torch.randn(4, 16))
    state = ScalingState(layer).state_dict()
    with pytest.raises(ValueError, match=r"are extra.* ScalingState\(model, recipe\)"):
        ScalingState(fresh).load_state_dict(state)
    ScalingState(fresh, RECIPE).load_state_dict(state)
    assert state_lists(fresh) == state_lists(layer)


def test_wrappers_of_torch_change_no_name_in_the_state():
    model = trained_model()
    wrapped = copy.deepcopy(model)
    wrapped[0] = torch.compile(checkpoint_wrapper(wrapped[0]))
    wrapped = torch.compile(wrapped)
    assert state_lists(wrapped) == state_lists(model)
    state = ScalingState(model).state_dict()
    with_prefix = {f"_orig_mod.{key}": value for key, value in state.items()}
    fresh = copy.deepcopy(model)
    ScalingState(fresh).load_state_dict({key: torch.ones_like(x) for key, x in state.items()})
    ScalingState(fresh).load_state_dict(with_prefix)
    assert state_lists(fresh) == state_lists(model)


def test_a_model_without_delayed_scaling_loads_the_empty_state():
    ScalingState(torch.nn.Linear(4, 4)).load_state_dict({})


def test_a_model_with_state_can_be_an_argument_of_a_new_process():
    model = trained_model()
    process = torch.multiprocessing.get_context("spawn").Process(target=model.eval)
    process.start()
    process.join()
    assert process.exitcode == 0
