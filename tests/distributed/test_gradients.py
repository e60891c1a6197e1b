"""FP8 reduce-scatter of gradients under FSDP2, against the same arithmetic in plain PyTorch."""

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import float8lab
from examples import gpt
from float8lab.distributed import fp8_reduce_scatter
from tests.distributed.ranks import Collectives, Ranks, each_check, on_ranks, slow_check
from tests.distributed.test_fsdp import batch, make_model, shard, train_step

CONFIG = gpt.GPTConfig(context=32, n_layer=2, n_head=2, dim=64)


class Recorder:
    """Calls a reduce-scatter, and keeps the input and output of each call."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.allocate = comm, comm.allocate
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.group: Any = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        self.inputs.append(input_tensor.clone())
        self.comm(output_tensor, input_tensor, group, op, async_op)
        self.outputs.append(output_tensor.clone())
        self.group = group


def record_reduce_scatters(model: nn.Module) -> list[Recorder]:
    """Put a recorder before each reduce-scatter of a model; return the recorders."""
    recorders = []
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            recorders.append(Recorder(group._reduce_scatter_comm))
            module.set_custom_reduce_scatter(recorders[-1])
    return recorders


def cast(x: Tensor) -> Tensor:
    """Return ``[R, K]`` as e4m3 rounds it, in blocks of 128 from the start of each row."""
    K = x.shape[1]
    blocks = F.pad(x.float(), (0, -K % 128)).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(-1, keepdim=True)
    encode = torch.where(amax > 0, torch.full_like(amax, 448.0) / amax, 1.0)
    return ((blocks * encode).to(torch.float8_e4m3fn).float() * (1 / encode)).flatten(1)[:, :K]


def expected_reduction(sent: list[Tensor], local: Tensor, rank: int, factor: float) -> Tensor:
    """Return what a rank gets: the sum in the order of ranks, without a cast of its own gradients.

    ``sent``: the gradients that each rank casts, ``[R, K]``; ``local``: this rank's gradients.
    """
    total = torch.zeros_like(local[rank], dtype=torch.float32)
    for source, chunks in enumerate(sent):
        total = total + (local[rank].float() if source == rank else cast(chunks)[rank])
    return (total * factor).to(local.dtype)


def assert_arithmetic(recorder: Recorder, factor: float, *, feedback: bool = False) -> None:
    """Assert that every recorded output has the bits of ``expected_reduction``."""
    rank, size = dist.get_rank(recorder.group), dist.get_world_size(recorder.group)
    residual: Any = 0.0
    for input_tensor, output in zip(recorder.inputs, recorder.outputs, strict=True):
        local = input_tensor.view(size, -1)
        sent = local.float() + residual if feedback else local
        values: list[Any] = [None] * size
        dist.all_gather_object(values, sent, group=recorder.group)
        expected = expected_reduction([x.to(local.device) for x in values], local, rank, factor)
        assert torch.equal(output, expected), (output, expected)
        residual = (sent - cast(sent)).bfloat16()


def gpt_loss(model: nn.Module, seed: int) -> Tensor:
    """The loss on sequences in which a token mostly follows from the token before."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(8, CONFIG.context + 1, dtype=torch.int64)
    x[:, 0] = torch.randint(0, 64, (8,), generator=generator)
    surprise = torch.rand(8, CONFIG.context, generator=generator) < 0.1
    for t in range(CONFIG.context):
        random_token = torch.randint(0, 64, (8,), generator=generator)
        x[:, t + 1] = torch.where(surprise[:, t], random_token, (5 * x[:, t] + 7) % 64)
    x = x.to(next(model.parameters()).device)
    return F.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())


def sharded_gpt(ranks: Ranks, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = gpt.GPT(CONFIG).to(ranks.device)
    for block in model.blocks:
        fully_shard(block, mesh=ranks.mesh())
    return fully_shard(model, mesh=ranks.mesh())


def gradient(model: nn.Module) -> Tensor:
    """This rank's gradients, flat."""
    return torch.cat([p.grad.to_local().flatten().float() for p in model.parameters()])


def norm(ranks: Ranks, x: Tensor) -> float:
    """The norm of a tensor whose shards are on all ranks."""
    square = x.double().square().sum()
    dist.all_reduce(square)
    return square.sqrt().item()


def check_reduce_scatter_has_the_arithmetic_of_plain_pytorch(ranks: Ranks) -> None:
    """The cases are chunks that end inside a block, all dtypes and all ways to average."""
    bf16, f32 = torch.bfloat16, torch.float32
    policies = [
        (MixedPrecisionPolicy(), 1 / ranks.world),
        (MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=f32), 1 / ranks.world),
        (MixedPrecisionPolicy(param_dtype=bf16), 1 / ranks.world),
        (MixedPrecisionPolicy(reduce_dtype=torch.float16), 1.0),
        (MixedPrecisionPolicy(), 0.25),
    ]
    for (policy, factor), feedback in itertools.product(policies, (False, True)):
        model = shard(make_model(ranks.device), mesh=ranks.mesh(), mp_policy=policy)
        if factor == 0.25:
            for module in model:
                module.set_gradient_divide_factor(4.0)
        fp8_reduce_scatter(model, error_feedback=feedback)
        recorders = record_reduce_scatters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Collectives() as collectives:
            for step in range(3):
                train_step(model, batch(ranks, step)[1], optimizer)
        if ranks.world == 1:
            continue  # nothing is sent
        for recorder in recorders:
            assert_arithmetic(recorder, factor, feedback=feedback)
        assert collectives.of("reduce_scatter") == []
        sent = collectives.of("all_to_all")
        assert {dtype for dtype, _ in sent} == {torch.uint8}
        gradients = sum(x.numel() for recorder in recorders for x in recorder.inputs)
        padding = sum(ranks.world * 132 * len(recorder.inputs) for recorder in recorders)
        assert sum(size for _, size in sent) <= gradients * (1 + 4 / 128) + padding


@on_ranks(4)
def check_hybrid_sharding_sends_fp8_among_shards_only(ranks: Ranks) -> None:
    if ranks.world < 4:
        return
    mesh = ranks.mesh(2, ranks.world // 2, names=("copies", "shards"))
    converted = float8lab.convert_to_float8(make_model(ranks.device))
    model, plain = (shard(copy.deepcopy(converted), mesh=mesh) for _ in range(2))
    fp8_reduce_scatter(model, error_feedback=True)
    recorders = record_reduce_scatters(model)
    for step in range(2):
        for sharded_model in (model, plain):
            sharded_model(batch(ranks, step)[1]).square().mean().backward()
    for recorder in recorders:
        assert dist.get_world_size(recorder.group) == ranks.world // 2
        assert_arithmetic(recorder, 2 / ranks.world, feedback=True)
    # FSDP2 itself runs the all-reduce over copies.
    ranks.assert_same(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    assert norm(ranks, gradient(model) - gradient(plain)) < 0.04 * norm(ranks, gradient(plain))


@on_ranks(4)
def check_gradient_accumulation_sends_the_sum_or_each_gradient(ranks: Ranks) -> None:
    """FSDP2 sends the sum once if it adds up first, else each gradient, with error feedback."""
    results = []
    for syncs in (False, True):
        torch.manual_seed(0)
        model = shard(make_model(ranks.device), mesh=ranks.mesh())
        fp8_reduce_scatter(model, error_feedback=True)
        recorders = record_reduce_scatters(model)
        for step in range(4):
            model.set_requires_gradient_sync(syncs or step == 3)
            model(batch(ranks, step)[1]).square().mean().backward()
        for recorder in recorders if ranks.world > 1 else []:
            assert len(recorder.inputs) == (4 if syncs else 1)
            assert_arithmetic(recorder, 1 / ranks.world, feedback=True)
        results.append(gradient(model))
    assert norm(ranks, results[0] - results[1]) < 0.05 * norm(ranks, results[0])


def check_feedback_leaves_the_error_of_one_step(ranks: Ranks) -> None:
    """The gradient of every step is the same; without feedback every step adds the same error."""
    if ranks.world == 1:
        return  # nothing is cast
    steps, sums = 32, {}
    for kind in ("plain", "fp8", "feedback"):
        torch.manual_seed(0)
        model = shard(make_model(ranks.device), mesh=ranks.mesh())
        if kind != "plain":
            fp8_reduce_scatter(model, error_feedback=kind == "feedback")
        for _ in range(steps):  # the gradients of all steps add up
            (model(batch(ranks, 0)[1]) - 1).square().mean().backward()
        sums[kind] = gradient(model) / steps
    size = norm(ranks, sums["plain"])
    errors = {kind: norm(ranks, sums[kind] - sums["plain"]) / size for kind in ("fp8", "feedback")}
    assert errors["feedback"] < 4 * errors["fp8"] / steps, errors


def check_residuals_of_parameters_without_gradients_stay(ranks: Ranks) -> None:
    """Of two layers of one size, neither gets the other's error, even if the other is frozen."""

    class ChosenLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, device=ranks.device) for _ in range(2))
            self.chosen = (0, 1)

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.layers[i](x) for i in self.chosen)

    if ranks.world == 1:
        return
    model = ChosenLayers()
    fully_shard(model, mesh=ranks.mesh())
    reducer = fp8_reduce_scatter(model, error_feedback=True)
    (recorder,) = record_reduce_scatters(model)
    factor = 1 / ranks.world

    def step(*chosen: int) -> None:
        model.chosen, recorder.inputs, recorder.outputs = chosen, [], []
        model(batch(ranks, 0)[1]).square().mean().backward()

    step(0, 1)
    (residual,) = reducer.state_dict().values()
    before = residual.clone()
    assert before.any()
    for i in (0, 1, 0):
        step(i)
        assert_arithmetic(recorder, factor)
    assert torch.equal(residual, before)
    for i in (0, 1):
        model.layers[i].requires_grad_(False)
        model.layers[1 - i].requires_grad_(True)
        step(0, 1)
        assert_arithmetic(recorder, factor, feedback=True)
    (residual,) = reducer.state_dict().values()
    assert residual.numel() == before.numel() // 2


def check_nonfinite_gradients_arrive(ranks: Ranks) -> None:
    """A nonfinite gradient arrives at the rank that owns it; the next step has no trace of it."""
    for value, feedback in itertools.product((torch.inf, -torch.inf, torch.nan), (False, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40, bias=False, device=ranks.device))
        fully_shard(model, mesh=ranks.mesh())
        reducer = fp8_reduce_scatter(model, error_feedback=feedback)
        x = batch(ranks, 0, width=40)[1]
        x[0, 7] = value if ranks.rank == 0 else 1.0
        model(x)[0, :].sum().backward()
        is_nonfinite = ~model[0].weight.grad.full_tensor().isfinite()
        assert is_nonfinite[:, 7].all()
        total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        assert not total_norm.isfinite()
        model.zero_grad()
        if ranks.rank == 0:
            assert not any(residual.any() for residual in reducer.state_dict().values())
        model(batch(ranks, 1, width=40)[1]).square().sum().backward()
        assert model[0].weight.grad.to_local().isfinite().all()


def check_gradient_norm_of_a_gpt_differs_by_at_most_0_1_percent(ranks: Ranks) -> None:
    """The bound holds at the start of training and later."""
    models = [sharded_gpt(ranks) for _ in range(2)]
    fp8_reduce_scatter(models[1])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    for step in range(12):
        models[1].load_state_dict(models[0].state_dict())
        for model in models:
            gpt_loss(model, ranks.world * step + ranks.rank).backward()
        exact_norm, fp8_norm = (norm(ranks, gradient(model)) for model in models)
        assert abs(fp8_norm / exact_norm - 1) <= 1e-3, (step, fp8_norm / exact_norm - 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def losses(ranks: Ranks, seed: int, steps: int, **options: Any) -> Tensor:
    """Losses over all ranks of a GPT in training; ``sends`` says whether gradients are in FP8."""
    model = sharded_gpt(ranks, seed)
    if options.pop("sends"):
        fp8_reduce_scatter(model, **options)
    optimizer, values = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        loss = gpt_loss(model, 10_000 * seed + ranks.world * step + ranks.rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
    mean = torch.stack(values)
    dist.all_reduce(mean)
    return mean / ranks.world


@slow_check
def check_losses_of_a_gpt_differ_less_than_those_of_seeds(ranks: Ranks) -> None:
    """The mean gap to float32 over three seeds is below the deviation between seeds."""
    if ranks.world != 2:
        return
    kinds = {
        "plain": {"sends": False},
        "fp8": {"sends": True},
        "feedback": {"sends": True, "error_feedback": True},
    }
    final_losses = {
        kind: torch.stack([losses(ranks, seed, 100, **options)[-20:].mean() for seed in range(3)])
        for kind, options in kinds.items()
    }
    deviation = final_losses["plain"].std()
    for kind in ("fp8", "feedback"):
        gaps = final_losses[kind] - final_losses["plain"]
        assert gaps.mean().abs() < deviation, (final_losses, gaps)


def check_training_resumes_bit_for_bit(ranks: Ranks) -> None:
    """The state is saved through DCP and by hand; each rank has residuals of its own."""

    def make(seed: int) -> tuple[nn.Module, Any, Any]:
        model = sharded_gpt(ranks, seed)
        reducer = fp8_reduce_scatter(model, error_feedback=True)
        return model, reducer, torch.optim.SGD(model.parameters(), lr=0.1)

    def continue_training(model: nn.Module, optimizer: Any, steps: range) -> Tensor:
        for step in steps:
            gpt_loss(model, ranks.world * step + ranks.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.to_local().detach().flatten() for p in model.parameters()])

    path: list[Any] = [str(ranks.tmp_path / "saved")]
    dist.broadcast_object_list(path)
    model, reducer, optimizer = make(0)
    continue_training(model, optimizer, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warnings, about its formats
        dcp.save({"model": model.state_dict(), "reducer": reducer}, checkpoint_id=path[0])
        saved = copy.deepcopy(reducer.state_dict())
        parameters = {"": continue_training(model, optimizer, range(3, 6))}
        for kind in ("DCP", "by hand", "lost"):
            second, reducer, optimizer = make(1)
            state = {"model": second.state_dict()} | ({"reducer": reducer} if kind == "DCP" else {})
            dcp.load(state, checkpoint_id=path[0])
            second.load_state_dict(state["model"])
            if kind == "by hand":
                reducer.load_state_dict(saved)
            parameters[kind] = continue_training(second, optimizer, range(3, 6))
    assert torch.equal(parameters[""], parameters["DCP"])
    assert torch.equal(parameters[""], parameters["by hand"])
    assert ranks.world == 1 or not torch.equal(parameters[""], parameters["lost"])
    if ranks.world > 1:
        for wrong in ({}, {k: v[:, 1:] for k, v in reducer.state_dict().items()}):
            with pytest.raises(ValueError, match="state must have the names and shapes"):
                reducer.load_state_dict(wrong)


def check_remove_restores_the_reduce_scatter_of_fsdp(ranks: Ranks) -> None:
    model = shard(make_model(ranks.device), mesh=ranks.mesh())
    reducer = float8lab.distributed.fp8_reduce_scatter(model)
    assert reducer.state_dict() == {}
    reducer.remove()
    with Collectives() as collectives:
        model(batch(ranks, 0)[1]).sum().backward()
    assert collectives.of("all_to_all") == []
    assert ranks.world == 1 or len(collectives.of("reduce_scatter")) == len(model)


def check_modules_sharded_together_have_one_residual(ranks: Ranks) -> None:
    """Modules sharded together are one parameter group, and a parameter group has one residual."""
    model = make_model(ranks.device)
    fully_shard([model[0], model[1]], mesh=ranks.mesh())
    fully_shard(model, mesh=ranks.mesh())
    reducer = fp8_reduce_scatter(model, error_feedback=True)
    model(batch(ranks, 0)[1]).sum().backward()
    residuals = reducer.state_dict()
    assert len(residuals) == (2 if ranks.world > 1 else 0)
    assert all(residual.any() for residual in residuals.values())


def check_float64_gradients_raise(ranks: Ranks) -> None:
    if ranks.world == 1:
        return
    model = fully_shard(nn.Linear(8, 8, device=ranks.device).double(), mesh=ranks.mesh())
    fp8_reduce_scatter(model)
    loss = model(torch.ones(2, 8, dtype=torch.float64, device=ranks.device)).sum()
    with pytest.raises(NotImplementedError, match="reduce_dtype must be float32"):
        loss.backward()


def test_model_that_is_not_sharded_raises():
    with pytest.raises(ValueError, match="model must be sharded; got a module of Linear"):
        fp8_reduce_scatter(nn.Linear(2, 2))


test_on_ranks = each_check(__name__, 1, 2, 4)
