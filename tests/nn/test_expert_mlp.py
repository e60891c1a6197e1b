"""ExpertMLP: the composition of its parts, bit for bit, and a loop over the experts."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

import float8lab
from benchmarks.experts import MODELS, Layer, saved_share
from float8lab import recipes
from float8lab.nn.activation_function import activate
from tests.nn.test_grouped_linear import RECIPES

T, E, TOP, H, F = 40, 5, 2, 72, 40


def experts(bias: bool = True, **arguments) -> float8lab.ExpertMLP:
    torch.manual_seed(1)
    module = float8lab.ExpertMLP(E, H, F, bias=bias, device="cpu", **arguments)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def routing() -> tuple[Tensor, Tensor]:
    """Probabilities and experts of each token; the last expert gets none."""
    torch.manual_seed(3)
    index = torch.stack([torch.randperm(E - 1)[:TOP] for _ in range(T)])
    return torch.rand(T, TOP), index


def step(module, run, *inputs: Tensor, recipe=None) -> list[Tensor]:
    """Output and gradients of the inputs and the parameters, in a second step."""
    for _ in range(2):  # then delayed scales are those of the first
        module.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        with float8lab.autocast(recipe is not None, recipe=recipe):
            y = run(*leaves)
        y.backward(torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves), *(p.grad for p in module.parameters())]


class Parts(nn.Module):
    """The same from modules of one layer each."""

    def __init__(self, whole: float8lab.ExpertMLP):
        super().__init__()
        weight = whole.fc1_weight
        one = {
            "single_grouped_weight": True, "single_grouped_bias": True, "device": weight.device,
            "params_dtype": weight.dtype, "bias": whole.fc1_bias is not None,
        }  # fmt: skip
        self.fc1 = float8lab.GroupedLinear(E, H, whole.fc1_weight.shape[1], **one)
        self.fc2 = float8lab.GroupedLinear(E, F, H, **one)
        self.activation = whole.activation
        self.load_state_dict({k.replace("_", "."): v for k, v in whole.state_dict().items()})

    def forward(self, x: Tensor, probs: Tensor, index: Tensor) -> Tensor:
        rows, row_map = float8lab.moe_permute(x, index, index.numel(), map_type="index")
        sizes = torch.bincount(index.flatten(), minlength=E)
        rows = self.fc2(activate(self.fc1(rows, sizes), self.activation), sizes)
        return float8lab.moe_unpermute(rows, row_map, probs)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["high", *RECIPES])
def test_it_is_its_parts(recipe, activation):
    """To the bit: every operand has the same bytes."""
    whole, (probs, index), x = experts(activation=activation), routing(), torch.randn(T, H)
    parts = Parts(whole)
    got = step(whole, lambda x, probs: whole(x, probs, index), x, probs, recipe=recipe)
    want = step(parts, lambda x, probs: parts(x, probs, index), x, probs, recipe=recipe)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["high", *RECIPES])
def test_it_is_its_parts_on_a_gpu(recipe):
    """In bfloat16, with more tokens than a tile has rows, and features of no multiple of 16."""
    torch.manual_seed(1)
    whole = float8lab.ExpertMLP(E, H, F, device="cuda", params_dtype=torch.bfloat16)
    parts = Parts(whole)
    probs, index = torch.rand(700, TOP, device="cuda"), routing()[1].cuda().repeat(18, 1)[:700]
    x = torch.randn(700, H, device="cuda", dtype=torch.bfloat16)
    got = step(whole, lambda x, probs: whole(x, probs, index), x, probs, recipe=recipe)
    want = step(parts, lambda x, probs: parts(x, probs, index), x, probs, recipe=recipe)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def loop(module, x: Tensor, probs: Tensor, index: Tensor) -> Tensor:
    """Expert by expert, in float64."""
    found = torch.zeros_like(x)
    for e in range(E):
        token, place = (index == e).nonzero(as_tuple=True)
        h = x[token] @ module.fc1_weight[e].t() + module.fc1_bias[e]
        gate, up = h.chunk(2, dim=1)
        y = (nn.functional.silu(gate) * up) @ module.fc2_weight[e].t() + module.fc2_bias[e]
        found = found.index_add(0, token, y * probs[token, place, None])
    return found


def test_it_is_a_loop_over_the_experts_in_float64():
    module, (probs, index) = experts(params_dtype=torch.float64), routing()
    inputs = torch.randn(T, H, dtype=torch.float64), probs.double()
    got = step(module, lambda x, probs: module(x, probs, index), *inputs)
    want = step(module, lambda x, probs: loop(module, x, probs, index), *inputs)
    torch.testing.assert_close(got, want)


def test_ways_to_say_the_same():
    """Routing as indices or as a mask; dimensions; rows that are permuted already."""
    module, (probs, index), x = experts(), routing(), torch.randn(T, H)
    block = recipes.Float8BlockScaling()
    want = step(module, lambda x, probs: module(x, probs, index), x, probs, recipe=block)
    beyond = index.clone()
    beyond[index == 0] = -1  # as experts of other ranks are named, and by E
    mask = torch.zeros(T, E, dtype=torch.bool).scatter_(1, index, True)

    def spread(probs):
        return torch.zeros(T, E).scatter(1, index, probs)

    def permuted(x, probs):
        rows, _, row_map = float8lab.moe_permute_with_probs(x, spread(probs), mask)
        return float8lab.moe_unpermute(
            module.run_rows(rows, mask.sum(0).tolist()), row_map, spread(probs)
        )

    ways = (
        lambda x, probs: module(x, spread(probs), mask),
        lambda x, probs: module(x.view(2, T // 2, H), spread(probs), mask, T * TOP).view(T, H),
        permuted,
    )
    for way in ways:
        got = step(module, way, x, probs, recipe=block)
        torch.testing.assert_close(got, want)  # a token's rows are added in another order
    dropped = module(x, spread(probs), mask, 50)
    rows, row_map = float8lab.moe_permute(x, mask, 50)
    sizes = mask.sum(0).cumsum(0).clamp(max=50).diff(prepend=torch.zeros(1, dtype=torch.long))
    kept = float8lab.moe_unpermute(module.run_rows(rows, sizes), row_map, spread(probs))
    torch.testing.assert_close(dropped, kept)
    assert torch.equal(module(x[:0], probs[:0], index[:0]), x[:0])
    fewer = [
        step(module, lambda x, probs, i=i: module(x, probs, i), x, probs, recipe=block)
        for i in (beyond, beyond.where(beyond >= 0, E))
    ]
    torch.testing.assert_close(*fewer, rtol=0, atol=0)
    assert not fewer[0][2][index == 0].any()


@pytest.mark.parametrize("shape", [*MODELS.values(), Layer(16384, 8, 2, 7168, 2048)], ids=str)
def test_what_is_saved_until_backward(shape):
    """At most 0.6 times the bytes that torch's ops save in bfloat16: see ``docs/moe.md``."""
    for name in ("current", "delayed", "row", "block", "mx"):
        assert saved_share(shape, RECIPES[name]) <= 0.60


def test_rows_are_saved_for_the_probabilities_alone():
    """Without a gradient of the probabilities the experts' output is not kept."""
    module, (probs, index), x = experts(), routing(), torch.randn(T, H)
    want = step(module, lambda x, probs: module(x, probs, index), x, probs)
    got = step(module, lambda x: module(x, probs, index), x)
    torch.testing.assert_close(got, [*want[:2], *want[3:]], rtol=0, atol=0)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda _: None):
        module(x, probs, index)
    assert (T * TOP, H) not in kept[-3:]  # what adds up the rows is the last to save


@pytest.mark.parametrize("recipe", [RECIPES["delayed"], RECIPES["row"]], ids=str)
def test_stored_in_fp8(recipe):
    module, (probs, index), x = experts(bias=False), routing(), torch.randn(T, H)
    want = step(module, lambda x, probs: module(x, probs, index), x, probs, recipe=recipe)
    with float8lab.fp8_model_init(recipe=recipe):
        stored = float8lab.ExpertMLP(E, H, F, device="cpu")
    assert isinstance(stored.fc1_weight, float8lab.Float8Tensor)
    with torch.no_grad():
        stored.fc1_weight.copy_(module.fc1_weight)
        stored.fc2_weight.copy_(module.fc2_weight)
    got = step(stored, lambda x, probs: stored(x, probs, index), x, probs, recipe=recipe)
    if not recipe.linear.delayed:  # these have scales of their own
        assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_frozen_weights_while_products_are_counted(recipe):
    """Through the dispatcher an op gives an empty tensor for each result that it does not have."""
    (probs, index), x, found = routing(), torch.randn(T, 64), []
    for counting in (False, True):
        torch.manual_seed(1)
        module = float8lab.ExpertMLP(E, 64, 32, device="cpu").requires_grad_(False)
        with float8lab.count_gemms() if counting else contextlib.nullcontext():
            found.append(
                step(module, lambda x, probs, m=module: m(x, probs, index), x, probs, recipe=recipe)
            )
    for plain, counted in zip(*found, strict=True):
        assert (plain is counted is None) or torch.equal(plain, counted)
