"""MoE models: block-FP8 and 4-bit checkpoints are loaded as such, trained and exported."""

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
    """Stacked experts as in the models of Transformers 5, run in a loop."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 16)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 12)

    def forward(self, x, expert_index):
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows_of_expert = expert_index == expert
            gate, up = F.linear(x[rows_of_expert], self.gate_up_proj[expert]).chunk(2, -1)
            y[rows_of_expert] = F.linear(F.silu(gate) * up, self.down_proj[expert])
        return y


class SeparateExperts(nn.ModuleList):
    """Experts that are separate linear layers."""

    def __init__(self):
        super().__init__(GatedMLP(HIDDEN, WIDTH) for _ in range(EXPERTS))

    def forward(self, x, expert_index):
        y = torch.zeros_like(x)
        for index, expert in enumerate(self):
            y[expert_index == index] = expert(x[expert_index == index])
        return y


class Layer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts()

    def forward(self, x):
        weight, expert_index = self.gate(x).softmax(-1).max(-1)
        return x + self.experts(x, expert_index) * weight.unsqueeze(-1)


def build_model(experts=Stacked, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({"mlp": Layer(experts)})


def block_fp8(name, weight):
    q = float8lab.quantize(weight, block=(128, 128))
    return {name: q.qdata, f"{name}_scale_inv": q.scale}


def per_tensor(name, weight):
    """Store a weight with one scale and a static activation scale, as compressed-tensors does."""
    q = float8lab.quantize(weight)
    static = {f"{name.removesuffix('weight')}input_scale": torch.tensor([1 / 64])}
    return {name: q.qdata, f"{name}_scale": q.scale.reshape(1), **static}


def nvfp4(name, weight):
    """Store a weight in ModelOpt's layout of NVFP4; each matrix has its own scale."""
    tensor_scale = (weight.abs().max() / (6 * 448)).reshape(())
    blocks = weight.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / tensor_scale).to(torch.float8_e4m3fn)
    codes = to_fp4(blocks / (scale.float() * tensor_scale).clamp(min=1e-9).unsqueeze(-1))
    other_tensors = {f"{name}_scale_2": tensor_scale, name[:-6] + "input_scale": torch.ones(())}
    return {name: pack(codes.flatten(-2)), f"{name}_scale": scale, **other_tensors}


def mxfp4(name, weight):
    """Store a weight in DeepSeek-V4's layout of MXFP4."""
    codes, scale = mx_blocks(weight)
    return {name: pack(codes).view(torch.int8), name[:-6] + "scale": scale}


def mx_blocks(weight):
    blocks = weight.detach().unflatten(-1, (-1, 32))
    exponent = blocks.abs().amax(-1).log2().floor() - 2
    codes = to_fp4(blocks / exponent.exp2().unsqueeze(-1))
    return codes.flatten(-2), (exponent + 127).to(torch.uint8).view(E8M0)


def to_fp4(x):
    """Return the nearest e2m1 values as their 4-bit patterns."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (x.abs().unsqueeze(-1) - grid).abs().argmin(-1)
    return (codes + 8 * (x < 0)).to(torch.uint8)


def checkpoint_of(source, store):
    """Return a checkpoint of a stacked model whose experts are stored separately by ``store``."""
    state = {}
    for name, value in source.state_dict().items():
        prefix, _, parameter_name = name.rpartition(".")
        if parameter_name not in KINDS:
            state[name] = value
            continue
        kinds = KINDS[parameter_name]
        for expert, weight in enumerate(value):
            for kind, matrix in zip(kinds, weight.chunk(len(kinds)), strict=True):
                state |= store(f"{prefix}.{expert}.{kind}.weight", matrix.contiguous())
    return state


def stored_bytes(x):
    return sum(getattr(x, name).nbytes for name in x.__tensor_flatten__()[0])


def output_and_dx(layer, x):
    x = x.clone().requires_grad_()
    y = layer["mlp"](x)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("store", [block_fp8, per_tensor])
@pytest.mark.parametrize("experts", [Stacked, SeparateExperts])
def test_loaded_experts_have_the_bytes_of_the_checkpoint(store, experts):
    state = checkpoint_of(build_model(), store)
    loaded, dequantized = build_model(experts, 1), build_model(experts, 1)
    report = load_fp8(state, loaded)
    load_fp8(state, dequantized, dequantize=True)
    assert len(report.fp8) == (2 if experts is Stacked else 3 * EXPERTS)
    for name in report.fp8:
        weight = loaded.get_parameter(name)
        assert isinstance(weight, Float8Tensor)
        assert not weight.requires_grad
        assert stored_bytes(weight) < 1.01 * weight.numel()
        assert torch.equal(weight.dequantize(), dequantized.get_parameter(name).detach())
    assert diff(loaded.state_dict(), dequantized.state_dict()).equal
    # Separate and stacked experts are the same tensors.
    weights = {n: t for n, t in state.items() if "input_scale" not in n}
    assert diff(weights, loaded.state_dict()).identical
    x = torch.randn(TOKENS, HIDDEN)
    with float8lab.fallback("silent"), float8lab.count_gemms() as counts:
        y, dx = output_and_dx(loaded, x)
    expected, expected_dx = output_and_dx(dequantized, x)
    gemms = 2 * EXPERTS * (2 if experts is Stacked else 3)  # fprop and dgrad
    if experts is Stacked and store is per_tensor:  # two scales along the contraction of dgrad
        gemms -= EXPERTS
        assert "mlp.experts.1.up_proj.input_scale, " in report.notes[0]
    assert counts.fp8 == gemms
    assert (y - expected).norm() < 0.05 * expected.norm()
    assert (dx - expected_dx).norm() < 0.1 * expected_dx.norm()


def test_high_precision_experts_are_stacked_too():
    source = build_model()
    state = checkpoint_of(source, lambda name, weight: {name: weight})
    for short_name, name in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
        state = {key.replace(name, short_name): value for key, value in state.items()}
    loaded = build_model(seed=1)
    report = load_fp8(state, loaded)
    assert (len(report.plain), len(report.fp8)) == (3, 0)
    assert diff(state, source.state_dict()).identical
    for name, value in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize(
    ("experts", "format"),
    [
        (Stacked, "block-fp8"), (Stacked, "compressed-tensors"), (Stacked, "float8lab"),
        (SeparateExperts, "block-fp8"), (SeparateExperts, "compressed-tensors"),
    ],
)  # fmt: skip
def test_trained_fp8_experts_are_exported_bit_for_bit(tmp_path, experts, format):
    state = checkpoint_of(build_model(), block_fp8)
    trained = build_model(experts, 1)
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
    stacked = format == "float8lab"  # the other formats have the names that other libraries know
    assert ("mlp.experts.gate_up_proj" in names) == stacked
    assert ("mlp.experts.1.down_proj.weight" in names) == (not stacked)
    changed = diff(tmp_path / "out", state).counts["differs"]
    assert changed == 1 + (2 if stacked else 3 * EXPERTS)  # the router learns, too
    loaded = build_model(experts, 2)
    load_fp8(tmp_path / "out", loaded)
    for name, value in loaded.state_dict().items():
        if isinstance(value, Float8Tensor):
            assert_same_bytes(value, weights[name], amax=False)
        else:
            assert torch.equal(value, weights[name])


class WithAdapter(nn.Module):
    """Low-rank adapters around a frozen layer of experts."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.down = nn.Linear(HIDDEN, 8, bias=False)
        self.up = nn.Linear(8, HIDDEN, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x + self.up(self.down(x)))


@pytest.mark.parametrize("store", [nvfp4, mxfp4, block_fp8])
@pytest.mark.parametrize("experts", [Stacked, SeparateExperts])
def test_frozen_quantized_experts_can_be_the_base_of_adapters(store, experts):
    state = checkpoint_of(build_model(), store)
    base, dequantized = build_model(experts, 1), build_model(experts, 1)
    report = load_fp8(state, base)
    load_fp8(state, dequantized, dequantize=True)
    quantized_names = report.fp8 if store is block_fp8 else report.fp4
    assert len(quantized_names) == (2 if experts is Stacked else 3 * EXPERTS)
    before = {name: copy.deepcopy(base.get_parameter(name)) for name in quantized_names}
    torch.manual_seed(3)
    tuned, reference = WithAdapter(base["mlp"]), WithAdapter(dequantized["mlp"])
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
    tuned_losses, other_report = losses.values()
    assert tuned_losses[0] - tuned_losses[-1] > 0.9 * (other_report[0] - other_report[-1]) > 0
    if store is not block_fp8:  # the gradients are exact
        assert tuned_losses == other_report
        assert torch.equal(tuned.up.weight.grad, reference.up.weight.grad)
    for name, value in before.items():
        weight = base.get_parameter(name)
        assert weight.grad is None
        assert torch.equal(weight.dequantize(), value.dequantize())


@pytest.mark.parametrize("store", [nvfp4, mxfp4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_experts_take_half_a_byte(store, dtype):
    state = checkpoint_of(build_model(), store)
    with torch.device("meta"):
        loaded = build_model().to(dtype)
    report = load_fp8(state, loaded)
    values = build_model().to(dtype)
    load_fp8(state, values, dequantize=True)
    assert set(report.fp4) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    for name in report.fp4:
        weight = loaded.get_parameter(name)
        assert isinstance(weight, Float4Tensor)
        # If the matrices of an expert have their own scales, each row takes four more bytes.
        rows = 4 / weight.shape[-1] if store is nvfp4 and "gate" in name else 0.0
        assert stored_bytes(weight) / weight.numel() <= 0.57 + rows
        assert torch.equal(weight.dequantize(), values.get_parameter(name).detach())
    assert "in 4 bits" in str(report)
    # Loading another format replaces the packed weights.
    load_fp8(checkpoint_of(build_model(), block_fp8), loaded, dequantize=True)
    assert not any(isinstance(p, (Float4Tensor, Float8Tensor)) for p in loaded.parameters())


def test_a_converted_layer_requantizes_a_4_bit_weight():
    converted = float8lab.convert_to_float8(build_model(SeparateExperts), exclude=["*gate"])
    report = load_fp8(checkpoint_of(build_model(), mxfp4), converted)
    assert len(report.fp4) == 3 * EXPERTS
    assert "the recipe they have requantizes these weights" in report.notes[0]
    with float8lab.count_gemms() as counts:
        output_and_dx(converted, torch.randn(TOKENS, HIDDEN))
    assert counts.fp8 == 2 * 3 * EXPERTS


def test_4_bit_weights_are_exported_in_high_precision(tmp_path):
    """Quantizing them to FP8 would round a second time."""
    base = build_model(SeparateExperts)
    load_fp8(checkpoint_of(build_model(), mxfp4), base)
    report = export(base, tmp_path / "out", "block-fp8")
    assert set(report.fp8) == {"mlp.gate.weight"}
    note = "mlp.experts.0.gate_proj.weight and 5 more: stored in 4 bits, written in high precision"
    assert report.notes == (note,)
    statuses = {row.name: row.status for row in diff(tmp_path / "out", base.state_dict()).rows}
    assert statuses.pop("mlp.gate.weight") == "differs"
    assert set(statuses.values()) == {"equal"}


def test_experts_that_cannot_be_stacked_are_dequantized_or_refused():
    state = checkpoint_of(build_model(), block_fp8)
    name = "mlp.experts.1.up_proj.weight"
    mixed = {n: t for n, t in state.items() if not n.startswith(name)}
    mixed |= per_tensor(name, torch.randn(WIDTH, HIDDEN))
    loaded = build_model()
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
            load_fp8(damaged, build_model())
    report = load_fp8({n: t for n, t in state.items() if n != name}, build_model(), strict=False)
    assert f"mlp.experts.gate_up_proj is not loaded: {name} is missing" in report.notes
    state[name] = state[name][:, :-1]
    with pytest.raises(ValueError, match=rf"; {name} is \[128, 255\] there and that of other"):
        load_fp8(state, build_model())


@pytest.mark.parametrize(
    ("block", "block_name"),
    [
        ((1, 1, -1), "row"), ((1, WIDTH, -1), None), ((1, -1, -1), "tensor"),
        ((-1, -1, -1), "tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_stacks_with_other_blocks_are_split_on_export(tmp_path, block, block_name):
    source = build_model()
    experts = source["mlp"].experts
    for name, parameter in list(experts.named_parameters()):
        stored = float8lab.quantize(parameter.detach(), block=block)
        setattr(experts, name, nn.Parameter(stored, requires_grad=False))
    if block_name is None:  # gate and up have one scale each, but the rows of down have two
        experts.down_proj = nn.Parameter(experts.down_proj.dequantize())
        block_name = "tensor"
    report = export(source, tmp_path / "out", "compressed-tensors")
    assert set(report.fp8.values()) == {f"e4m3 {block_name} fp32"}
    assert diff(tmp_path / "out", source.state_dict()).equal


def test_a_stack_with_blocks_across_its_matrices_is_not_split(tmp_path):
    source = build_model()
    experts = source["mlp"].experts
    for name, shape in {"gate_up_proj": (128, HIDDEN), "down_proj": (HIDDEN, 64)}.items():
        stored = float8lab.quantize(torch.randn(EXPERTS, *shape), block=(128, 128))
        setattr(experts, name, nn.Parameter(stored))
    with pytest.raises(
        ValueError, match="a multiple of 128 rows for each of gate_proj and up_proj"
    ):
        export(source, tmp_path / "out", "block-fp8")
    export(source, tmp_path / "out", "float8lab")
    assert diff(tmp_path / "out", source.state_dict()).identical


def test_transposed_experts_are_exported_only_as_stacks(tmp_path):
    """GPT-OSS and Llama 4 have ``[experts, in, out]``, the former with alternating rows."""
    transposed = build_model()
    experts = transposed["mlp"].experts
    for name, parameter in list(experts.named_parameters()):
        stored = float8lab.quantize(parameter.detach().mT.contiguous(), block=(128, 128))
        setattr(experts, name, nn.Parameter(stored))
    with pytest.raises(ValueError, match=r"gate_up_proj is stored in e4m3 1x128x128"):
        export(transposed, tmp_path / "out", "block-fp8")
    export(transposed, tmp_path / "out", "float8lab")
    assert diff(tmp_path / "out", transposed.state_dict()).identical


def library_experts(kind):
    """Experts of this library; current scaling gives each expert its own scales."""
    if kind == "mlp":
        return float8lab.ExpertMLP(EXPERTS, 64, 48, bias=True, device="cpu")
    single = kind == "single"
    return float8lab.GroupedLinear(
        EXPERTS, 64, 48, single_grouped_weight=single, single_grouped_bias=single, device="cpu"
    )


@pytest.mark.parametrize("kind", ["mlp", "grouped", "single"])
def test_only_the_float8lab_format_holds_experts_of_this_library(tmp_path, kind):
    trained = nn.ModuleDict({"experts": library_experts(kind), "head": nn.Linear(64, 64)})
    recipe = recipes.Float8RowwiseScaling()
    float8lab.convert_to_float8(trained, recipe)
    report = export(trained, tmp_path / "out", "float8lab")
    assert report.reasons == {}
    loaded = nn.ModuleDict({"experts": library_experts(kind), "head": nn.Linear(64, 64)})
    load_report = load_fp8(tmp_path / "out", loaded)
    assert load_report.fp8.keys() == report.fp8.keys()
    assert load_report.fp8.keys() == {n for n, p in trained.named_parameters() if "bias" not in n}
    x, y = torch.randn(TOKENS, 64), []
    for either in (trained, loaded):
        run_rows = either["experts"].run_rows if kind == "mlp" else either["experts"]
        y.append(run_rows(x, [TOKENS - 5, 5]).detach())
    assert torch.equal(*y)
    other_report = export(trained, tmp_path / "theirs", "compressed-tensors")
    assert other_report.fp8.keys() == {"head.weight"}
    assert set(other_report.reasons) == report.fp8.keys() - other_report.fp8.keys()
    assert "no other library has names" in str(other_report)
    with pytest.raises(ValueError, match=r"is stored in e4m3.*no other library has names"):
        export(loaded, tmp_path / "refused", "compressed-tensors")
    assert not (tmp_path / "refused").exists()
