"""Tensor parallelism of plain models by torch's parallelize_module."""

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import float8lab
from float8lab.distributed import ModelState
from float8lab.distributed.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from float8lab.nn import ScalingState, shard_state_dict, whole_state_dict
from float8lab.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)
from tests.distributed.ranks import Collectives, Ranks, each_check, on_ranks, slow_check
from tests.distributed.test_tensor_parallel import (
    DIMENSIONS,
    assert_equal_up_to_sum_order,
    bytes_and_scales,
    local_shard,
)
from tests.recorder import observing

RECIPES: list[Recipe] = [
    Float8CurrentScaling(power_of_2_scale=True), DelayedScaling(power_of_2_scale=True),
    Float8RowwiseScaling(power_of_2_scale=True), Float8BlockScaling(power_of_2_scale=True),
    MXFP8BlockScaling(),
]  # fmt: skip
"""The scales of these recipes are powers of two, so integers stay exact."""
WIDTH, HIDDEN = 64, 128
TOKENS_AS_SHARDS = Shard(1)
COLUMN = ("q", "k", "up", "gate")


class Block(nn.Module):
    """Pairs of layers that share an input, and layers whose outputs are summed over ranks.

    Weights and inputs are small integers, most of them 0. So all sums are exact in any order, even
    with the few bits in which a GPU sums FP8 products, and ranks must have exactly the results of
    one rank.
    """

    def __init__(self, recipe: Recipe | None, hidden: int = HIDDEN, width: int = WIDTH) -> None:
        super().__init__()
        sizes = dict.fromkeys(("q", "k", "out"), (width, width))
        sizes |= dict.fromkeys(("up", "gate"), (width, hidden)) | {"down": (hidden, width)}
        generator = torch.Generator().manual_seed(1)
        for name, size in sizes.items():
            layer = nn.Linear(*size, bias=name != "k")
            for parameter in layer.parameters():
                parameter.data = integers(parameter.shape, generator)
            self.add_module(name, layer)
        if recipe is not None:
            float8lab.convert_to_float8(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.q(x).relu() + self.k(x))
        return x + self.down(self.gate(x).relu() + self.up(x))


def integers(shape: Any, generator: torch.Generator) -> Tensor:
    """Mostly 0, some -1 and 1, and a few larger values, so that the amaxes of shards differ."""
    values = torch.randint(-4, 5, tuple(shape), generator=generator).float()
    large = torch.rand(tuple(shape), generator=generator) < 2 / max(values.numel(), 1)
    return values * (values.abs() == 1) + large * 9


def plan_of(kind: str) -> dict[str, Any]:
    """A plan of parallelize_module for unsharded tokens, or for shards gathered in two ways."""
    tokens: Any = {"output_layouts": TOKENS_AS_SHARDS, "use_local_output": False}
    column, row = {
        "tensor": (ColwiseParallel, RowwiseParallel()),
        "sequence": (
            partial(ColwiseParallel, input_layouts=TOKENS_AS_SHARDS), RowwiseParallel(**tokens)
        ),
        "float8": (Float8ColwiseParallel, Float8RowwiseParallel(**tokens)),
    }[kind]  # fmt: skip
    # torch takes local tensors for equal shards, but shards of the hidden features may differ.
    columns = {name: column(use_local_output=name in ("q", "k")) for name in COLUMN}
    return columns | {"out": row, "down": row}


class Operands:
    """Keeps the operands of every GEMM and its call, by layer, GEMM and side."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, str], list[tuple[Any, Any]]] = {}

    def saw_cast(self, *args: Any) -> None:
        pass

    def saw_gemm(self, kind: str, call: Any, *operands: Any) -> None:
        """Keep the operands."""
        for side, operand in zip(("left", "right"), operands, strict=True):
            key = call.precision.name, kind, side
            self.seen.setdefault(key, []).append((operand, call))


def assert_operands_of_one_rank(
    ranks: Ranks, recorded: Operands, single: Operands, model: Any, tokens: int
) -> None:
    assert recorded.seen.keys() == single.seen.keys()
    for (name, kind, side), calls in recorded.seen.items():
        layer, axes = getattr(model, name), DIMENSIONS[kind][side == "right"]
        sizes = {"M": tokens, "N": layer.weight.shape[0], "K": layer.weight.shape[1]}
        for (local_operand, call), (full_operand, _) in zip(
            calls, single.seen[name, kind, side], strict=True
        ):
            block = getattr(call.recipe.linear.gemms()[kind], side).block
            sharded_axis = "N" if call.comm.parallel.mode == "column" else "K"
            for x, y in zip(
                bytes_and_scales(local_operand, block),
                bytes_and_scales(full_operand, block),
                strict=True,
            ):
                for dim, axis in enumerate(axes):
                    y = y.narrow(dim, 0, sizes[axis])  # without padding
                    if axis == sharded_axis:
                        y = local_shard(y, dim, ranks)
                assert torch.equal(x[: y.shape[0], : y.shape[1]], y), (name, kind, side)


def run(model: nn.Module, x: Any) -> list[Tensor]:
    """Return the output and the gradients of the input and the parameters, unsharded."""
    model.zero_grad()
    inp = x.detach().clone().requires_grad_()
    y = model(inp)
    y.backward(y.detach().sign())
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return [unshard(t) for t in (y, inp.grad, *gradients)]


def unshard(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def parallelized(
    mesh: Any, kind: str, recipe: Recipe, *, converted_first: bool = True, hidden: int = HIDDEN,
    width: int = WIDTH,
) -> Any:  # fmt: skip
    model = Block(recipe if converted_first else None, hidden, width).to(mesh.device_type)
    parallelize_module(model, mesh, plan_of(kind))
    return model if converted_first else float8lab.convert_to_float8(model, recipe)


def inputs(mesh: Any, kind: str, *shape: int, width: int = WIDTH) -> tuple[Tensor, Any]:
    x = integers((*shape, width), torch.Generator().manual_seed(shape[1])).to(mesh.device_type)
    return x, x if kind == "tensor" else distribute_tensor(x, mesh, [TOKENS_AS_SHARDS])


def assert_equals_one_rank(ranks: Ranks, model: Any, single: Any, kind: str, *shapes: Any) -> None:
    for shape in shapes:
        x, local_x = inputs(ranks.mesh(), kind, *shape, width=single.q.in_features)
        with observing(Operands()) as expected:
            results = run(single, x)
        with observing(Operands()) as recorded:
            got = run(model, local_x)
        assert_operands_of_one_rank(ranks, recorded, expected, model, shape[0] * shape[1])
        for actual, reference in zip(got, results, strict=True):
            assert torch.equal(actual, reference)


def check_operands_and_results_equal_those_of_one_rank(ranks: Ranks) -> None:
    """Features and tokens may not divide: unequal and empty shards, and tokens that cut blocks."""
    mesh = ranks.mesh()
    for recipe in RECIPES:
        # Several runs of tokens; shards cut blocks of tokens, or do not.
        shapes = [(2, 16), (3, 5), (2, 1)]
        whole_blocks = (2, 128 * ranks.world)
        shapes += [(1, 150), whole_blocks] * isinstance(recipe, Float8BlockScaling)
        # With the second size, the last rank has no features.
        few, block = 2 * ranks.world - 3, recipe.linear.largest_block
        width, sizes = WIDTH, (149, few, 265)
        if block > 1:  # the last rank has fewer
            width = block * ranks.world
            sizes = (width - ranks.world + 1, width, 2 * width - 1)
        kinds = zip(("float8", "tensor", "sequence"), sizes, (0, 1, 1), strict=True)
        for kind, hidden, skipped in kinds:
            single = Block(recipe, hidden, width).to(ranks.device)
            model = parallelized(
                mesh, kind, recipe, converted_first=not skipped, hidden=hidden, width=width
            )
            assert float8lab.conversion_report(model).converted
            assert_equals_one_rank(
                ranks, model, single, kind, *shapes[skipped:][: 1 if skipped else None]
            )
    model = Block(RECIPES[0], 5).to(ranks.device)
    for name, style in (("up", Float8ColwiseParallel()), ("down", Float8RowwiseParallel())):
        parallelize_module(model, mesh, {name: style})
    with pytest.raises(ValueError, match=r"inp must .*in_features"):  # on all ranks
        model.down(model.up(torch.ones(2, WIDTH, device=ranks.device)))


def check_layers_whose_features_cut_blocks_stay_in_high_precision(ranks: Ranks) -> None:
    """A warning or the report says so, and a strict conversion raises."""
    mesh, recipe, hidden = ranks.mesh(), MXFP8BlockScaling(), 32 * ranks.world + 1
    high_precision = Block(None, hidden, 32 * ranks.world).to(ranks.device)
    step, reason = 32 * ranks.world, "features on {} tensor-parallel ranks cut blocks of 32"
    reason = (
        reason.format(ranks.world) + f"; sizes that fit are multiples of {step}, such as {step} or "
    )
    for converts_first in (True, False):
        model = parallelized(
            mesh, "float8", recipe, converted_first=converts_first, hidden=hidden, width=step
        )
        x, local_x = inputs(mesh, "float8", 2, 8, width=step)
        with contextlib.ExitStack() as stack:
            if converts_first:
                warned = stack.enter_context(pytest.warns(UserWarning, match=reason))
            with observing(Operands()) as recorded:
                got = run(model, local_x)
        assert not converts_first or len(warned) == 3  # up, gate and down
        assert {name for name, _, _ in recorded.seen} == {"q", "k", "out"}
        assert {n for n, layer in model.named_children() if layer.weight.dtype != x.dtype} == set()
        report = float8lab.conversion_report(model)
        assert len(report.converted) == (6 if converts_first else 3)
        assert converts_first or all(reason in layer.note for layer in report.skipped)
        for actual, reference in zip(got, run(high_precision, x), strict=True):
            assert actual.shape == reference.shape
    model = parallelize_module(copy.deepcopy(high_precision), mesh, plan_of("float8"))
    with pytest.raises(ValueError, match=reason):
        float8lab.convert_to_float8(model, recipe, strict=True)


def check_float8_plan_gathers_fp8_bytes(ranks: Ranks) -> None:
    moved = {}
    for kind in ("sequence", "float8"):
        model = parallelized(ranks.mesh(), kind, RECIPES[0])
        x, local_x = inputs(ranks.mesh(), kind, 1, 64)
        with Collectives() as collectives:
            y = model(local_x.requires_grad_() * 1)
        gathers = collectives.of("all_gather")
        assert {dtype for dtype, _ in gathers} == {torch.uint8 if kind == "float8" else x.dtype}
        moved[kind] = sum(size for _, size in gathers)
        with Collectives() as collectives:
            y.sum().backward()
    assert 2 * moved["float8"] == moved["sequence"]  # two layers share each gather
    # Backward gathers the inputs of two pairs and the gradients of two layers.
    assert [dtype for dtype, _ in collectives.of("all_gather")] == [torch.uint8] * 4


def check_compiled_layers_equal_one_rank(ranks: Ranks) -> None:
    assert_compiled_equals_one_rank(ranks, "tensor", RECIPES[1])


@slow_check  # slow: test_tensor_parallel.py compiles the same collectives in modules
def check_compiled_float8_styles_equal_one_rank(ranks: Ranks) -> None:
    assert_compiled_equals_one_rank(ranks, "float8", RECIPES[0])


def assert_compiled_equals_one_rank(ranks: Ranks, kind: str, recipe: Recipe) -> None:
    model = parallelized(ranks.mesh(), kind, recipe, hidden=150)
    single = Block(recipe, 150).to(ranks.device)
    # Only two layers, since compiling takes long.
    pair, single_pair = (nn.Sequential(block.up, block.down) for block in (model, single))
    compiled = torch.compile(pair, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x, local_x = inputs(ranks.mesh(), kind, 2, 8)
        for actual, reference in zip(run(compiled, local_x), run(single_pair, x), strict=True):
            assert torch.equal(actual, reference)
    torch.compiler.reset()


@on_ranks(4)
def check_fsdp_on_a_mesh_of_two_dimensions_equals_one_rank(ranks: Ranks) -> None:
    mesh = ranks.mesh(2, ranks.world // 2, names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    for recipe in RECIPES[:1]:
        for kind, converted_first in (("tensor", True), ("float8", True), ("float8", False)):
            single = Block(recipe).to(ranks.device)
            model = parallelized(tp, kind, recipe, converted_first=converted_first)
            fully_shard(model, mesh=dp)
            batches = [inputs(tp, kind, 2, 8 + 2 * i) for i in range(dp.size())]
            _, local_x = batches[dp.get_local_rank()]
            for _ in range(2):
                expected = [run(single, x) for x, _ in batches]
                with Collectives() as collectives:
                    got = run(model, local_x)
                for actual, reference in zip(got[:2], expected[dp.get_local_rank()], strict=False):
                    assert torch.equal(actual, reference)
                for actual, *references in zip(got[2:], *(e[2:] for e in expected), strict=True):
                    assert torch.equal(actual, sum(references) / len(references))
                assert {dtype for dtype, _ in collectives.of("allgather")} == {torch.uint8}
                with torch.no_grad():
                    for parameter in (*single.parameters(), *model.parameters()):
                        parameter.mul_(2)  # changes the scales of the next gather


def check_stored_weights_equal_those_of_one_rank(ranks: Ranks) -> None:
    for recipe in (RECIPES[0], RECIPES[2], RECIPES[4]):
        block = Block(None, 129).to(ranks.device)
        single = float8lab.convert_to_float8(block, recipe, freeze_weights=True)
        model = copy.deepcopy(single)
        if isinstance(recipe, MXFP8BlockScaling):
            message = f"weight must give each of {ranks.world} ranks whole blocks of 32"
            with pytest.raises(ValueError, match=message):
                parallelize_module(model, ranks.mesh(), plan_of("float8"))
            return
        parallelize_module(model, ranks.mesh(), plan_of("float8"))
        assert_equals_one_rank(ranks, model, single, "float8", (2, 16))


@on_ranks(4)
def check_training_of_stored_weights_equals_one_rank(ranks: Ranks) -> None:
    """Masters start as the kept initial values; a step writes the bytes that one rank writes."""

    def train(model: nn.Module, recipe: Recipe, x: Any) -> list[Any]:
        optimizer = float8lab.optim.MasterWeights(model.parameters(), torch.optim.SGD, lr=0.5)
        masters = [optimizer.masters[layer.weight] for layer in model]
        before = [unshard(master.detach()).clone() for master in masters]
        with float8lab.autocast(recipe=recipe):
            results = run(model, x)
        optimizer.step()
        weights = [unshard(layer.weight.detach()).dequantize() for layer in model]
        return [*before, *results, *map(unshard, masters), *weights]

    for recipe in RECIPES:
        blocks = isinstance(recipe, (Float8BlockScaling, MXFP8BlockScaling))
        width, hidden = (128, 128 * ranks.world) if blocks else (WIDTH, 129)
        generator = torch.Generator().manual_seed(1)
        options: Any = {
            "init_method": lambda w, g=generator: w.copy_(integers(w.shape, g)),
            "device": ranks.device,
        }
        with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            up, down = (
                float8lab.Linear(width, hidden, **options),
                float8lab.Linear(hidden, width, **options),
            )
        single = nn.Sequential(up, down)
        x = integers((1, 8, width), generator).to(ranks.device)
        for shape in ((1, ranks.world), (2, ranks.world // 2)):
            mesh, model = ranks.mesh(*shape, names=("dp", "tp")), copy.deepcopy(single)
            row = Float8RowwiseParallel(output_layouts=TOKENS_AS_SHARDS, use_local_output=False)
            plan = {"0": Float8ColwiseParallel(use_local_output=False), "1": row}
            parallelize_module(model, mesh["tp"], plan)
            if shape[0] > 1:
                fully_shard(model, mesh=mesh["dp"])
            sharded_results = train(
                model, recipe, distribute_tensor(x, mesh["tp"], [TOKENS_AS_SHARDS])
            )
            for actual, reference in zip(
                sharded_results, train(copy.deepcopy(single), recipe, x), strict=True
            ):
                assert torch.equal(actual, reference)


@on_ranks(4)
def check_checkpoints_load_on_other_meshes(ranks: Ranks) -> None:
    """The weights are in high precision or stored in FP8."""

    def build(shape: tuple[int, int], seed: int, recipe: Recipe, stored: bool) -> Block:
        mesh = ranks.mesh(*shape, names=("dp", "tp"))
        model = Block(None, hidden).to(ranks.device)
        for parameter in model.parameters():
            parameter.data.add_(seed)
        float8lab.convert_to_float8(model, recipe, freeze_weights=stored)
        parallelize_module(model, mesh["tp"], plan_of("float8"))
        return fully_shard(model, mesh=mesh["dp"])

    def content(model: nn.Module) -> Any:
        return {name: unshard(value) for name, value in ModelState(model).state_dict().items()}

    half = ranks.world // 2
    for i, (recipe, stored, hidden) in enumerate(
        ((RECIPES[1], False, HIDDEN), (RECIPES[0], True, HIDDEN), (RECIPES[2], True, 129))
    ):
        block = Block(None, hidden).to(ranks.device)
        single = float8lab.convert_to_float8(block, recipe, freeze_weights=stored)
        expected, path = content(single), ranks.tmp_path / str(i)
        model = build((half, 2), 0, recipe, stored)
        x, local_x = inputs(ranks.mesh(half, 2, names=("dp", "tp"))["tp"], "float8", 2, 8)
        run(single, x * 3)  # sets delayed scales
        run(model, local_x * 3)
        dcp.save({"model": ModelState(model), "scaling": ScalingState(model)}, checkpoint_id=path)
        shapes, on_cpu = ((ranks.world, 1), (1, ranks.world), (2, half)), ranks.device.type == "cpu"
        for shape in shapes[i : i + 1] if on_cpu else shapes[i:]:
            model = build(shape, 1, recipe, stored)
            state = {"model": ModelState(model), "scaling": ScalingState(model)}
            dcp.load(state, checkpoint_id=path)
            loaded = content(model)
            assert loaded.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(loaded[name], value), (recipe, stored, shape, name)
            if on_cpu or shape == shapes[-1]:  # a GPU rounds the sums of other shards differently
                tp = ranks.mesh(*shape, names=("dp", "tp"))["tp"]
                x, local_x = inputs(tp, "float8", 2, 8)
                assert torch.equal(unshard(model(local_x)), single(x))


@on_ranks(4)
def check_files_of_ranks_load_on_other_numbers_of_ranks(ranks: Ranks) -> None:
    """Training goes on bit for bit from what each rank saved by torch.save.

    On a CPU it equals training on one rank. Hopper sums FP8 products in 14 bits, so ranks with
    shards of a sum round differently: there it equals uninterrupted training on as many ranks.
    """
    meshes = {
        size: [
            DeviceMesh(ranks.device.type, list(range(i, i + size)))
            for i in range(0, ranks.world, size)
        ]
        for size in (1, 2, ranks.world)
    }

    def build(mesh: Any, recipe: Recipe, stored: bool, hidden: int, seed: int = 0) -> Any:
        model = Block(None, hidden).to(ranks.device)
        for parameter in model.parameters():
            parameter.data.add_(seed)
        float8lab.convert_to_float8(model, recipe, freeze_weights=stored)
        return model if mesh is None else parallelize_module(model, mesh, plan_of("tensor"))

    def train(model: nn.Module, steps: range) -> list[Tensor]:
        for step in steps:
            x = integers((2, 8, WIDTH), torch.Generator().manual_seed(step)) * (step + 1)
            results = run(model, x.to(ranks.device))
            with torch.no_grad():
                for parameter in (p for p in model.parameters() if p.requires_grad):
                    parameter.sub_(parameter.grad.sign() * 0.25)
        return [*results, *(unshard(p.detach()) for p in model.parameters())]

    all_changes = ((ranks.world, 2), (2, ranks.world), (ranks.world, 1))
    on_cpu = ranks.device.type == "cpu"  # there each recipe has one change of the number of ranks
    for i, (recipe, stored, hidden) in enumerate(
        ((RECIPES[1], False, 150), (RECIPES[0], True, HIDDEN), (RECIPES[2], True, 129))
    ):
        single = build(None, recipe, stored, hidden)
        expected = dict.fromkeys(meshes, train(single, range(3)))
        changes = all_changes[i : i + 1] if on_cpu else all_changes[: 3 - i]
        for size in [changes[0][0]] if on_cpu else [*meshes][1:]:
            model = build(meshes[size][ranks.rank // size], recipe, stored, hidden)
            train(model, range(2))
            state = {"model": model.state_dict(), "scaling": ScalingState(model).state_dict()}
            if ranks.rank < size:
                torch.save(state, ranks.tmp_path / f"{i}-{size}-{ranks.rank}.pt")
            if ranks.device.type == "cuda":
                expected[size] = train(model, range(2, 3))
        dist.barrier()
        for size, target in changes:
            names = [ranks.tmp_path / f"{i}-{size}-{rank}.pt" for rank in range(size)]
            rank_files = [torch.load(name, map_location=ranks.device) for name in names]
            model = build(meshes[target][ranks.rank // target], recipe, stored, hidden, seed=1)
            states = [rank_file["model"] for rank_file in rank_files]
            model.load_state_dict(shard_state_dict(model, states))
            single = build(None, recipe, stored, hidden)
            values, expected_state = whole_state_dict(model), shard_state_dict(single, states)
            for name, value in expected_state.items():
                for field in ("qdata", "scale", "amax") if hasattr(value, "spec") else ("data",):
                    actual, reference = (getattr(x, field).float() for x in (value, values[name]))
                    assert torch.equal(actual, reference), (recipe, size, target, name, field)
            ScalingState(model).load_state_dict(rank_files[0]["scaling"])
            results = train(model, range(2, 3))
            if ranks.device.type == "cuda" and size != target:
                continue
            for actual, reference in zip(results, expected[target], strict=True):
                dequantized = [
                    t.dequantize() if hasattr(t, "spec") else t for t in (actual, reference)
                ]
                assert torch.equal(*dequantized), (recipe, stored, size, target)
        with pytest.raises(ValueError, match=r"must be those of all [24] ranks in a list; got 1"):
            shard_state_dict(model, states[:1])


def check_loss_over_a_sharded_vocabulary_equals_one_rank(ranks: Ranks) -> None:
    linear = nn.Sequential(nn.Linear(WIDTH, 96, device=ranks.device))
    single = float8lab.convert_to_float8(linear, RECIPES[0])
    model = copy.deepcopy(single)
    style = Float8ColwiseParallel(use_local_output=False)
    parallelize_module(model, ranks.mesh(), {"0": style})
    x, local_x = inputs(ranks.mesh(), "float8", 2, 8)
    target = torch.randint(96, (16,), device=ranks.device)
    expected = nn.functional.cross_entropy(single(x).flatten(0, 1), target)
    expected.backward()
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(local_x).flatten(0, 1), target)
        loss.backward()
    torch.testing.assert_close(unshard(loss), expected)
    for actual, reference in zip(model.parameters(), single.parameters(), strict=True):
        # The gradient is cast, and another order of sums may fall on the other side of a tie.
        error = (unshard(actual.grad) - reference.grad).abs().max()
        assert error <= torch.finfo(torch.float8_e5m2).eps * reference.grad.abs().max()


class NormedBlock(nn.Sequential):
    """A norm before a block, which has the residual connections."""

    def __init__(self, recipe: Recipe, width: int) -> None:
        super().__init__(nn.RMSNorm(width, eps=1e-5), Block(recipe, width=width))
        nn.init.normal_(self[0].weight)
        float8lab.nn.convert_norms(self)


def check_norms_and_prepared_inputs_equal_one_rank(ranks: Ranks) -> None:
    # Hopper multiplies these blocks in float32, where the sums of a few products are exact.
    width = 32 * ranks.world  # whole blocks on each rank
    single = NormedBlock(MXFP8BlockScaling(), width).to(ranks.device)
    model, mesh = copy.deepcopy(single), ranks.mesh()
    inner = {f"1.{name}": style for name, style in plan_of("float8").items()}
    prepared = PrepareFloat8ModuleInput(
        input_layouts=(TOKENS_AS_SHARDS,), desired_input_layouts=(Replicate(),)
    )
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": prepared, **inner})
    x = torch.randn(2, 8, width).to(ranks.device)
    local_x = local_shard(x, 1, ranks).clone().requires_grad_()
    x.requires_grad_()
    expected, got = single(x), model(local_x)
    assert tuple(got.placements) == (TOKENS_AS_SHARDS,)
    assert torch.equal(got.full_tensor(), expected)
    expected.sum().backward()
    got.sum().backward()
    tokens = x.shape[0] * x.shape[1]  # the gradient of a norm is summed over them
    assert_equal_up_to_sum_order(local_x.grad, local_shard(x.grad, 1, ranks), ranks, tokens, "x")
    for (name, actual), reference in zip(
        model.named_parameters(), single.parameters(), strict=True
    ):
        assert_equal_up_to_sum_order(unshard(actual.grad), reference.grad, ranks, tokens, name)
    local = PrepareFloat8ModuleInput(
        input_layouts=TOKENS_AS_SHARDS, desired_input_layouts=Replicate(), use_local_output=True
    )
    echo = parallelize_module(nn.Sequential(nn.Identity()), mesh, {"0": local})
    assert torch.equal(echo(local_shard(x.detach(), 1, ranks)), x)


def check_fused_module_of_dtensors_equals_one_rank(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(0)
    single = float8lab.LayerNormMLP(WIDTH, 150, device=ranks.device)
    for weight in (single.fc1_weight, single.fc2_weight):
        weight.data.copy_(integers(weight.shape, generator))

    def place(_: str, module: nn.Module, mesh: Any) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            dim = 1 if name == "fc2_weight" else 0
            placement = Shard(dim) if name.startswith("fc") and name != "fc2_bias" else Replicate()
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [placement])))

    model = distribute_module(copy.deepcopy(single), ranks.mesh(), place)
    x = torch.randn(8, WIDTH, generator=generator).to(ranks.device)
    with float8lab.autocast(recipe=MXFP8BlockScaling()):
        for actual, reference in zip(run(model, x), run(single, x), strict=True):
            assert_equal_up_to_sum_order(actual, reference, ranks, len(x), "a result")


test_on_ranks = each_check(__name__, 2, 4)
