"""opcheck tests schema, fake implementation and tracing of every op, in all argument variants."""

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
    """Runs opcheck; ``traced`` is False if another case traces the same or a kernel leaves gaps."""
    utilities = torch.library._OPCHECK_DEFAULT_UTILS
    leaves = pytree.tree_leaves(arguments)
    if not traced:
        utilities = tuple(name for name in utilities if name != "test_aot_dispatch_dynamic")
    if any(isinstance(leaf, Tensor) and leaf.dtype in FP8_DTYPES for leaf in leaves):
        # test_schema compares inputs with torch.allclose, which has no FP8 kernel.
        utilities = tuple(name for name in utilities if name != "test_schema")
    if op is not ops.cast_op or (len(arguments) == 15 and arguments[14] is not None):
        torch.library.opcheck(op.overload, arguments, test_utils=utilities)
        return
    # Without a slot, graphs contain the overload ``pure``, and with a slot the other overload.
    torch.library.opcheck(torch.ops.float8lab.cast.pure, arguments[:14], test_utils=utilities)
    untraced = tuple(name for name in utilities if name != "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.overload, arguments, test_utils=untraced)


ORIENTATIONS = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
each_orientation = pytest.mark.parametrize("outputs", ORIENTATIONS.values(), ids=ORIENTATIONS)


@each_block
def test_opcheck_of_amax(block: tuple[int, int], device: torch.device) -> None:
    x = torch.randn(20, 300, device=device)
    check(ops.amax_op, "", [x], x.dtype, block)


@pytest.mark.parametrize(
    ("block", "outputs", "shape", "align"), pairwise(NAMED_BLOCKS, ORIENTATIONS, SHAPES, ALIGNS)
)
def test_opcheck_of_cast(
    block: tuple[int, int], outputs: tuple[bool, bool], shape: tuple[int, int], align: int,
    device: torch.device,
) -> None:  # fmt: skip
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    matrix = ("", [x], x.dtype, E5M2 if all(outputs) else E4M3, block)
    check(ops.cast_op, *matrix, "pow2", 1e-3, align, *outputs, *[True] * (align == 16))


@pytest.mark.parametrize(("outputs", "shape", "align"), pairwise(ORIENTATIONS, SHAPES, ALIGNS))
def test_opcheck_of_cast_with_given_scales(
    outputs: tuple[bool, bool], shape: tuple[int, int], align: int, device: torch.device
) -> None:
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    matrix, options = ("", [x], x.dtype, E4M3, (-1, -1)), (0.0, align, *outputs, False)
    check(ops.cast_op, *matrix, "fp32", *options, torch.full((1, 1), 3.0, device=device))
    for rule in ("encode", "decode"):
        check(ops.cast_op, *matrix, rule, *options, torch.ones((), device=device))


@pytest.mark.parametrize("outputs", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
def test_opcheck_of_cast_with_given_amaxes_of_blocks(
    outputs: tuple[bool, bool], device: torch.device
) -> None:
    x = torch.randn(20, 300, device=device, dtype=torch.bfloat16)
    for block in ((1, -1), (1, 128)):
        shape = scale_shape((32, 304) if outputs[0] else (304, 32), block)
        options = ("", [x], x.dtype, E4M3, block, "fp32", 0.0, 16, *outputs, False)
        check(ops.cast_op, *options, torch.ones(shape, device=device))


@each_orientation
@each_shape
def test_opcheck_of_cast_with_a_slot(
    shape: tuple[int, int], outputs: tuple[bool, bool], device: torch.device
) -> None:
    x, scale = torch.randn(shape, device=device), torch.ones((), device=device)
    slot = torch.full((1,), ops.NO_DATA, device=device)
    options = ("", [x], x.dtype, E4M3, (-1, -1), "encode", 0.0, 16, *outputs, True)
    check(ops.cast_op, *options, scale, None, None, slot)


def test_opcheck_of_cast_with_block_scales(device: torch.device) -> None:
    x, scale = torch.randn(20, 300, device=device), torch.ones(20, 3, device=device)
    for rule in ("encode", "decode"):
        matrix = ("", [x], x.dtype, E4M3, (1, 128))
        check(ops.cast_op, *matrix, rule, 0.0, 1, True, False, False, scale)


@each_block
def test_opcheck_of_cast_many(block: tuple[int, int], device: torch.device) -> None:
    xs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in SHAPES.values()]
    stored = [forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 1) for x in xs]
    q, scale, amax = (list(tensors) for tensors in zip(*stored, strict=True))
    xs = [-x for x in xs]
    traced = block == BLOCKS[0]  # the op has no outputs to infer
    check(ops.cast_many_op, xs, q, block, "fp32", 0.0, scale, amax, [], traced=traced)
    check(ops.cast_many_op, xs, q, block, "encode", 0.0, [], [], scale, traced=traced)


@pytest.mark.parametrize(
    ("align", "shape"),
    [
        pytest.param(align, shape, id=f"{size}-{name}")
        for (name, align), (size, shape) in zip(2 * [*ALIGNS.items()], SHAPES.items(), strict=True)
    ],
)
def test_opcheck_of_transpose_and_dequantize(
    align: int, shape: tuple[int, int], device: torch.device
) -> None:
    q = torch.randn(shape, device=device).to(E4M3)
    unit_scale, event = torch.ones(1, 1, device=device), torch.ones(1, device=device)
    check(ops.transpose_op, q, align)
    check(ops.transpose_op, q, align, event)
    check(ops.transpose_op, torch.stack((q, q)), 1, event)
    check(ops.value_of_op, "dequantize", (q, unit_scale), torch.bfloat16, (-1, -1))
    check(ops.value_of_op, "dequantize", (q.t(), unit_scale), torch.float16, (-1, -1))
    check(ops.value_of_op, "dequantize", (q, unit_scale), torch.bfloat16, (-1, -1), event)


@pytest.mark.parametrize(
    ("blocks", "out_dtype", "with_bias"),
    pairwise(
        {"tensor": ((-1, -1),) * 2, "row": ((1, -1),) * 2, "block": ((1, 128), (128, 128))},
        {"fp32": torch.float32, "bf16": torch.bfloat16},
        {"": False, "bias": True},
    ),
)
def test_opcheck_of_scaled_mm(
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
def test_opcheck_of_scaled_mm_of_batches(
    blocks: tuple[tuple[int, int], tuple[int, int]], batch: int, device: torch.device
) -> None:
    operands: list[Any] = []
    for rows, block in zip((20, 33), blocks, strict=True):
        options = (E4M3, block, "fp32", 0.0, 1)
        xs = torch.randn(3, rows, 300, device=device)
        parts = [forms.quantize(ops.cast_op, x, *options) for x in xs]
        q, scale = (torch.stack([part[i] for part in parts])[:batch] for i in (0, 1))
        operands += [q, scale, block]
    check(ops.scaled_mm_op, *operands, None, torch.bfloat16, False)


@pytest.mark.parametrize("most_recent", [False, True])
def test_opcheck_of_update_scales(most_recent: bool, device: torch.device) -> None:
    state = [
        torch.rand(4, 3, device=device), torch.tensor([1.0, ops.NO_DATA, 3.0], device=device),
        torch.ones(2, 3, device=device), torch.zeros(3, dtype=torch.int32, device=device),
        torch.full((3,), 448.0, device=device),
    ]  # fmt: skip
    check(ops.update_scales_op, *state, 0, 1, most_recent, True)


@pytest.mark.parametrize("tokens", [0, 4])
def test_opcheck_of_permute(tokens: int, device: torch.device) -> None:
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
def test_opcheck_of_route(name: str, tokens: int, device: torch.device) -> None:
    logits = torch.randn(tokens, 12, device=device, dtype=torch.bfloat16)
    bias = torch.randn(12, device=device)
    for options in ((4, name, False, 4, 2, 2.5, False), (1, name, True, 1, 0, 1.0, True)):
        check(ops.route_op, logits, bias, *options)
        _, routing_map = ops.route_op(logits, bias, *options)
        check(
            ops.route_backward_op, logits.float(), logits, routing_map, *options[:3], *options[5:]
        )


@pytest.mark.parametrize("tokens", [0, 4])
def test_opcheck_of_cross_entropy(tokens: int, device: torch.device) -> None:
    logits = torch.randn(tokens, 12, device=device, dtype=torch.bfloat16)
    target, factors = torch.arange(tokens, device=device), torch.randn(4, tokens, device=device)
    check(ops.cross_entropy_statistics_op, logits, target)
    check(ops.cross_entropy_backward_op, logits, target, factors)


def prologue_inputs(kind: str, rows: int, device: torch.device) -> list[Tensor]:
    """The inputs of a prologue."""
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
def test_opcheck_of_prologues(kind: str, rows: int, device: torch.device) -> None:
    prologue = (kind, prologue_inputs(kind, rows, device), torch.bfloat16)
    scale = torch.ones(1, device=device)
    check(ops.value_of_op, *prologue)
    check(ops.amax_op, *prologue)
    # Outputs do not depend on the kind: one kind has all combinations, others both orientations.
    for outputs in ORIENTATIONS.values() if kind == "layer_norm" else [(True, True)]:
        options = (*outputs, all(outputs) and rows > 0)
        check(ops.cast_op, *prologue, E5M2, (-1, -1), "encode", 0.0, 16, *options, scale)
        for block in ((-1, -1), (1, 32)) if all(outputs) else ():
            traced = kind == "layer_norm"
            check(ops.cast_op, *prologue, E4M3, block, "pow2", 0.0, 16, *options, traced=traced)
    options = ("fp32", 0.0, 16, *options, scale.view(1, 1))
    check(ops.cast_op, *prologue, E4M3, (-1, -1), *options, traced=kind == "layer_norm")


CENTERS = {"rms": False, "layer": True}
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("shape", "center", "dtype"), pairs_first(SHAPES, CENTERS, DTYPES))
def test_opcheck_of_norms(
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
def test_opcheck_of_fp8_norms(
    shape: tuple[int, int], block: tuple[int, int], center: bool, device: torch.device
) -> None:
    x = torch.randn(shape, device=device)
    q, scale, _ = forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 1)
    weight = torch.randn(shape[1], device=device)
    bias = torch.randn(shape[1], device=device) if center else None
    arguments = (q, weight, bias, 1e-5, center, torch.bfloat16, scale, block)
    traced = shape == SHAPES["M20-K300"] or block == (-1, -1)  # each shape and each block once
    check(ops.norm_op, *arguments, traced=traced)
    _, mean, rstd, _ = ops.norm_op(*arguments)
    dy = torch.randn(shape, device=device, dtype=torch.bfloat16)
    arguments = (dy, q, weight, mean, rstd, center, torch.bfloat16, scale, block)
    check(ops.norm_backward_op, *arguments, traced=traced)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128)], ids=str)
def test_opcheck_of_groups(block: tuple[int, int], device: torch.device) -> None:
    x, w = torch.randn(20, 48, device=device), torch.randn(3, 32, 48, device=device)
    offs = torch.tensor([3, 3, 17], device=device, dtype=torch.int32)
    options = (E4M3, block, "fp32", 0.0)
    for outputs in ((True, True, True), (True, False, False), (False, True, False)):
        # On a GPU a transpose has unwritten columns after the last group.
        is_fully_written = device.type == "cpu" or not outputs[1]
        check(
            ops.cast_op,
            *cast_arguments("", [x], x.dtype, offs, *options, *outputs),
            traced=is_fully_written,
        )
        check(ops.cast_op, *cast_arguments("", [w], w.dtype, None, *options, *outputs[:2]))
    x_casts = cast_groups(ops.cast_op, "", [x], x.dtype, offs, *options, True, True)
    q, scale, _, q_t, scale_t, _ = x_casts
    w_q, w_scale, *_ = cast_groups(ops.cast_op, "", [w], w.dtype, None, *options)
    rest = (torch.bfloat16, False, offs)
    bias = torch.randn(3, 32, device=device)
    check(ops.scaled_mm_op, q, scale, block, w_q, w_scale, block, bias, *rest)
    check(ops.scaled_mm_op, q_t, scale_t, block, q_t, scale_t, block, None, *rest)
    check(ops.plan_groups_op, offs, len(x))


def test_opcheck_of_groups_with_given_scales(device: torch.device) -> None:
    x, offs = torch.randn(20, 48, device=device), torch.tensor([3, 17], device=device)
    slot, options = torch.full((2,), ops.NO_DATA, device=device), (E4M3, (-1, -1))
    unit_factor, cast_options = torch.ones(1, device=device), (0.0, True, True, False)
    x_in_groups, is_fully_written = ("", [x], x.dtype, offs, *options), device.type == "cpu"
    for factors in (unit_factor, torch.rand(2, 1, 1, device=device)):
        arguments = cast_arguments(*x_in_groups, "encode", *cast_options, factors, slot)
        check(ops.cast_op, *arguments, traced=is_fully_written)
    check(ops.cast_op, *cast_arguments(*x_in_groups, "fp32", 0.0, False, False))  # only amaxes
    arguments = cast_arguments(
        "swiglu", *x_in_groups[1:], "pow2", *cast_options, unit_factor.view(1, 1)
    )
    check(ops.cast_op, *arguments, traced=is_fully_written)
    check(ops.scaled_mm_op, x, None, (), torch.randn(2, 8, 48, device=device), None, (), None,
          x.dtype, False, offs)  # fmt: skip
