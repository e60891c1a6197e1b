"""Recipes given as plain values."""

import pytest

from float8lab import recipes
from float8lab.integrations.recipe_mapping import recipe_of


def test_recipes_are_returned_unchanged():
    for recipe in (recipes.MXFP8BlockScaling(), recipes.Auto(), "auto"):
        assert recipe_of(recipe) is recipe
    assert recipe_of(None) == recipe_of({}) == recipes.DelayedScaling()


@pytest.mark.parametrize("kind", recipes.Recipe.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_recipe_can_be_given_by_name_and_fields(kind):
    fields = {"name": kind.__name__, "fp8_format": "E4M3", "fast_accum": [False, True, False]}
    expected = kind(fp8_format=recipes.Format.E4M3, fast_accum=(False, True, False))
    assert recipe_of(fields) == expected
    assert fields["fast_accum"] == [False, True, False]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"name": "Float9"}, ValueError, r"recipe\['name'\] must be one of .*got 'Float9'"),
        ({"fp8_format": "E3M4"}, ValueError, r"recipe\['fp8_format'\] must be one of E4M3"),
        ({"margins": 1}, TypeError, "margins"),
        ({"margin": 0.5}, ValueError, "margin must be an integer"),
        ("Float9", ValueError, r"recipe\['name'\] must be one of .*got 'Float9'"),
        (3, TypeError, "recipe must be one of .*got 3"),
    ],
    ids=["name", "format", "field", "value", "string", "number"],
)
def test_unknown_names_and_fields_raise(value, error, message):
    with pytest.raises(error, match=message):
        recipe_of(value)
