"""docs/migration/transformer_engine.md lists every parameter of the names that it describes."""

import inspect
import re
from pathlib import Path

import pytest

import float8lab

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "migration" / "transformer_engine.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))

# Public names without a counterpart in Transformer Engine.
WITHOUT_COUNTERPART = {
    "backward_on_this_core", "compute_intensive_ops",
    "ExpertMLP",
    "Float4Tensor", "Float8Tensor", "conversion_report", "convert_to_float8", "count_gemms",
    "distributed", "fallback", "graphed", "inspect", "integrations", "moe_combine", "moe_dispatch",
    "nn", "optim", "quantize", "recipes", "router", "selfcheck", "to_high_precision",
}  # fmt: skip


def parameters(value) -> set[str]:
    """Parameters of a function, or of a class's constructor and forward, without ``ub_*``."""
    names = set(inspect.signature(value).parameters) - {"ub"}
    if inspect.isclass(value) and hasattr(value, "forward"):
        names |= set(inspect.signature(value.forward).parameters) - {"self"}
    return names


def test_every_public_name_with_a_counterpart_has_a_section():
    recipes = {name for name in float8lab.recipes.__all__ if name not in float8lab.__all__}
    expected = set(float8lab.__all__) - WITHOUT_COUNTERPART | recipes - {
        "ALL",
        "Auto",
        "LinearPlan",
        "Recipe",
    }
    assert set(SECTIONS) == expected


@pytest.mark.parametrize("name", SECTIONS)
def test_section_names_every_parameter(name: str):
    value = getattr(float8lab, name, None) or getattr(float8lab.recipes, name)
    if name == "Format":
        missing = {member.name for member in value} - set(re.findall(r"`(\w+)`", SECTIONS[name]))
    else:
        named = set(re.findall(r"`(\w+)[`(]", SECTIONS[name]))
        calls = re.findall(r"`\w+\(([\w, ]*)\)`", SECTIONS[name])
        named |= {name.strip() for call in calls for name in call.split(",")}
        missing = parameters(value) - named
    assert not missing, f"'### `{name}`' must say what became of {sorted(missing)}"
