"""Time routing and permutation of MoE layers, and compare their bandwidth with a copy's.

    python -m benchmarks.permute [--model qwen3-moe]

This needs a CUDA GPU. Each op is first compared with its reference in plain PyTorch, run on the
same GPU tensors or, where the order of sums matters, on a CPU. The bytes are those that must move:
tokens and rows, read or written once. The floor is the time of these bytes at the rate of a large
copy; ``copy`` copies the permuted rows. Then it times entire calls, which also make the row map,
and torch's own ops.  T tokens, E experts, K experts of a token, H features.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import float8lab
from benchmarks import quantize, report
from benchmarks.quantize import SUM_FLOOR_DB, Case
from benchmarks.report import Row, Setting, Subject
from float8lab import ops
from float8lab.ops.reference import permute as reference
from float8lab.ops.reference import router as routing
from float8lab.router import fused_topk_with_score_function

__all__ = ["MODELS", "SUBJECT", "MoeShape", "cases", "main", "rows"]


@dataclass(frozen=True)
class MoeShape:
    """The sizes of a layer, and how it routes."""

    T: int
    E: int
    K: int
    H: int
    score_function: str = "softmax"
    groups: int = 1
    group_topk: int = 0


MODELS = {
    "qwen3-moe": MoeShape(32768, 128, 8, 2048),
    "deepseek-v3": MoeShape(16384, 256, 8, 7168, "sigmoid", 8, 4),
    "mixtral": MoeShape(32768, 8, 2, 4096),
}


def cases(setting: Setting, shape: MoeShape) -> Iterator[Case]:
    """Iterate over cases of the ops and their references in torch."""
    T, E, K, H = shape.T, shape.E, shape.K, shape.H
    R, device = T * K, setting.device
    generator = setting.generator()

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    x, rows, logits = normal(T, H), normal(R, H), normal(T, E)
    probs, mask = fused_topk_with_score_function(logits.float(), K)
    experts = logits.topk(K).indices.int()
    q = float8lab.quantize(x, block=(1, 128))
    _, row_map = float8lab.moe_permute(x, mask, R)
    _, index_map = float8lab.moe_permute(x, experts, R, map_type="index")
    codes, scales = q.qdata.view(torch.uint8), (q.scale, q.amax)

    scatter = partial(Case, op=ops.scatter_rows_op, reference=reference.scatter_rows)
    # On a GPU torch adds rows in any order.
    gather = partial(Case, op=ops.gather_rows_op, reference=_on_cpu(reference.gather_rows))
    yield Case("copy", torch.clone, torch.clone, (rows,))
    yield Case("row map", ops.row_map_op, reference.row_map_of, (mask,))
    yield Case("row map of indices", ops.row_map_op, reference.row_map_of, (experts, E))
    yield scatter("permute", arguments=(x, row_map, R))
    yield scatter("permute, index map", arguments=(x, index_map, R))
    yield scatter("permute, with probabilities", arguments=(x, row_map, R, probs))
    yield scatter("permute, FP8 1x128", arguments=(codes, row_map, R, None, None, *scales))
    yield gather("unpermute", arguments=(rows, row_map, rows.dtype))
    yield gather("unpermute, with probabilities", arguments=(rows, row_map, rows.dtype, probs))
    fp8 = float8lab.quantize(rows, block=(1, 128))
    in_fp8 = (fp8.qdata, row_map, rows.dtype, None, None, fp8.scale, 128)
    yield gather("unpermute, FP8 1x128", arguments=in_fp8)
    yield scatter(
        "unpermute backward, with probabilities",
        arguments=(x, row_map, R, probs, rows),
        inexact={1: SUM_FLOOR_DB},
    )
    how: tuple[Any, ...] = (K, shape.score_function, False, shape.groups, shape.group_topk, 1.0)
    backward = (*how[:3], 1.0, False)
    close = {0: 45.0, 1: 45.0}  # bfloat16 may round differently, and 1 of 10000 choices may differ
    yield Case("route", ops.route_op, routing.route, (logits, None, *how, False), close)
    yield Case(
        "route backward",
        ops.route_backward_op,
        routing.route_backward,
        (probs, logits, mask, *backward),
        close,
    )


def _on_cpu(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Run a reference on the CPU, which adds in one order; results return to the device."""

    def call(first: Tensor, *others: Any) -> Any:
        cpu_arguments = tree_map_only(Tensor, Tensor.cpu, (first, *others))
        return tree_map_only(Tensor, lambda x: x.to(first.device), reference(*cpu_arguments))

    return call


def whole_calls(setting: Setting, shape: MoeShape) -> Iterator[Case]:
    """Iterate over cases of the calls that programs make, and of torch's ops for the same."""
    R = shape.T * shape.K
    x = torch.randn(shape.T, shape.H, generator=setting.generator(), device=setting.device)
    x, q = x.bfloat16(), float8lab.quantize(x.bfloat16(), block=(1, 128))
    logits = torch.randn(shape.T, shape.E, generator=setting.generator(), device=setting.device)
    mask = fused_topk_with_score_function(logits, shape.K)[1]
    experts = logits.topk(shape.K).indices.int()
    tokens = mask.t().nonzero()[:, 1]
    rows = x[tokens]

    def permuted(*arguments: Any, **options: Any) -> Any:
        return float8lab.moe_permute(*arguments, **options)[0]

    def selected(x: Tensor, tokens: Tensor) -> Tensor:
        return x.index_select(0, tokens)

    def added(rows: Tensor, tokens: Tensor) -> Tensor:
        return rows.new_zeros(shape.T, shape.H).index_add_(0, tokens, rows)

    def routed(logits: Tensor) -> Tensor:
        best = logits.topk(shape.K)
        return torch.zeros_like(logits).scatter_(1, best.indices, best.values.softmax(-1))

    for name, call, arguments in (
        ("moe_permute, mask", permuted, (x, mask, R)),
        ("moe_permute, index", partial(permuted, map_type="index"), (x, experts, R)),
        ("moe_permute, FP8 1x128", lambda *a: permuted(*a).qdata, (q, mask, R)),
        ("torch: index_select", selected, (x, tokens)),
        ("torch: index_add_", added, (rows, tokens)),
        ("torch: topk, softmax, scatter_", routed, (logits,)),
    ):
        yield Case(name, call, call, arguments)


def rows(setting: Setting, name: str, shape: MoeShape) -> Iterator[Row]:
    """Measure the ops, then the entire calls."""
    sizes = f"{name}: {shape.T} tokens, {shape.K} of {shape.E} experts, {shape.H} features"
    for table, table_cases in (
        (f"{sizes}, ops", cases(setting, shape)),
        (f"{sizes}, calls", whole_calls(setting, shape)),
    ):
        for case in table_cases:
            run = partial(quantize.measure, setting, table, case)
            yield setting.attempt(table, case.name, run)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, action="append", help="default: qwen3-moe")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    for name in options.model or ["qwen3-moe"]:
        yield from rows(setting, name, MODELS[name])


SUBJECT = Subject(
    "permute",
    "Permutation and routing of a mixture of experts",
    __doc__,
    quantize.SUBJECT.columns,
    _rows,
    _options,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
