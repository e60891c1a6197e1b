"""Experts and routers of models outside the installed libraries, recognized by attributes."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8lab
from float8lab import recipes
from tests.nn.models import GatedMLP, gemms_of, report_of

E, D, W = 4, 32, 24
COUNTS = [5, 0, 9, 2]


class LoopExperts(nn.Module):
    """Experts like the first version of torchtitan's GroupedExperts."""

    def __init__(self):
        super().__init__()
        for name, shape in (("w1", (E, W, D)), ("w2", (E, D, W)), ("w3", (E, W, D))):
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = x.split(num_tokens_per_expert.tolist())
        return torch.cat(
            [
                (F.silu(part @ w1.t()) * (part @ w3.t())) @ w2.t()
                for part, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3, strict=True)
            ]
        )


class SeamExperts(nn.Module):
    """Experts like torchtitan's later GroupedExperts, whose ``_grouped_mm`` may be replaced."""

    def __init__(self, use_grouped_mm: bool = True):
        super().__init__()
        self.use_grouped_mm = use_grouped_mm
        for name, shape in (("w1_EFD", (E, W, D)), ("w2_EDF", (E, D, W)), ("w3_EFD", (E, W, D))):
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def _multiplied(self, A: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return self._grouped_mm(A=A, B_t=weight.transpose(-2, -1), offs=offs)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        offs = torch.cumsum(num_tokens_per_expert, 0, dtype=torch.int32)
        h = F.silu(self._multiplied(x, self.w1_EFD, offs))
        h = h * self._multiplied(x, self.w3_EFD, offs)
        return self._multiplied(h, self.w2_EDF, offs).type_as(x)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        starts = [0, *offs.tolist()]
        ranges = zip(starts, starts[1:], B_t, strict=False)
        return torch.cat([A[start:end] @ w for start, end, w in ranges])


class NewSeamExperts(SeamExperts):
    """A version whose ``_grouped_mm`` takes weights as they are stored."""

    def _multiplied(self, A: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return self._grouped_mm(A=A, weight_EOI=weight, offs=offs)

    def _grouped_mm(self, *, A: Tensor, weight_EOI: Tensor, offs: Tensor) -> Tensor:
        return SeamExperts._grouped_mm(self, A=A, B_t=weight_EOI.mT, offs=offs)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x, torch.tensor(COUNTS))
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "recipe", [recipes.DelayedScaling(), recipes.Float8RowwiseScaling()], ids=str
)
@pytest.mark.parametrize("kind", [LoopExperts, SeamExperts, NewSeamExperts])
def test_experts_of_torchtitan_convert_and_equal_expert_mlp(kind, recipe):
    model, x = kind(), torch.randn(sum(COUNTS), D)
    w1, w2, w3 = (p.detach() for p in model.parameters())
    original, expected = copy.deepcopy(model), step(model, x)
    float8lab.convert_to_float8(model, recipe, strict=True)
    (layer,) = float8lab.conversion_report(model).layers
    assert layer.converted
    assert layer.shape == (E, 2 * W, D)
    with float8lab.autocast(enabled=False):
        for actual, exact in zip(step(model, x), expected, strict=True):
            assert (actual - exact).norm() < 1e-6 * exact.norm()
    expert_mlp = float8lab.ExpertMLP(E, D, W, device="cpu")
    expert_mlp.load_state_dict({"fc1_weight": torch.cat((w1, w3), 1), "fc2_weight": w2})
    for _ in range(2):
        actual = step(model, x)
        with float8lab.autocast(recipe=recipe):
            expert_mlp_y = expert_mlp.run_rows(x, COUNTS)
    if kind is LoopExperts:
        assert torch.equal(actual[0], expert_mlp_y)
    elif not recipe.linear.delayed:  # under delayed scaling, w1 and w3 have separate scales
        # torch computes the activation, and its last bits may flip the rounding of a cast.
        assert (actual[0] - expert_mlp_y).norm() < 0.1 * (expert_mlp_y - expected[0]).norm()
    for fp8, exact in zip(actual, expected, strict=True):
        assert 0 < (fp8 - exact).norm() < 0.2 * exact.norm()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert torch.equal(step(twin, x)[0], step(model, x)[0])
    float8lab.to_high_precision(model)
    assert type(model) is kind
    assert torch.equal(step(model, x)[0], step(original, x)[0])


def test_rows_are_cast_once_for_the_gemms_of_w1_and_w3():
    """The FP8 input of w1 and w3 is saved once, weights are not; other groups are cast again."""
    model = float8lab.convert_to_float8(SeamExperts(), recipes.Float8CurrentScaling())
    x = torch.randn(sum(COUNTS), D, requires_grad=True) * 1
    saved: dict[int, Tensor] = {}

    def record_fp8(tensor: Tensor) -> Tensor:
        if tensor.element_size() == 1:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    counts = torch.tensor(COUNTS)
    with torch.autograd.graph.saved_tensors_hooks(record_fp8, lambda tensor: tensor):
        y = model(x, counts)
    assert sorted(len(tensor) for tensor in saved.values()) == [32, 32]  # D, and W padded
    other_groups = model(x, counts.flip(0))
    assert torch.equal(other_groups, model(x.detach(), counts.flip(0)))
    assert torch.equal(y, model(x.detach(), counts))


def test_experts_without_grouped_mm_are_skipped_with_the_reason():
    model = nn.ModuleDict({"experts": SeamExperts(use_grouped_mm=False)})
    with pytest.warns(UserWarning, match="of 1: use_grouped_mm is False"):
        float8lab.convert_to_float8(model)
    (layer,) = float8lab.conversion_report(model).skipped
    assert layer.note.startswith("use_grouped_mm is False")


class MoELoop(nn.Module):
    """A router called ``gate``, and a loop over a list of experts."""

    def __init__(self, scores: int = E):
        super().__init__()
        self.gate = nn.Linear(D, scores, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, place = (index == e).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return y


def test_routers_stay_in_high_precision():
    """Routers are known by name, gates by the number of scores; experts of a loop are converted."""
    model = nn.ModuleDict(
        {
            "moe": MoELoop(),
            "skipping": MoELoop(scores=E + 1),  # as in Zaya, the last score is for no expert
            "mlp": MoELoop(scores=2 * D),  # not a router: this gate has as many outputs as an MLP's
            "router": nn.Sequential(nn.Linear(D, E)),
            "gate": nn.Linear(D, E),
        }
    )
    report = report_of(model, strict=True)
    note = "a router, which stays in high precision; name it in overrides to convert"
    assert {layer.name: layer.note for layer in report.skipped} == {
        "moe.gate": note, "skipping.gate": note, "router.0": note
    }  # fmt: skip
    assert gemms_of(model["moe"], torch.randn(9, D))[1] == 1
    converted = float8lab.convert_to_float8(model, overrides={"moe.gate": recipes.DelayedScaling()})
    assert isinstance(converted["moe"].gate, float8lab.Linear)


@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_expert_mlp_from_a_list_of_experts_equals_the_loop(bias, stored):
    """The module computes what the loop does, in FP8, too."""
    loop = MoELoop()
    loop.experts = nn.ModuleList(GatedMLP(D, W, bias=bias) for _ in range(E)).requires_grad_(stored)
    x, recipe = torch.randn(30, D), recipes.Float8RowwiseScaling()
    weights, index = loop.gate(x).softmax(-1).topk(2)
    with float8lab.fp8_model_init(stored, recipe):
        experts = float8lab.ExpertMLP.from_experts(loop.experts)
    assert all(p.requires_grad == stored for p in experts.parameters())
    expected = loop(x)
    if not stored:
        torch.testing.assert_close(experts(x, weights, index), expected)
    with torch.autocast("cpu", torch.bfloat16):  # the trial ignores autocast
        float8lab.ExpertMLP.from_experts(loop.experts)
    with float8lab.autocast(recipe=recipe):
        actual = experts(x, weights, index)
    float8lab.convert_to_float8(loop.experts, recipe)
    loop_y = loop(x)
    # torch computes the activation, and its last bits may flip the rounding of a cast.
    assert (actual - loop_y).norm() < 0.1 * (loop_y - expected).norm()
    second_module = float8lab.ExpertMLP.from_experts(loop.experts)  # the experts are in FP8 now
    assert torch.equal(second_module.fc1_weight[1, W:], loop.experts[1].up_proj.weight)


def test_from_experts_refuses_experts_that_are_no_equal_mlps():
    build = float8lab.ExpertMLP.from_experts
    different = nn.ModuleList([GatedMLP(D, W), GatedMLP(D, W, function=F.gelu)])
    with pytest.raises(ValueError, match=r"experts must compute the activation 'swiglu'.*expert 1"):
        build(different)
    with pytest.raises(ValueError, match="other numbers from expert 0"):
        build(different, names=("up_proj", "gate_proj", "down_proj"))
    with pytest.raises(ValueError, match=r"experts must give the 24 features .* got 48"):
        build(different, activation="gelu")
    with pytest.raises(ValueError, match="2 experts of 2 kinds"):
        build([GatedMLP(D, W), GatedMLP(D, W, bias=True)])
    with pytest.raises(TypeError, match=r"two or three layers of type torch.nn.Linear; got Linear"):
        build(nn.ModuleList([nn.Linear(D, D)]))
    plain = nn.ModuleList(nn.Sequential(nn.Linear(D, W), nn.ReLU(), nn.Linear(W, D)) for _ in "ab")
    assert build(plain, names=("0", "2"), activation="relu").fc2_bias is not None


def test_grouped_linear_and_expert_mlp_take_the_recipe():
    model = nn.ModuleDict(
        {
            "fc": float8lab.GroupedLinear(2, D, W, device="cpu"),
            "mlp": float8lab.ExpertMLP(2, D, W, device="cpu"),
        }
    )
    report = report_of(model, strict=True)
    assert [(layer.name, layer.shape) for layer in report.converted] == [
        ("fc", (2, W, D)), ("mlp", (2, 2 * W, D))
    ]  # fmt: skip
    rows = torch.randn(7, D)
    assert gemms_of(model["fc"], rows, [3, 4]) == (1, 0)
    assert gemms_of(model["mlp"].run_rows, rows, [3, 4]) == (2, 0)
    float8lab.to_high_precision(model)
    assert gemms_of(model["fc"], rows, [3, 4])[0] == 0
