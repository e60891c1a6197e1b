"""Recipes as data: validation, equality, repr, and what each field changes."""

import copy
import dataclasses
import functools
import pickle

import pytest
import torch

import float8lab
from float8lab import recipes
from float8lab.formats import MXFP4, NVFP4
from float8lab.recipes import Format

ALL = [
    recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.Float8RowwiseScaling,
    recipes.Float8BlockScaling, recipes.MXFP8BlockScaling,
]  # fmt: skip
each_recipe = pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)


def test_format_values():
    assert Format.E4M3.value.max_fwd == Format.E4M3.value.max_bwd == 448.0
    assert Format.HYBRID.value == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert Format.HYBRID.value.max_bwd == 57344.0
    assert Format.E5M2.value.max_fwd == 57344.0


def test_delayed_scaling_defaults():
    recipe = recipes.DelayedScaling()
    assert (recipe.margin, recipe.interval, recipe.amax_history_len) == (0, 1, 1)
    assert recipe.fp8_format is Format.HYBRID
    assert recipe.amax_compute_algo == "most_recent"
    assert recipe.scaling_factor_compute_algo is None
    assert recipe.override_linear_precision == (False, False, False)
    assert recipe.reduce_amax
    assert recipe.power_of_2_scale
    assert not recipe.fp8_dpa
    assert not recipe.fp8_mha


@each_recipe
def test_unknown_keyword_and_positional_arguments_are_type_errors(cls):
    with pytest.raises(TypeError, match="unexpected keyword argument 'margins'"):
        cls(margins=1)
    with pytest.raises(TypeError, match="positional"):
        cls(0)


@each_recipe
def test_recipes_are_frozen(cls):
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().fp8_format = Format.E4M3


@each_recipe
def test_equality_and_hash_are_by_value(cls):
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    other = cls(override_linear_precision=(False, False, True))
    assert other != cls()
    assert len({cls(), cls(), other}) == 2
    assert cls() not in [c() for c in ALL if c is not cls]


@each_recipe
def test_copied_and_pickled_recipes_are_equal(cls):
    recipe = cls(fast_accum=(True, True, False))
    assert copy.deepcopy(recipe) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert dataclasses.replace(recipe, fast_accum=(True, False, False)).fast_accum[1] is False


@pytest.mark.parametrize(
    ("cls", "field", "value", "requirement"),
    [
        (recipes.DelayedScaling, "margin", 0.5, "an integer"),
        (recipes.DelayedScaling, "margin", True, "an integer"),
        (recipes.DelayedScaling, "margin", 101, "an integer from -100 to 100"),
        (recipes.DelayedScaling, "interval", 0, "an integer > 0"),
        (recipes.DelayedScaling, "interval", 1.5, "an integer > 0"),
        (recipes.DelayedScaling, "amax_history_len", 0, "an integer > 0"),
        (recipes.DelayedScaling, "amax_history_len", 2.5, "an integer > 0"),
        (recipes.DelayedScaling, "amax_compute_algo", "mean", '"max", "most_recent" or a callable'),
        (recipes.DelayedScaling, "scaling_factor_compute_algo", 1, "None or a callable"),
        (recipes.DelayedScaling, "override_linear_precision", (True,), "a tuple of three bools"),
        (recipes.DelayedScaling, "reduce_amax", 1, "a bool"),
        (recipes.DelayedScaling, "fp8_format", "E4M3", "a recipes.Format"),
        (recipes.DelayedScaling, "fp8_format", Format.E5M2, "Format.E4M3 or Format.HYBRID"),
        (recipes.Float8CurrentScaling, "amax_epsilon", -1.0, "a finite number >= 0"),
        (recipes.Float8CurrentScaling, "amax_epsilon", float("nan"), "a finite number >= 0"),
        (recipes.Float8CurrentScaling, "fast_accum", [True] * 3, "a tuple of three bools"),
        (recipes.Float8CurrentScaling, "amax_epsilon", True, "a finite number >= 0"),
        (recipes.Float8CurrentScaling, "save", "fp16", "one of 'auto', 'fp8', 'recompute'"),
        (recipes.Float8CurrentScaling, "save", None, "one of 'auto', 'fp8', 'recompute'"),
        (recipes.Float8RowwiseScaling, "high_precision_wgrad", None, "a bool"),
        (recipes.Float8BlockScaling, "power_of_2_scale", "yes", "a bool"),
        (recipes.MXFP8BlockScaling, "fp8_format", Format.E5M2, "Format.E4M3 or Format.HYBRID"),
    ],
)
def test_bad_values_name_field_requirement_and_value(cls, field, value, requirement):
    with pytest.raises(ValueError, match=field) as error:
        cls(**{field: value})
    assert requirement in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("spec", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_formats_of_4_bits_have_no_kernels(spec):
    class Packed(recipes.Float8CurrentScaling):
        def _plan(self):
            return super()._plan()._replace(w=spec)

    for name, make in {
        "fp8_format": lambda: recipes.Float8BlockScaling(fp8_format=spec),
        "the cast of w": Packed,
        "recipe": lambda: float8lab.convert_to_float8(torch.nn.Linear(32, 32), spec),
        "fp8_recipe": lambda: float8lab.fp8_autocast(fp8_recipe=spec),
    }.items():
        with pytest.raises(NotImplementedError, match=f"^{name} must .* there is no kernel yet"):
            make()


def test_repr_is_short_and_evaluates_to_an_equal_recipe():
    recipe = recipes.DelayedScaling(
        fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="max"
    )
    expected = (
        "DelayedScaling(fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo='max')"
    )
    assert repr(recipe) == expected
    assert repr(recipe) is repr(recipe)  # computed once
    assert eval(repr(recipe), {"Format": Format, **vars(recipes)}) == recipe
    assert repr(recipes.Float8CurrentScaling()) == "Float8CurrentScaling()"


def test_repr_shows_the_name_of_callables():
    assert repr(recipes.DelayedScaling(amax_compute_algo=max)) == (
        "DelayedScaling(amax_compute_algo=max)"
    )
    # No address, which would differ in the process that loads a ScalingState.
    partial = functools.partial(max, 1, default=2)
    assert repr(recipes.DelayedScaling(amax_compute_algo=partial)) == (
        "DelayedScaling(amax_compute_algo=partial(max, (1,), {'default': 2}))"
    )


@each_recipe
def test_fp8_format_takes_effect(cls):
    for fmt in (Format.E4M3, Format.HYBRID):
        plan = cls(fp8_format=fmt).linear
        assert (plan.x.fp8_dtype, plan.w.fp8_dtype) == (fmt.value.forward,) * 2
        assert plan.dy.fp8_dtype == fmt.value.backward


@each_recipe
def test_override_linear_precision_takes_effect(cls):
    plan = cls(override_linear_precision=(False, True, False)).linear
    assert plan.dgrad is None
    assert plan.fprop[:2] == (plan.x, plan.w)
    assert plan.wgrad[:2] == (plan.dy, plan.x)


@each_recipe
def test_fast_accum_takes_effect(cls):
    plan = cls(fast_accum=(False, True, True)).linear
    assert [gemm.fast_accum for gemm in plan.gemms().values()] == [False, True, True]


@pytest.mark.parametrize("cls", ALL[:4], ids=lambda c: c.__name__)
def test_power_of_2_scale_takes_effect(cls):
    for enabled, rule in ((True, "pow2"), (False, "fp32")):
        plan = cls(power_of_2_scale=enabled).linear
        assert {plan.x.scale_rule, plan.w.scale_rule, plan.dy.scale_rule} == {rule}


@pytest.mark.parametrize("cls", ALL[1:4], ids=lambda c: c.__name__)
def test_amax_epsilon_takes_effect(cls):
    assert cls(amax_epsilon=0.25).linear.amax_epsilon == 0.25


def test_high_precision_wgrad_takes_effect():
    assert recipes.Float8RowwiseScaling(high_precision_wgrad=True).linear.wgrad is None
    assert recipes.Float8RowwiseScaling().linear.wgrad is not None


def test_blocks_and_delayed_scaling_of_each_recipe():
    blocks = {cls: (cls().linear.x.block, cls().linear.w.block) for cls in ALL}
    assert blocks == {
        recipes.DelayedScaling: ((-1, -1), (-1, -1)),
        recipes.Float8CurrentScaling: ((-1, -1), (-1, -1)),
        recipes.Float8RowwiseScaling: ((1, -1), (1, -1)),
        recipes.Float8BlockScaling: ((1, 128), (128, 128)),
        recipes.MXFP8BlockScaling: ((1, 32), (1, 32)),
    }
    assert [cls().linear.delayed for cls in ALL] == [True, False, False, False, False]
    assert recipes.MXFP8BlockScaling().linear.x.scale_rule == "e8m0"
