"""The example op of CONTRIBUTING.md is declared correctly and works in compiled graphs."""

import pytest
import torch

from float8lab.formats import E4M3
from float8lab.ops import declare
from tests.contributing import example


def test_the_example_op_counts_zeros_and_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests iterate over all ops of the package.
    monkeypatch.setattr(declare.OPS, "declared", dict(declare.OPS.declared))
    count_zeros = example("How to add an op", "count_zeros_op")
    q = torch.tensor([[0, 1, 0, 2], [-0.0, 0, 0, 448]]).to(E4M3)
    assert count_zeros(q, 2).tolist() == [[1, 1], [2, 1]]
    assert count_zeros(q[:0], 4).shape == (0, 1)
    assert count_zeros(q.t().contiguous().t(), 4).tolist() == [[2], [3]]
    # test_schema compares values with torch.allclose, which has no FP8 kernel.
    checks = set(torch.library._OPCHECK_DEFAULT_UTILS) - {"test_schema"}
    torch.library.opcheck(count_zeros, (q, 2), test_utils=sorted(checks))
    compiled = torch.compile(lambda q: count_zeros(q, 2) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(q).tolist() == [[2, 2], [3, 2]]
