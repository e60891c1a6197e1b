"""CPU offload: results are bitwise those without it; which tensors move, which stay, and when.

On a CPU a move is a copy on streams that do nothing. The fixture ``moves_on_cpu`` turns moves on,
for storages of every size, so that the bookkeeping is tested without a GPU.
"""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab.distributed import offload
from tests.nn import models

RECIPES = {"plain": None, **models.RECIPES}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


@pytest.fixture
def moves_on_cpu(monkeypatch):
    monkeypatch.setattr(offload, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(offload, "SMALL", 1)


class Layer(nn.Module):
    """A small transformer layer: norm, two linears, a residual, views and an in-place op."""

    def __init__(self, width=32, device="cpu"):
        super().__init__()
        self.norm = nn.LayerNorm(width, device=device)
        self.up = float8lab.Linear(width, 4 * width, device=device)
        self.down = float8lab.Linear(2 * width, width, device=device)
        self.head = nn.Linear(width, width, device=device)

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * value)
        return x + torch.relu_(self.head(x))


def make_model(layers=4, width=32, device="cpu"):
    torch.manual_seed(0)
    return nn.ModuleList([Layer(width, device) for _ in range(layers)])


NO_OFFLOAD = (nullcontext(), lambda x=None: x)


def forward(model, x, recipe=None, pair=NO_OFFLOAD, usage="layer"):
    context, synchronize = pair
    with (
        float8lab.autocast(enabled=recipe is not None, recipe=recipe),
        context if usage == "model" else nullcontext(),
    ):
        for layer in model:
            with context if usage == "layer" else nullcontext():
                x = layer(x)
            if usage == "no argument":
                synchronize()
            else:
                x = synchronize(x)
    return x


def batch(seed=0, width=32, device="cpu"):
    return torch.randn(6, width, generator=torch.Generator().manual_seed(seed)).to(device)


def train(model, pair, recipe=None, steps=3, usage="layer", width=32, device="cpu"):
    results = []
    for seed in range(steps):
        model.zero_grad()
        x = batch(seed, width, device).requires_grad_()
        forward(model, x, recipe, pair, usage).square().sum().backward()
        results += [x.grad, *(p.grad.clone() for p in model.parameters())]
    return results


def all_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class MoveRecorder:
    """Records the sizes of tensors that are copied out and back."""

    def __init__(self, monkeypatch):
        self.out, self.back = [], []
        store, load = offload._Lanes.store, offload._Lanes.load

        def counted_store(lanes, x):
            self.out.append(x.numel())
            return store(lanes, x)

        def counted_load(lanes, x):
            self.back.append(x.numel())
            return load(lanes, x)

        monkeypatch.setattr(offload._Lanes, "store", counted_store)
        monkeypatch.setattr(offload._Lanes, "load", counted_load)


@pytest.fixture
def moves(moves_on_cpu, monkeypatch):
    return MoveRecorder(monkeypatch)


@each_recipe
@pytest.mark.parametrize("usage", ["layer", "model", "no argument"])
def test_gradients_equal_those_without_offload(recipe, usage, moves):
    model = make_model()
    plain = train(copy.deepcopy(model), NO_OFFLOAD, recipe)
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=4)
    offloaded = train(model, pair, recipe, usage="layer" if usage == "layer" else usage)
    if usage != "no argument":
        assert moves.back
    assert all_equal(plain, offloaded)


@each_recipe
def test_gradients_on_a_cpu_without_moves_are_equal(recipe):
    model = make_model()
    plain = train(copy.deepcopy(model), NO_OFFLOAD, recipe)
    pair = float8lab.get_cpu_offload_context(enabled=True)  # all other defaults
    assert all_equal(plain, train(model, pair, recipe))


def test_disabled_offload_does_nothing():
    context, synchronize = float8lab.get_cpu_offload_context()
    assert isinstance(context, nullcontext)
    x = torch.ones(3)
    assert synchronize(x) is x
    assert synchronize() is None


def test_wrong_arguments_raise():
    get = float8lab.get_cpu_offload_context
    with pytest.raises(ValueError, match="offload_activations or offload_weights must be True"):
        get(enabled=True, offload_activations=False, offload_weights=False)
    with pytest.raises(ValueError, match="num_layers must be an integer of at least 1; got 0"):
        get(enabled=True, num_layers=0)
    with pytest.raises(ValueError, match="model_layers must be at least num_layers 4; got 3"):
        get(enabled=True, num_layers=4, model_layers=3)
    # The order of Transformer Engine 1.10 and later: the third argument is the model's layers.
    with pytest.raises(ValueError, match="model_layers must be at least num_layers 4; got 3"):
        get(True, 4, 3, True, False)
    with pytest.raises(ValueError, match="offload_activations or offload_weights must be True"):
        get(True, 4, 5, False, False, True)
    assert isinstance(get(False, 0, 12, True, True, False)[0], nullcontext)
    with pytest.raises(TypeError, match="double_buffering must be"):
        get(True, 4, 5, True, False, 7)
    with pytest.raises(TypeError, match="positional arguments"):
        get(True, 4, 5, True, False, True, True)
    # The order of earlier versions, without that argument.
    with pytest.raises(ValueError, match="offload_activations or offload_weights must be True"):
        get(True, 4, False, False)
    with pytest.raises(TypeError, match="offload_activations must be"):
        get(True, 4, False, 7)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((True, 4), {}, (4, None, True, True)),
        ((True, 4, 5), {}, (4, 5, True, True)),
        ((True, 4, 5, True), {"offload_weights": False}, (4, 5, True, False)),
        ((True, 4, 5, False, True), {}, (4, 5, False, True)),
        ((True, 4, False), {}, (4, None, False, True)),
        ((True, 4, True, False), {}, (4, None, True, False)),
        ((True, 4, False, True), {}, (4, None, False, True)),
        ((True, 4, True), {"offload_weights": False}, (4, None, True, False)),
    ],
)
def test_arguments_are_taken_in_both_orders(args, kwargs, expected):
    context, _ = float8lab.get_cpu_offload_context(*args, **kwargs)
    activations, weights = context._offloads[False], context._offloads[True]
    assert (context._num_layers, context._model_layers, activations, weights) == expected


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 9])
def test_num_layers_are_released_and_loaded_a_layer_ahead(num_layers, moves):
    model = make_model()
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=num_layers)
    loads_before = []  # loads before each layer's backward, from the last layer on
    for layer in model:
        layer.register_full_backward_pre_hook(lambda *_: loads_before.append(len(moves.back)))
    y = forward(model, batch().requires_grad_(), pair=pair)
    per_layer = len(moves.out) // min(num_layers, 4)
    assert per_layer > 5
    assert moves.back == []
    y.sum().backward()
    released = min(num_layers, 3)  # the last layer is never released, since no layer follows it
    assert len(moves.back) == released * per_layer
    assert loads_before == [max(0, released - layer) * per_layer for layer in (3, 2, 1, 0)]


def test_parameters_and_small_tensors_stay_on_the_device(moves_on_cpu, monkeypatch):
    model = make_model(1)
    kept_tensors = []
    pack = offload._Offload._pack

    def recording_pack(self, x):
        saved = pack(self, x)
        if saved.func is offload._unpack_kept:
            kept_tensors.append(x)
        return saved

    monkeypatch.setattr(offload._Offload, "_pack", recording_pack)
    context, _ = float8lab.get_cpu_offload_context(enabled=True)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with context:
        model[0](batch().requires_grad_())
    assert kept_tensors
    assert all(x.untyped_storage().data_ptr() in storages for x in kept_tensors)
    kept_tensors.clear()
    monkeypatch.setattr(offload, "SMALL", 10**9)
    with context:
        model[0](batch().requires_grad_())
    sizes = {tuple(x.shape) for x in kept_tensors}
    assert (6, 32) in sizes  # an activation


@pytest.mark.parametrize(
    ("activations", "weights"), [(True, True), (True, False), (False, True)], ids=str
)
def test_options_select_activations_and_casts_of_weights(activations, weights, moves):
    layer = float8lab.Linear(64, 128, device="cpu")
    context, _ = float8lab.get_cpu_offload_context(
        enabled=True, offload_activations=activations, offload_weights=weights
    )
    x = torch.randn(32, 64, requires_grad=True)
    weight = 2.0 * layer.weight  # nothing keeps it for backward, so its cast is saved
    with context, float8lab.autocast(recipe=RECIPES["current"]):
        torch.func.functional_call(layer, {"weight": weight}, (x,))
    sizes = {s for s in moves.out if s > 4}  # without scales
    assert sizes == ({32 * 64} if activations else set()) | ({128 * 64} if weights else set())


@pytest.mark.parametrize("kind", ["parameter", "stored", "microbatch", "rowwise"])
def test_weights_that_outlive_the_step_stay(kind, moves):
    with float8lab.fp8_model_init(enabled=kind == "stored"):
        layer = float8lab.Linear(64, 128, device="cpu")
    context, _ = float8lab.get_cpu_offload_context(enabled=True)
    x = torch.randn(32, 64, requires_grad=True)
    first = True if kind == "microbatch" else None
    recipe = RECIPES["rowwise" if kind == "rowwise" else "current"]
    with context, float8lab.autocast(recipe=recipe):
        y = layer(x, is_first_microbatch=first)
        if kind == "microbatch":
            y = y + layer(x, is_first_microbatch=False)
    assert 128 * 64 not in moves.out
    assert 32 * 64 in moves.out  # FP8: a byte for each element of x
    y.sum().backward()
    assert layer.weight.grad is not None


def test_tensors_that_share_a_storage_move_once(moves):
    context, synchronize = float8lab.get_cpu_offload_context(enabled=True, num_layers=9)
    x = torch.randn(8, 16, requires_grad=True)
    with context:
        y = x.exp()  # saves its output
        a, b = y.chunk(2, 1)
        z = (a * b).sum() + (y.t() * y.t()).sum() + y[::2, 1::3].square().sum()
    assert moves.out == [y.untyped_storage().nbytes()]
    for _ in range(3):
        synchronize()
    z.backward()
    assert moves.back == moves.out
    y = x.detach().exp().requires_grad_()
    a, b = y.chunk(2, 1)
    ((a * b).sum() + (y.t() * y.t()).sum() + y[::2, 1::3].square().sum()).backward()
    assert torch.equal(x.grad, y.grad * y)


class Save(torch.autograd.Function):
    """Saves ``x``; backward appends the saved tensor to ``back``."""

    @staticmethod
    def forward(ctx, y, x, back):
        ctx.save_for_backward(x)
        ctx.back = back
        return y * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.back.append(ctx.saved_tensors[0])
        return grad, None, None


def bytes_of(x):
    return x.contiguous().reshape(-1).view(torch.uint8).tolist() if x.numel() else []


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("layout", ["whole", "strided", "odd", "scalar", "empty"])
def test_tensors_of_every_dtype_and_layout_come_back(dtype, layout, moves):
    x = (4 * torch.randn(9, 7)).to(dtype)
    x = {
        "whole": x, "strided": x.t()[1::2, 2:], "odd": x.reshape(-1)[1:4], "scalar": x[2, 3],
        "empty": x[:0],
    }[layout]  # fmt: skip
    context, synchronize = float8lab.get_cpu_offload_context(enabled=True)
    back = []
    with context:
        y = Save.apply(torch.ones(1, requires_grad=True), x, back)
    for _ in range(3):
        synchronize(y)
    y.backward()
    (result,) = back
    assert moves.back == [9 * 7 * dtype.itemsize]
    assert (result.dtype, result.shape, result.stride()) == (dtype, x.shape, x.stride())
    assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert bytes_of(result) == bytes_of(x)


def test_float8_tensors_move_by_their_inner_tensors(moves):
    context, synchronize = float8lab.get_cpu_offload_context(enabled=True)
    x = float8lab.quantize(torch.randn(32, 64), block=(1, 32))
    w = torch.randn(16, 64, requires_grad=True)
    with context, float8lab.fallback("silent"):
        y = x @ w.t()
    assert 32 * 64 in moves.out  # bytes
    for _ in range(2):
        y = synchronize(y)
    with float8lab.fallback("silent"):
        y.sum().backward()
    plain = w.detach().clone().requires_grad_()
    with float8lab.fallback("silent"):
        (x @ plain.t()).sum().backward()
    assert torch.equal(w.grad, plain.grad)


def test_no_grad_evaluation_between_steps_changes_nothing(moves):
    model = make_model()
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=2)
    forward(model, batch().requires_grad_(), pair=pair).sum().backward()
    moved = len(moves.out)
    with torch.no_grad():
        forward(model, batch(), pair=pair)
    assert len(moves.out) == moved
    forward(model, batch().requires_grad_(), pair=pair).sum().backward()
    assert len(moves.out) == 2 * moved


@pytest.mark.parametrize("model_layers", [None, 4])
def test_several_forwards_before_their_backwards_keep_the_gradients(model_layers, moves):
    model = make_model()
    twin = copy.deepcopy(model)
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=model_layers)
    for _ in range(2):
        moves.out.clear()
        xs = [batch(i).requires_grad_() for i in range(3)]
        ys = [forward(model, x, RECIPES["current"], pair) for x in xs]
        moves_of_one_pass = 3 * (len(moves.out) // (9 if model_layers else 3))
        assert len(moves.out) == moves_of_one_pass * (3 if model_layers else 1)
        for y in ys:  # in the order of a pipeline
            y.square().sum().backward()
    plain = [batch(i).requires_grad_() for i in range(3)]
    for _ in range(2):
        for y in [forward(twin, x, RECIPES["current"]) for x in plain]:
            y.square().sum().backward()
    assert all_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("inside", [True, False], ids=["context-inside", "context-outside"])
def test_checkpoint_inside_or_around_the_context_keeps_the_gradients(use_reentrant, inside, moves):
    model = make_model()
    twin = copy.deepcopy(model)
    context, synchronize = float8lab.get_cpu_offload_context(enabled=True, num_layers=4)

    def offloaded_layer(layer, x):
        with context:
            return layer(x)

    def step(model, x, pair):
        with float8lab.autocast(recipe=RECIPES["delayed"]):
            for layer in model:
                if pair is None:
                    x = layer(x)
                elif inside:
                    x = synchronize(
                        float8lab.checkpoint(offloaded_layer, layer, x, use_reentrant=use_reentrant)
                    )
                else:
                    with context:
                        x = float8lab.checkpoint(layer, x, use_reentrant=use_reentrant)
                    x = synchronize(x)
        x.square().sum().backward()

    for seed in range(2):
        x, x2 = batch(seed).requires_grad_(), batch(seed).requires_grad_()
        model.zero_grad()
        twin.zero_grad()
        step(model, x, pair=context)
        step(twin, x2, pair=None)
        assert torch.equal(x.grad, x2.grad)
        assert all_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    if not inside:  # a checkpoint saves the layer's input, and only that moves
        assert set(moves.out) == {6 * 32 * 4}


def test_second_backward_through_a_retained_graph_is_equal(moves):
    model = make_model()
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=4)
    x = batch().requires_grad_()
    y = forward(model, x, pair=pair).sum()
    (first_grad,) = torch.autograd.grad(y, x, retain_graph=True)
    (second_grad,) = torch.autograd.grad(y, x)
    assert torch.equal(first_grad, second_grad)


@pytest.mark.parametrize("changed", ["parameter", "activation"])
@pytest.mark.parametrize("moment", ["before release", "after release"])
def test_in_place_changes_raise_unless_the_tensor_was_copied_before(changed, moment, moves):
    context, synchronize = float8lab.get_cpu_offload_context(enabled=True, num_layers=9)
    w = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(8, 8, requires_grad=True)
    with context:
        h = x * 2
        y = (h @ w).sum()
    if moment == "after release":
        synchronize(), synchronize()
    with torch.no_grad():
        (w if changed == "parameter" else h).add_(1.0)
    if changed == "activation" and moment == "after release":
        y.backward()  # the copy has the value from before the change
        assert torch.equal(w.grad, (2 * x.detach()).t() @ torch.ones(8, 8))
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_storage_that_changes_between_two_uses_moves_twice(moves):
    context, synchronize = float8lab.get_cpu_offload_context(enabled=True, num_layers=9)
    buffer, back = torch.zeros(4), []
    y = torch.ones(1, requires_grad=True)
    with context:
        buffer[:2] = 1
        y = Save.apply(y, buffer[:2], back)
        synchronize(), synchronize()
        buffer[2:] = 2
        y = Save.apply(y, buffer[2:], back)
    synchronize(), synchronize()
    y.backward()
    assert moves.out == [16, 16]
    assert [x.tolist() for x in back] == [[2, 2], [1, 1]]


def test_moved_tensors_do_not_outlive_their_graph(moves_on_cpu):
    model = make_model()
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=4)
    gc.disable()
    try:
        refs = []
        for done in (False, True):
            y = forward(model, batch().requires_grad_(), RECIPES["current"], pair)
            refs += [weakref.ref(m) for m in y.grad_fn and pair[0]._pass.moved.values()]
            if done:
                y.sum().backward()
            del y
        assert len(refs) > 10
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


def test_released_layers_free_their_memory(moves_on_cpu, monkeypatch):
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=4)
    storages = []
    store = offload._Lanes.store

    def watched(lanes, x):
        storages.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
        return store(lanes, x)

    monkeypatch.setattr(offload._Lanes, "store", watched)
    model = make_model()
    alive = []
    x = batch().requires_grad_()
    for layer in model:
        with pair[0]:
            x = layer(x)
        x = pair[1](x)
        alive.append(sum(not s.expired() for s in storages))
    per_layer = len(storages) / 4
    assert alive[0] == pytest.approx(per_layer, abs=2)
    assert all(n < per_layer + 3 for n in alive)  # the tensors of the newest layer, and its input


def test_exception_in_forward_leaves_no_hook(moves):
    model = make_model()
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=4)

    def broken():
        with pair[0]:
            model[0](batch().requires_grad_())
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        broken()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    plain = train(copy.deepcopy(model), NO_OFFLOAD)
    assert all_equal(plain, train(model, pair))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_layers_keep_the_gradients(moves):
    model = make_model(3)
    recipe = RECIPES["current"]
    plain = train(copy.deepcopy(model), NO_OFFLOAD, recipe, steps=2)
    for layer in model:
        layer.compile(fullgraph=True, backend="aot_eager")
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=3)
    assert all_equal(plain, train(model, pair, recipe, steps=2))
    assert moves.back


WIDTH = 2048
TOKENS = 4096


def gpu_step(model, pair, recipe):
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = forward(model, x, recipe, pair)
    allocated = torch.cuda.memory_allocated()
    y.float().square().mean().backward()
    return x.grad, allocated


def big_model(layers=6):
    return make_model(layers, WIDTH, "cuda").bfloat16()


@pytest.mark.gpu
@each_recipe
def test_gradients_on_a_gpu_equal_those_without_offload(recipe):
    model = big_model(4)
    twin = copy.deepcopy(model)
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=3)
    for seed in range(3):
        for m, p in ((model, pair), (twin, NO_OFFLOAD)):
            torch.manual_seed(seed)
            m.zero_grad()
            grad, _ = gpu_step(m, p, recipe)
            m.input_grad = grad
        assert torch.equal(model.input_grad, twin.input_grad)
        assert all_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, RECIPES["current"]], ids=["bf16", "current"])
@pytest.mark.parametrize("num_layers", [3, 6])
def test_peak_memory_falls_by_the_released_layers(recipe, num_layers, monkeypatch):
    moves = MoveRecorder(monkeypatch)
    model = big_model()
    peaks, allocated = {}, {}
    for name, pair in (
        ("plain", NO_OFFLOAD),
        ("offloaded", float8lab.get_cpu_offload_context(enabled=True, num_layers=num_layers)),
    ):
        for _ in range(2):
            model.zero_grad(set_to_none=False)  # gradients are part of both peaks
            moves.out.clear()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            _, allocated[name] = gpu_step(model, pair, recipe)
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated()
    layer = sum(moves.out) / num_layers
    # The last layer is not released in forward; two layers are on the device at the peak.
    released = num_layers - (num_layers == 6)
    assert allocated["plain"] - allocated["offloaded"] == pytest.approx(
        released * layer, abs=0.25 * layer
    )
    assert peaks["plain"] - peaks["offloaded"] >= (released - 1.25) * layer


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # warnings of the profiler itself differ between versions
def test_copies_overlap_with_compute():
    model = big_model()
    pair = float8lab.get_cpu_offload_context(enabled=True, num_layers=5)
    for _ in range(2):
        gpu_step(model, pair, None)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        gpu_step(model, pair, None)
        torch.cuda.synchronize()
    spans = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = [(a, b) for name, a, b in spans if not name.startswith(("Memcpy", "Memset"))]
    copies_by_direction = [
        [(a, b) for name, a, b in spans if direction in name] for direction in ("DtoH", "HtoD")
    ]
    # Microseconds.
    assert all(sum(b - a > 20 for a, b in copies) >= 10 for copies in copies_by_direction)
    # On one stream, a copy would begin only after the kernel before it ends. How much time copies
    # and kernels share depends on what else the GPU does.
    for copies in copies_by_direction:
        overlapping = sum(any(max(a, c) < min(b, d) for c, d in kernels) for a, b in copies)
        assert overlapping >= 2, (overlapping, len(copies))
