"""Mixtures of experts: block-FP8 and 4-bit checkpoints loaded as such, trained, exported."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab import Float4Tensor, recipes
from float8lab.formats import E8M0
from float8lab.inspect import CheckpointError, diff
from float8lab.integrations import export, load_fp8
from float8lab.tensor import Float8Tensor
from float8lab.tensor.float4_tensor import pack
from tests.nn.models import GatedMLP
from tests.same_bytes import assert_same_bytes

EXPERTS, HIDDEN, WIDTH, TOKENS = 2, 256, 128, 16
KINDS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Stacked(nn.Module):
    """Experts as models of Transformers 5 have them, in a loop."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 16)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 12)

    def forward(self, x, chosen):
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mine = chosen == expert
            gate, up = F.linear(x[mine], self.gate_up_proj[expert]).chunk(2, -1)
            y[mine] = F.linear(F.silu(gate) * up, self.down_proj[expert])
        return y


class OneByOne(nn.ModuleList):
    """Experts as linear layers of their own."""

    def __init__(self):
        super().__init__(GatedMLP(HIDDEN, WIDTH) for _ in range(EXPERTS))

    def forward(self, x, chosen):
        y = torch.zeros_like(x)
        for index, expert in enumerate(self):
            y[chosen == index] = expert(x[chosen == index])
        return y


class Layer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts()

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        return x + self.experts(x, chosen) * weight.unsqueeze(-1)


def model(experts=Stacked, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({"mlp": Layer(experts)})


def block_fp8(name, weight):
    q = float8lab.quantize(weight, block=(128, 128))
    return {name: q.qdata, f"{name}_scale_inv": q.scale}


def per_tensor(name, weight):
    """With a static scale of activations, as compressed-tensors has it."""
    q = float8lab.quantize(weight)
    static = {f"{name.removesuffix('weight')}input_scale": torch.tensor([1 / 64])}
    return {name: q.qdata, f"{name}_scale": q.scale.reshape(1), **static}


def nvfp4(name, weight):
    """By ModelOpt's layout; each matrix has a scale of its own."""
    whole = (weight.abs().max() / (6 * 448)).reshape(())
    blocks = weight.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    codes = to_codes(blocks / (scale.float() * whole).clamp(min=1e-9).unsqueeze(-1))
    more = {f"{name}_scale_2": whole, name[:-6] + "input_scale": torch.ones(())}
    return {name: pack(codes.flatten(-2)), f"{name}_scale": scale, **more}


def mxfp4(name, weight):
    """By the layout of DeepSeek-V4."""
    codes, scale = mx_blocks(weight)
    return {name: pack(codes).view(torch.int8), name[:-6] + "scale": scale}


def mx_blocks(weight):
    blocks = weight.detach().unflatten(-1, (-1, 32))
    exponent = blocks.abs().amax(-1).log2().floor() - 2
    codes = to_codes(blocks / exponent.exp2().unsqueeze(-1))
    return codes.flatten(-2), (exponent + 127).to(torch.uint8).view(E8M0)


def to_codes(x):
    """The nearest values of e2m1."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (x.abs().unsqueeze(-1) - grid).abs().argmin(-1)
    return (codes + 8 * (x < 0)).to(torch.uint8)


def checkpoint_of(source, store):
    """A checkpoint of a stacked model with its experts one by one, stored by ``store``."""
    state = {}
    for name, value in source.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last not in KINDS:
            state[name] = value
            continue
        kinds = KINDS[last]
        for expert, weight in enumerate(value):
            for kind, part in zip(kinds, weight.chunk(len(kinds)), strict=True):
                state |= store(f"{prefix}.{expert}.{kind}.weight", part.contiguous())
    return state


def bytes_of(x):
    return sum(getattr(x, name).nbytes for name in x.__tensor_flatten__()[0])


def run(layer, x):
    x = x.clone().requires_grad_()
    y = layer["mlp"](x)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("store", [block_fp8, per_tensor])
@pytest.mark.parametrize("experts", [Stacked, OneByOne])
def test_experts_are_loaded_as_the_bytes_of_the_checkpoint(store, experts):
    state = checkpoint_of(model(), store)
    loaded, high = model(experts, 1), model(experts, 1)
    report = load_fp8(state, loaded)
    load_fp8(state, high, dequantize=True)
    assert len(report.fp8) == (2 if experts is Stacked else 3 * EXPERTS)
    for name in report.fp8:
        weight = loaded.get_parameter(name)
        assert isinstance(weight, Float8Tensor)
        assert not weight.requires_grad
        assert bytes_of(weight) < 1.01 * weight.numel()
        assert torch.equal(weight.dequantize(), high.get_parameter(name).detach())
    assert diff(loaded.state_dict(), high.state_dict()).equal
    # One by one and stacked are the same tensors.
    weights = {n: t for n, t in state.items() if "input_scale" not in n}
    assert diff(weights, loaded.state_dict()).identical
    x = torch.randn(TOKENS, HIDDEN)
    with float8lab.fallback("silent"), float8lab.count_gemms() as counts:
        y, dx = run(loaded, x)
    expected, expected_dx = run(high, x)
    products = 2 * EXPERTS * (2 if experts is Stacked else 3)  # fprop and dgrad
    if experts is Stacked and store is per_tensor:  # two scales along the contraction of dgrad
        products -= EXPERTS
        assert "mlp.experts.1.up_proj.input_scale, " in report.notes[0]
    assert counts.fp8 == products
    assert (y - expected).norm() < 0.05 * expected.norm()
    assert (dx - expected_dx).norm() < 0.1 * expected_dx.norm()


def test_plain_experts_are_stacked_too():
    source = model()
    state = checkpoint_of(source, lambda name, weight: {name: weight})
    for short, name in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
        state = {key.replace(name, short): value for key, value in state.items()}
    loaded = model(seed=1)
    report = load_fp8(state, loaded)
    assert (len(report.plain), len(report.fp8)) == (3, 0)
    assert diff(state, source.state_dict()).identical
    for name, value in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize(
    ("experts", "format"),
    [
        (Stacked, "block-fp8"), (Stacked, "compressed-tensors"), (Stacked, "float8lab"),
        (OneByOne, "block-fp8"), (OneByOne, "compressed-tensors"),
    ],
)  # fmt: skip
def test_trained_experts_are_exported_with_the_bytes_they_have(tmp_path, experts, format):
    state = checkpoint_of(model(), block_fp8)
    trained = model(experts, 1)
    load_fp8(state, trained)
    trained.requires_grad_(True)
    optimizer = float8lab.optim.MasterWeights(trained.parameters(), torch.optim.AdamW, lr=3e-3)
    x, target = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (trained["mlp"](x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    report = export(trained, tmp_path / "out", format)
    assert report.high_precision == ("mlp.gate",)
    weights = trained.state_dict()
    assert diff(tmp_path / "out", weights).identical
    names = {row.name for row in diff(tmp_path / "out", tmp_path / "out").rows}
    stacked = format == "float8lab"  # the others have the names that other libraries know
    assert ("mlp.experts.gate_up_proj" in names) == stacked
    assert ("mlp.experts.1.down_proj.weight" in names) == (not stacked)
    changed = diff(tmp_path / "out", state).counts["differs"]
    assert changed == 1 + (2 if stacked else 3 * EXPERTS)  # the router learns, too
    again = model(experts, 2)
    load_fp8(tmp_path / "out", again)
    for name, value in again.state_dict().items():
        if isinstance(value, Float8Tensor):
            assert_same_bytes(value, weights[name], amax=False)
        else:
            assert torch.equal(value, weights[name])


class Adapted(nn.Module):
    """Low-rank adapters around the experts of a layer, which are frozen."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.down = nn.Linear(HIDDEN, 8, bias=False)
        self.up = nn.Linear(8, HIDDEN, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x + self.up(self.down(x)))


@pytest.mark.parametrize("store", [nvfp4, mxfp4, block_fp8])
@pytest.mark.parametrize("experts", [Stacked, OneByOne])
def test_frozen_experts_are_the_base_of_adapters(store, experts):
    state = checkpoint_of(model(), store)
    base, high = model(experts, 1), model(experts, 1)
    report = load_fp8(state, base)
    load_fp8(state, high, dequantize=True)
    kept = report.fp8 if store is block_fp8 else report.fp4
    assert len(kept) == (2 if experts is Stacked else 3 * EXPERTS)
    before = {name: copy.deepcopy(base.get_parameter(name)) for name in kept}
    torch.manual_seed(3)
    tuned, reference = Adapted(base["mlp"]), Adapted(high["mlp"])
    reference.down.load_state_dict(tuned.down.state_dict())
    optimizers = [
        torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=3e-3)
        for m in (tuned, reference)
    ]
    x, target = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    losses: dict = {tuned: [], reference: []}
    for _ in range(4):
        for module, optimizer in zip((tuned, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (module(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses[module].append(float(loss.detach()))
    mine, theirs = losses.values()
    assert mine[0] - mine[-1] > 0.9 * (theirs[0] - theirs[-1]) > 0
    if store is not block_fp8:  # true gradients, bit for bit
        assert mine == theirs
        assert torch.equal(tuned.up.weight.grad, reference.up.weight.grad)
    for name, value in before.items():
        now = base.get_parameter(name)
        assert now.grad is None
        assert torch.equal(now.dequantize(), value.dequantize())


@pytest.mark.parametrize("store", [nvfp4, mxfp4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_experts_take_half_a_byte(store, dtype):
    state = checkpoint_of(model(), store)
    with torch.device("meta"):
        loaded = model().to(dtype)
    report = load_fp8(state, loaded)
    values = model().to(dtype)
    load_fp8(state, values, dequantize=True)
    assert set(report.fp4) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    for name in report.fp4:
        weight = loaded.get_parameter(name)
        assert isinstance(weight, Float4Tensor)
        # Matrices of an expert with scales of their own: four bytes more for each row.
        rows = 4 / weight.shape[-1] if store is nvfp4 and "gate" in name else 0.0
        assert bytes_of(weight) / weight.numel() <= 0.57 + rows
        assert torch.equal(weight.dequantize(), values.get_parameter(name).detach())
    assert "in 4 bits" in str(report)
    # Loading again: other formats take the place of packed weights.
    load_fp8(checkpoint_of(model(), block_fp8), loaded, dequantize=True)
    assert not any(isinstance(p, (Float4Tensor, Float8Tensor)) for p in loaded.parameters())


def test_a_converted_layer_casts_a_4_bit_weight_again():
    converted = float8lab.convert_to_float8(model(OneByOne), exclude=["*gate"])
    report = load_fp8(checkpoint_of(model(), mxfp4), converted)
    assert len(report.fp4) == 3 * EXPERTS
    assert "the recipe they have requantizes these weights" in report.notes[0]
    with float8lab.count_gemms() as counts:
        run(converted, torch.randn(TOKENS, HIDDEN))
    assert counts.fp8 == 2 * 3 * EXPERTS


def test_4_bit_weights_are_exported_in_high_precision(tmp_path):
    """Quantizing them to FP8 would round a second time."""
    base = model(OneByOne)
    load_fp8(checkpoint_of(model(), mxfp4), base)
    report = export(base, tmp_path / "out", "block-fp8")
    assert set(report.fp8) == {"mlp.gate.weight"}
    note = "mlp.experts.0.gate_proj.weight and 5 more: stored in 4 bits, written in high precision"
    assert report.notes == (note,)
    found = {row.name: row.status for row in diff(tmp_path / "out", base.state_dict()).rows}
    assert found.pop("mlp.gate.weight") == "differs"
    assert set(found.values()) == {"equal"}


def test_parts_that_make_no_stack():
    state = checkpoint_of(model(), block_fp8)
    name = "mlp.experts.1.up_proj.weight"
    mixed = {n: t for n, t in state.items() if not n.startswith(name)}
    mixed |= per_tensor(name, torch.randn(WIDTH, HIDDEN))
    loaded = model()
    report = load_fp8(mixed, loaded)
    assert report.dequantized == ("mlp.experts.gate_up_proj",)
    note = "mlp.experts.gate_up_proj is dequantized: its experts' blocks make no one weight"
    assert note in report.notes
    values = mixed[name].float() * mixed[f"{name}_scale"]
    assert torch.equal(loaded["mlp"].experts.gate_up_proj[1, WIDTH:].detach(), values)
    for missing, error, text in (
        (name, ValueError, f"the model; {name} is missing; {name}_scale_inv is not in the model"),
        (f"{name}_scale_inv", CheckpointError, f"{name}: no scale in the checkpoint"),
    ):
        damaged = {n: t for n, t in state.items() if n != missing}
        with pytest.raises(error, match=text):
            load_fp8(damaged, model())
    report = load_fp8({n: t for n, t in state.items() if n != name}, model(), strict=False)
    assert f"mlp.experts.gate_up_proj is not loaded: {name} is missing" in report.notes
    state[name] = state[name][:, :-1]
    with pytest.raises(ValueError, match=rf"; {name} is \[128, 255\] there and that of other"):
        load_fp8(state, model())


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ((1, 1, -1), "row"), ((1, WIDTH, -1), None), ((1, -1, -1), "tensor"),
        ((-1, -1, -1), "tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_stacks_with_other_scales_are_split(tmp_path, block, words):
    source = model()
    experts = source["mlp"].experts
    for name, parameter in list(experts.named_parameters()):
        stored = float8lab.quantize(parameter.detach(), block=block)
        setattr(experts, name, nn.Parameter(stored, requires_grad=False))
    if words is None:  # a scale for gate and one for up, but two for the rows of down
        experts.down_proj = nn.Parameter(experts.down_proj.dequantize())
        words = "tensor"
    report = export(source, tmp_path / "out", "compressed-tensors")
    assert set(report.fp8.values()) == {f"e4m3 {words} fp32"}
    assert diff(tmp_path / "out", source.state_dict()).equal


def test_a_stack_whose_blocks_lie_across_its_parts_is_not_split(tmp_path):
    broken = model()
    experts = broken["mlp"].experts
    for name, shape in {"gate_up_proj": (128, HIDDEN), "down_proj": (HIDDEN, 64)}.items():
        stored = float8lab.quantize(torch.randn(EXPERTS, *shape), block=(128, 128))
        setattr(experts, name, nn.Parameter(stored))
    with pytest.raises(
        ValueError, match="a multiple of 128 rows for each of gate_proj and up_proj"
    ):
        export(broken, tmp_path / "out", "block-fp8")
    export(broken, tmp_path / "out", "float8lab")
    assert diff(tmp_path / "out", broken.state_dict()).identical


def test_transposed_experts_have_no_names_of_their_own(tmp_path):
    """GPT-OSS and Llama 4 have ``[experts, in, out]``, the former with rows that alternate."""
    turned = model()
    experts = turned["mlp"].experts
    for name, parameter in list(experts.named_parameters()):
        stored = float8lab.quantize(parameter.detach().mT.contiguous(), block=(128, 128))
        setattr(experts, name, nn.Parameter(stored))
    with pytest.raises(ValueError, match=r"gate_up_proj is stored in e4m3 1x128x128"):
        export(turned, tmp_path / "out", "block-fp8")
    export(turned, tmp_path / "out", "float8lab")
    assert diff(tmp_path / "out", turned.state_dict()).identical


def own_experts(kind):
    """Experts of this library, whose scales of current scaling are each expert's."""
    if kind == "mlp":
        return float8lab.ExpertMLP(EXPERTS, 64, 48, bias=True, device="cpu")
    single = kind == "single"
    return float8lab.GroupedLinear(
        EXPERTS, 64, 48, single_grouped_weight=single, single_grouped_bias=single, device="cpu"
    )


@pytest.mark.parametrize("kind", ["mlp", "grouped", "single"])
def test_our_format_holds_experts_of_ours_and_others_say_why_they_stay(tmp_path, kind):
    trained = nn.ModuleDict({"experts": own_experts(kind), "head": nn.Linear(64, 64)})
    recipe = recipes.Float8RowwiseScaling()
    float8lab.convert_to_float8(trained, recipe)
    report = export(trained, tmp_path / "out", "float8lab")
    assert report.reasons == {}
    loaded = nn.ModuleDict({"experts": own_experts(kind), "head": nn.Linear(64, 64)})
    read = load_fp8(tmp_path / "out", loaded)
    assert read.fp8.keys() == report.fp8.keys()
    assert read.fp8.keys() == {n for n, p in trained.named_parameters() if "bias" not in n}
    x, y = torch.randn(TOKENS, 64), []
    for found in (trained, loaded):
        run_rows = found["experts"].run_rows if kind == "mlp" else found["experts"]
        y.append(run_rows(x, [TOKENS - 5, 5]).detach())
    assert torch.equal(*y)
    theirs = export(trained, tmp_path / "theirs", "compressed-tensors")
    assert theirs.fp8.keys() == {"head.weight"}
    assert set(theirs.reasons) == report.fp8.keys() - theirs.fp8.keys()
    assert "no other library has names" in str(theirs)
    with pytest.raises(ValueError, match=r"is stored in e4m3.*no other library has names"):
        export(loaded, tmp_path / "refused", "compressed-tensors")
    assert not (tmp_path / "refused").exists()
