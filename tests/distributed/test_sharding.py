"""Ops on DTensors equal those on unsharded tensors, and gather nothing that their rules shard."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils import _pytree

from float8lab import nn, ops
from tests.distributed.ranks import Collectives, Ranks, each_check


def place(x: Any, mesh: Any, placements: Any) -> Any:
    """Turn tensors among arguments into DTensors by ``placements``, the last ones replicated."""
    remaining = iter(placements)

    def distribute(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        placement = next(remaining, Replicate())
        placement = placement if isinstance(placement, list) else [placement] * mesh.ndim
        return distribute_tensor(x, mesh, placement)

    return _pytree.tree_map(distribute, x)


def assert_same(got: Any, expected: Any, *, exact: bool = True) -> None:
    for got_tensor, expected_tensor in zip(
        _pytree.tree_leaves(got), _pytree.tree_leaves(expected), strict=True
    ):
        assert isinstance(got_tensor, DTensor)
        assert (got_tensor.shape, got_tensor.stride(), got_tensor.dtype) == (
            expected_tensor.shape,
            expected_tensor.stride(),
            expected_tensor.dtype,
        )
        got_tensor = got_tensor.full_tensor()
        if exact:
            assert torch.equal(got_tensor, expected_tensor)
        else:  # sums in another order
            torch.testing.assert_close(got_tensor, expected_tensor)


def cases(rows: tuple[int, ...]) -> dict[str, tuple[Any, tuple[Any, ...], list[Any], bool]]:
    """An op, its arguments, placements that its rule keeps, and whether its results are exact."""
    K, S0 = 24, Shard(len(rows) - 1)
    x, dy, h = torch.randn(*rows, K), torch.randn(*rows, K), torch.randn(*rows, 2 * K)
    weight, bias = torch.randn(K), torch.randn(K)
    f32 = torch.float32
    _, mean, rstd, _ = ops.norm_op(x, weight, bias, 1e-5, True, f32)
    t, angles = torch.randn(*rows, 6, 8), torch.randn(rows[0], 1, 1, 8)
    logits = torch.randn(rows[-1], 16)
    routing = (2, "softmax", False, 1, 0, 1.0, False)
    probs, chosen = ops.route_op(logits, None, *routing)
    dy_args = (dy, x, weight, mean, rstd, True, f32)
    return {
        "layer norm": (ops.norm_op, (x, weight, bias, 1e-5, True, f32), [S0], True),
        "RMSNorm, amax": (
            ops.norm_op, (x, weight, None, 1e-5, False, f32, None, (), True, True), [S0], True,
        ),
        "norm backward": (ops.norm_backward_op, dy_args, [S0, S0, Replicate(), S0, S0], False),
        "swiglu": (ops.value_of_op, ("swiglu", [h], f32), [S0], True),
        "gelu by features": (ops.value_of_op, ("gelu", [x], f32), [Shard(len(rows))], True),
        "swiglu backward": (ops.value_of_op, ("swiglu_backward", [h, dy], f32), [S0, S0], True),
        "rotary, heads": (ops.rotate_op, (t, angles.cos(), angles.sin(), False, False),
                          [Shard(2)], True),
        "rotary, sequence": (ops.rotate_op, (t, angles.cos(), angles.sin(), True, True),
                             [Shard(0)] * 3, True),
        "router": (ops.route_op, (logits, None, *routing), [Shard(0)], True),
        "router backward": (
            ops.route_backward_op, (probs, logits, chosen, 2, "softmax", False, 1.0, False),
            [Shard(0)] * 3, True,
        ),
    }  # fmt: skip


def check_ops_on_shards_equal_unsharded_ones_without_a_gather(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    for rows in ((8, 4), (3, 5), (2, 1)):  # the last dimension has unequal and empty shards
        for name, (op, args, placements, exact) in cases(rows).items():
            args = _pytree.tree_map_only(Tensor, lambda t: t.to(ranks.device), args)
            expected = op.overload(*args)
            with Collectives() as collectives:
                got = op(*place(args, mesh, placements))
            assert_same(got, expected, exact=exact)
            moved = [call for call in collectives.seen if call[0] not in ("scatter", "broadcast")]
            assert moved == [], (name, moved)


def check_ops_without_a_rule_or_a_fitting_placement_equal_unsharded_ones(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    x = torch.randn(12, 40).to(ranks.device)
    for block in ((-1, -1), (1, -1), (1, 32)):
        args = ("", [x], x.dtype, torch.float8_e4m3fn, block, "fp32", 0.0, 16, True, True, True)
        got, expected = ops.cast_op(*place(args, mesh, [Shard(0)])), ops.cast_op.overload(*args)
        for got_tensor, expected_tensor in zip(got, expected, strict=True):
            assert torch.equal(got_tensor.full_tensor().float(), expected_tensor.float())
    y = torch.randn(4, 24).to(ranks.device)
    weight = torch.ones(24, device=ranks.device)
    args = (y, weight, None, 1e-5, False, torch.float32)
    expected = ops.norm_op.overload(*args)
    for placement in (Shard(1), Replicate(), Partial()):
        placed_args = place(args, mesh, [Replicate()])
        placed_y = placed_args[0] / ranks.world if placement.is_partial() else placed_args[0]
        if placement.is_partial():
            placed_y = DTensor.from_local(placed_y.to_local(), mesh, [placement], run_check=False)
        elif placement.is_shard():
            placed_y = placed_y.redistribute(mesh, [placement])
        assert_same(
            ops.norm_op(placed_y, *placed_args[1:]), expected, exact=not placement.is_partial()
        )
    with pytest.raises(ValueError, match="parameters must be DTensors"):
        ops.norm_op(placed_args[0], torch.nn.Parameter(weight), *args[2:])


def check_norms_on_a_mesh_of_two_dimensions_equal_unsharded_ones(ranks: Ranks) -> None:
    mesh = ranks.mesh(2, ranks.world // 2, names=("dp", "tp"))
    x = torch.randn(4, 6, 16).to(ranks.device)
    for kind in (nn.LayerNorm, nn.RMSNorm):
        norm = kind(16, device=ranks.device)
        torch.nn.init.normal_(norm.weight)
        inp = x.clone().requires_grad_()
        y = norm(inp)
        (y * y).sum().backward()
        expected = [y, inp.grad, *(p.grad for p in norm.parameters())]
        for compiled in (False, True):
            for name, parameter in list(norm.named_parameters()):
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                replicated = distribute_tensor(full.detach(), mesh, [Replicate()] * 2)
                norm.register_parameter(name, torch.nn.Parameter(replicated))
            inp = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
            run = torch.compile(norm, backend="aot_eager", fullgraph=True) if compiled else norm
            # Dynamo traces nothing under a dispatch mode.
            with contextlib.nullcontext() if compiled else Collectives() as collectives:
                y = run(inp)
                (y * y).sum().backward()
            got = [y, inp.grad, *(p.grad for p in norm.parameters())]
            assert [tuple(result.placements) for result in got[:2]] == [(Shard(0), Shard(1))] * 2
            assert compiled or not collectives.of("gather")
            assert_same(got, expected, exact=False)


test_on_ranks = each_check(__name__, 4)
