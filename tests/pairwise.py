"""Fewer cases than all combinations, which prove what concerns one value or two at once."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest


def pairwise(*axes: Mapping[str, Any]) -> list[Any]:
    """Cases, one value of each axis, in which every two values of two axes meet.

    Each case is the first of those that bring most new pairs together; their names are its id.
    """
    left = {
        case: {*itertools.combinations(enumerate(case), 2)} for case in itertools.product(*axes)
    }
    cases = []
    while left:
        case = max(left, key=lambda name: len(left[name]))
        found = left[case]
        left = {name: new for name, pairs in left.items() if (new := pairs - found)}
        values = (axis[name] for axis, name in zip(axes, case, strict=True))
        cases.append(pytest.param(*values, id="-".join(filter(None, case))))
    return cases


def pairs_first(*axes: Mapping[str, Any]) -> list[Any]:
    """All combinations, of which those that ``pairwise`` leaves out are ``slow``."""
    cases = {case.id: case for case in pairwise(*axes)}
    for names in itertools.product(*axes):
        values = (axis[name] for axis, name in zip(axes, names, strict=True))
        label = "-".join(filter(None, names))
        cases.setdefault(label, pytest.param(*values, id=label, marks=pytest.mark.slow))
    return [*cases.values()]
