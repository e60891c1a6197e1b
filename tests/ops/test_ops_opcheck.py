"""Schema, fake implementation and tracing of every op, in all argument variants."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FP8_DTYPES, scale_shape
from tests.ops import forms
from tests.ops.groups import cast_arguments, cast_groups
from tests.pairwise import pairs_first, pairwise

BLOCKS = [(-1, -1), (1, -1), (1, 128), (128, 128), (1, 32), (1, 96), (5, -1)]
SHAPES = {"M20-K300": (20, 300), "M1-K1": (1, 1), "M0-K48": (0, 48), "M33-K0": (33, 0)}

each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: "x".join(map(str, b)))
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
ALIGNS = {"align1": 1, "align16": 16}
NAMED_BLOCKS = {"x".join(map(str, block)): block for block in BLOCKS}


def check(op: Any, *arguments: Any, traced: bool = True) -> None:
    """``traced``: not where another case is traced alike, nor where a kernel leaves gaps."""
    utilities = torch.library._OPCHECK_DEFAULT_UTILS
    leaves = pytree.tree_leaves(arguments)
    if not traced:
        utilities = tuple(name for name in utilities if name != "test_aot_dispatch_dynamic")
    if any(isinstance(one, Tensor) and one.dtype in FP8_DTYPES for one in leaves):
        # It compares inputs before and after by torch.allclose, which has no FP8 kernel.
        utilities = tuple(name for name in utilities if name != "test_schema")
    if op is not ops.cast_op or (len(arguments) == 15 and arguments[14] is not None):
        torch.library.opcheck(op.overload, arguments, test_utils=utilities)
        return
    # Without a slot it is traced by its own name, and with one by the other.
    torch.library.opcheck(torch.ops.float8lab.cast.pure, arguments[:14], test_utils=utilities)
    untraced = tuple(name for name in utilities if name != "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.overload, arguments, test_utils=untraced)


ORIENTATIONS = {"straight": (True, False), "transposed": (False, True), "both": (True, True)}
each_orientation = pytest.mark.parametrize("wanted", ORIENTATIONS.values(), ids=ORIENTATIONS)


@each_block
def test_amax(block: tuple[int, int], device: torch.device) -> None:
    x = torch.randn(20, 300, device=device)
    check(ops.amax_op, "", [x], x.dtype, block)


@pytest.mark.parametrize(
    ("block", "wanted", "shape", "align"), pairwise(NAMED_BLOCKS, ORIENTATIONS, SHAPES, ALIGNS)
)
def test_cast(
    block: tuple[int, int], wanted: tuple[bool, bool], shape: tuple[int, int], align: int,
    device: torch.device,
) -> None:  # fmt: skip
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    matrix = ("", [x], x.dtype, E5M2 if all(wanted) else E4M3, block)
    check(ops.cast_op, *matrix, "pow2", 1e-3, align, *wanted, *[True] * (align == 16))


@pytest.mark.parametrize(("wanted", "shape", "align"), pairwise(ORIENTATIONS, SHAPES, ALIGNS))
def test_cast_by_what_is_given(
    wanted: tuple[bool, bool], shape: tuple[int, int], align: int, device: torch.device
) -> None:
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    matrix, how = ("", [x], x.dtype, E4M3, (-1, -1)), (0.0, align, *wanted, False)
    check(ops.cast_op, *matrix, "fp32", *how, torch.full((1, 1), 3.0, device=device))
    for rule in ("encode", "decode"):
        check(ops.cast_op, *matrix, rule, *how, torch.ones((), device=device))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["straight", "transposed"])
def test_cast_by_the_amaxes_of_blocks(wanted: tuple[bool, bool], device: torch.device) -> None:
    x = torch.randn(20, 300, device=device, dtype=torch.bfloat16)
    for block in ((1, -1), (1, 128)):
        shape = scale_shape((32, 304) if wanted[0] else (304, 32), block)
        how = ("", [x], x.dtype, E4M3, block, "fp32", 0.0, 16, *wanted, False)
        check(ops.cast_op, *how, torch.ones(shape, device=device))


@each_orientation
@each_shape
def test_cast_with_a_slot(
    shape: tuple[int, int], wanted: tuple[bool, bool], device: torch.device
) -> None:
    x, scale = torch.randn(shape, device=device), torch.ones((), device=device)
    slot = torch.full((1,), ops.NO_DATA, device=device)
    how = ("", [x], x.dtype, E4M3, (-1, -1), "encode", 0.0, 16, *wanted, True)
    check(ops.cast_op, *how, scale, None, None, slot)


def test_cast_by_block(device: torch.device) -> None:
    x, scale = torch.randn(20, 300, device=device), torch.ones(20, 3, device=device)
    for rule in ("encode", "decode"):
        matrix = ("", [x], x.dtype, E4M3, (1, 128))
        check(ops.cast_op, *matrix, rule, 0.0, 1, True, False, False, scale)


@each_block
def test_cast_many(block: tuple[int, int], device: torch.device) -> None:
    xs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in SHAPES.values()]
    stored = [forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 1) for x in xs]
    q, scale, amax = (list(tensors) for tensors in zip(*stored, strict=True))
    xs = [-x for x in xs]
    traced = block == BLOCKS[0]  # there is nothing to infer
    check(ops.cast_many_op, xs, q, block, "fp32", 0.0, scale, amax, [], traced=traced)
    check(ops.cast_many_op, xs, q, block, "encode", 0.0, [], [], scale, traced=traced)


@pytest.mark.parametrize(
    ("align", "shape"),
    [
        pytest.param(align, shape, id=f"{size}-{name}")
        for (name, align), (size, shape) in zip(2 * [*ALIGNS.items()], SHAPES.items(), strict=True)
    ],
)
def test_transpose_and_dequantize(align: int, shape: tuple[int, int], device: torch.device) -> None:
    q = torch.randn(shape, device=device).to(E4M3)
    one, event = torch.ones(1, 1, device=device), torch.ones(1, device=device)
    check(ops.transpose_op, q, align)
    check(ops.transpose_op, q, align, event)
    check(ops.transpose_op, torch.stack((q, q)), 1, event)
    check(ops.value_of_op, "dequantize", (q, one), torch.bfloat16, (-1, -1))
    check(ops.value_of_op, "dequantize", (q.t(), one), torch.float16, (-1, -1))
    check(ops.value_of_op, "dequantize", (q, one), torch.bfloat16, (-1, -1), event)


@pytest.mark.parametrize(
    ("blocks", "out_dtype", "with_bias"),
    pairwise(
        {"tensor": ((-1, -1),) * 2, "row": ((1, -1),) * 2, "block": ((1, 128), (128, 128))},
        {"fp32": torch.float32, "bf16": torch.bfloat16},
        {"": False, "bias": True},
    ),
)
def test_scaled_mm(
    blocks: tuple[tuple[int, int], tuple[int, int]], out_dtype: torch.dtype, with_bias: bool,
    device: torch.device,
) -> None:  # fmt: skip
    operands: list[Any] = []
    for rows, block in zip((20, 33), blocks, strict=True):
        x: Tensor = torch.randn(rows, 300, device=device)
        q, scale, _ = forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 1)
        operands += [q, scale, block]
    bias = torch.randn(33, device=device) if with_bias else None
    check(ops.scaled_mm_op, *operands, bias, out_dtype, False)
    out = torch.zeros(20, 33, device=device, dtype=out_dtype)
    ops.scaled_mm_into(out, *operands, bias, False)
    assert torch.equal(out, ops.scaled_mm_op(*operands, bias, out_dtype, False))


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("blocks", [((-1, -1),) * 2, ((1, -1),) * 2, ((1, 128), (128, 128))])
def test_scaled_mm_of_batches(
    blocks: tuple[tuple[int, int], tuple[int, int]], batch: int, device: torch.device
) -> None:
    operands: list[Any] = []
    for rows, block in zip((20, 33), blocks, strict=True):
        how = (E4M3, block, "fp32", 0.0, 1)
        xs = torch.randn(3, rows, 300, device=device)
        parts = [forms.quantize(ops.cast_op, x, *how) for x in xs]
        q, scale = (torch.stack([part[i] for part in parts])[:batch] for i in (0, 1))
        operands += [q, scale, block]
    check(ops.scaled_mm_op, *operands, None, torch.bfloat16, False)


@pytest.mark.parametrize("most_recent", [False, True])
def test_update_scales(most_recent: bool, device: torch.device) -> None:
    state = [
        torch.rand(4, 3, device=device), torch.tensor([1.0, ops.NO_DATA, 3.0], device=device),
        torch.ones(2, 3, device=device), torch.zeros(3, dtype=torch.int32, device=device),
        torch.full((3,), 448.0, device=device),
    ]  # fmt: skip
    check(ops.update_scales_op, *state, 0, 1, most_recent, True)


@pytest.mark.parametrize("tokens", [0, 4])
def test_permute(tokens: int, device: torch.device) -> None:
    x, probs = torch.randn(tokens, 70, device=device), torch.rand(tokens, 3, device=device)
    row_map = torch.tensor([[-1, 0, 9, 3], [2, 9, 1, 3]], dtype=torch.int32, device=device)
    row_map = torch.cat([row_map, torch.full_like(row_map, -1)])[:tokens]
    scale, rows = torch.rand(2, tokens, device=device).t(), torch.randn(5, 70, device=device)
    check(ops.row_map_op, probs > 0.5)
    check(ops.row_map_op, row_map, 4)
    check(ops.scatter_rows_op, x, row_map, 5)
    check(ops.scatter_rows_op, x, row_map, 5, probs, rows)
    check(ops.scatter_rows_op, x.byte(), row_map, 5, probs, None, scale, scale)
    check(ops.gather_rows_op, rows, row_map, rows.dtype)
    check(ops.gather_rows_op, rows, row_map, torch.bfloat16, probs, rows[:, 0].half())
    shared = torch.rand(1, 3, device=device).expand(5, 3)
    check(ops.gather_rows_op, rows.to(E4M3), row_map, torch.half, probs, None, shared, 32)


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("name", ops.SCORE_FUNCTIONS)
def test_route(name: str, tokens: int, device: torch.device) -> None:
    logits = torch.randn(tokens, 12, device=device, dtype=torch.bfloat16)
    bias = torch.randn(12, device=device)
    for how in ((4, name, False, 4, 2, 2.5, False), (1, name, True, 1, 0, 1.0, True)):
        check(ops.route_op, logits, bias, *how)
        _, routing_map = ops.route_op(logits, bias, *how)
        check(ops.route_backward_op, logits.float(), logits, routing_map, *how[:3], *how[5:])


@pytest.mark.parametrize("tokens", [0, 4])
def test_cross_entropy(tokens: int, device: torch.device) -> None:
    logits = torch.randn(tokens, 12, device=device, dtype=torch.bfloat16)
    target, factors = torch.arange(tokens, device=device), torch.randn(4, tokens, device=device)
    check(ops.cross_entropy_statistics_op, logits, target)
    check(ops.cross_entropy_backward_op, logits, target, factors)


def of_kind(kind: str, rows: int, device: torch.device) -> list[Tensor]:
    """Inputs of a source."""
    x = torch.randn(rows, 36, device=device, dtype=torch.bfloat16)
    vectors = [torch.rand(size, device=device) for size in (rows, 36, rows, 36)]
    return {
        "layer_norm": [x, *vectors], "rms_norm": [x, *vectors[:2]], "gelu": [x], "swiglu": [x],
        "qgelu_backward": [x, x.float()], "geglu_backward": [x, x[:, :18]],
    }[kind]  # fmt: skip


KINDS = ("layer_norm", "rms_norm", "gelu", "swiglu", "qgelu_backward", "geglu_backward")


@pytest.mark.parametrize(
    ("kind", "rows"), [*((kind, 20) for kind in KINDS), ("layer_norm", 0), ("geglu_backward", 0)]
)
def test_sources(kind: str, rows: int, device: torch.device) -> None:
    source = (kind, of_kind(kind, rows, device), torch.bfloat16)
    scale = torch.ones(1, device=device)
    check(ops.value_of_op, *source)
    check(ops.amax_op, *source)
    # What is wanted does not depend on the kind: all for one, both orientations for the others.
    for wanted in ORIENTATIONS.values() if kind == "layer_norm" else [(True, True)]:
        how = (*wanted, all(wanted) and rows > 0)
        check(ops.cast_op, *source, E5M2, (-1, -1), "encode", 0.0, 16, *how, scale)
        for block in ((-1, -1), (1, 32)) if all(wanted) else ():
            traced = kind == "layer_norm"
            check(ops.cast_op, *source, E4M3, block, "pow2", 0.0, 16, *how, traced=traced)
    how = ("fp32", 0.0, 16, *how, scale.view(1, 1))
    check(ops.cast_op, *source, E4M3, (-1, -1), *how, traced=kind == "layer_norm")


CENTERS = {"rms": False, "layer": True}
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("shape", "center", "dtype"), pairs_first(SHAPES, CENTERS, DTYPES))
def test_norms(
    shape: tuple[int, int], center: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(shape, device=device, dtype=dtype)
    weight = torch.randn(shape[1], device=device)
    bias = torch.randn(shape[1], device=device) if center else None
    arguments = (x, weight, bias, 1e-5, center, torch.bfloat16)
    check(ops.norm_op, *arguments)
    check(ops.norm_op, *arguments, None, (), False, center)
    _, mean, rstd, _ = ops.norm_op(*arguments)
    dy = x.t().contiguous().t()
    check(ops.norm_backward_op, dy, x, weight, mean, rstd, center, dtype)


@pytest.mark.parametrize(("shape", "block", "center"), pairwise(SHAPES, NAMED_BLOCKS, CENTERS))
def test_fp8_norms(
    shape: tuple[int, int], block: tuple[int, int], center: bool, device: torch.device
) -> None:
    x = torch.randn(shape, device=device)
    q, scale, _ = forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 1)
    weight = torch.randn(shape[1], device=device)
    bias = torch.randn(shape[1], device=device) if center else None
    arguments = (q, weight, bias, 1e-5, center, torch.bfloat16, scale, block)
    traced = shape == SHAPES["M20-K300"] or block == (-1, -1)  # each shape, and each block
    check(ops.norm_op, *arguments, traced=traced)
    _, mean, rstd, _ = ops.norm_op(*arguments)
    dy = torch.randn(shape, device=device, dtype=torch.bfloat16)
    arguments = (dy, q, weight, mean, rstd, center, torch.bfloat16, scale, block)
    check(ops.norm_backward_op, *arguments, traced=traced)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128)], ids=str)
def test_groups(block: tuple[int, int], device: torch.device) -> None:
    x, w = torch.randn(20, 48, device=device), torch.randn(3, 32, 48, device=device)
    offs = torch.tensor([3, 3, 17], device=device, dtype=torch.int32)
    how = (E4M3, block, "fp32", 0.0)
    for wanted in ((True, True, True), (True, False, False), (False, True, False)):
        # On a GPU nothing is written behind the last group of a transpose.
        whole = device.type == "cpu" or not wanted[1]
        check(ops.cast_op, *cast_arguments("", [x], x.dtype, offs, *how, *wanted), traced=whole)
        check(ops.cast_op, *cast_arguments("", [w], w.dtype, None, *how, *wanted[:2]))
    outputs = cast_groups(ops.cast_op, "", [x], x.dtype, offs, *how, True, True)
    q, scale, _, q_t, scale_t, _ = outputs
    w_q, w_scale, *_ = cast_groups(ops.cast_op, "", [w], w.dtype, None, *how)
    rest = (torch.bfloat16, False, offs)
    bias = torch.randn(3, 32, device=device)
    check(ops.scaled_mm_op, q, scale, block, w_q, w_scale, block, bias, *rest)
    check(ops.scaled_mm_op, q_t, scale_t, block, q_t, scale_t, block, None, *rest)
    check(ops.plan_groups_op, offs, len(x))


def test_groups_by_what_is_given(device: torch.device) -> None:
    x, offs = torch.randn(20, 48, device=device), torch.tensor([3, 17], device=device)
    slot, how = torch.full((2,), ops.NO_DATA, device=device), (E4M3, (-1, -1))
    one, wanted = torch.ones(1, device=device), (0.0, True, True, False)
    x_in_groups, whole = ("", [x], x.dtype, offs, *how), device.type == "cpu"
    for factors in (one, torch.rand(2, 1, 1, device=device)):
        arguments = cast_arguments(*x_in_groups, "encode", *wanted, factors, slot)
        check(ops.cast_op, *arguments, traced=whole)
    check(ops.cast_op, *cast_arguments(*x_in_groups, "fp32", 0.0, False, False))  # amaxes alone
    arguments = cast_arguments("swiglu", *x_in_groups[1:], "pow2", *wanted, one.view(1, 1))
    check(ops.cast_op, *arguments, traced=whole)
    check(ops.scaled_mm_op, x, None, (), torch.randn(2, 8, 48, device=device), None, (), None,
          x.dtype, False, offs)  # fmt: skip
