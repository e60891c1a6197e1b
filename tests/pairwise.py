"""Fewer cases than all that there are: pairs of values, or the quick ones."""

import itertools
from collections.abc import Container, Mapping
from typing import Any

import pytest


def pairwise(*axes: Mapping[str, Any]) -> list[Any]:
    """Return cases, one value of each axis, in which every two values of two axes meet.

    Each case is the first of those that bring most new pairs together. Its id joins the names of
    its values.
    """
    uncovered = {
        case: {*itertools.combinations(enumerate(case), 2)} for case in itertools.product(*axes)
    }
    cases = []
    while uncovered:
        case = max(uncovered, key=lambda name: len(uncovered[name]))
        covered = uncovered[case]
        uncovered = {
            name: remaining for name, pairs in uncovered.items() if (remaining := pairs - covered)
        }
        values = (axis[name] for axis, name in zip(axes, case, strict=True))
        cases.append(pytest.param(*values, id="-".join(filter(None, case))))
    return cases


def pairs_first(*axes: Mapping[str, Any]) -> list[Any]:
    """Return all combinations; those that ``pairwise`` leaves out are ``slow``."""
    cases = {case.id: case for case in pairwise(*axes)}
    for names in itertools.product(*axes):
        values = (axis[name] for axis, name in zip(axes, names, strict=True))
        label = "-".join(filter(None, names))
        cases.setdefault(label, pytest.param(*values, id=label, marks=pytest.mark.slow))
    return [*cases.values()]


def with_slow(quick: Container[str], *names: str) -> pytest.MarkDecorator:
    """``parametrize`` over these names; all that are not in ``quick`` are ``slow``."""
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names],
    )
