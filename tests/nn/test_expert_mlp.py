"""ExpertMLP equals the composition of its parts bit for bit, and a loop over the experts."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

import float8lab
from benchmarks.experts import MODELS, Layer, saved_share
from float8lab import recipes
from float8lab.nn.activation_function import activate
from float8lab.nn.precision import precisions
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
    """The probabilities and experts of each token; the last expert gets no token."""
    torch.manual_seed(3)
    index = torch.stack([torch.randperm(E - 1)[:TOP] for _ in range(T)])
    return torch.rand(T, TOP), index


def step(module, run, *inputs: Tensor, recipe=None) -> list[Tensor]:
    """The output and the gradients of the inputs and the parameters, in a second step."""
    for _ in range(2):  # the delayed scales of the second step come from the first
        module.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        with float8lab.autocast(recipe is not None, recipe=recipe):
            y = run(*leaves)
        y.backward(torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves), *(p.grad for p in module.parameters())]


class Parts(nn.Module):
    """The same computation from separate modules: a permute, two grouped linears, an unpermute."""

    def __init__(self, module: float8lab.ExpertMLP):
        super().__init__()
        weight = module.fc1_weight
        options = {
            "single_grouped_weight": True, "single_grouped_bias": True, "device": weight.device,
            "params_dtype": weight.dtype, "bias": module.fc1_bias is not None,
        }  # fmt: skip
        self.fc1 = float8lab.GroupedLinear(E, H, module.fc1_weight.shape[1], **options)
        self.fc2 = float8lab.GroupedLinear(E, F, H, **options)
        self.activation = module.activation
        self.load_state_dict({k.replace("_", "."): v for k, v in module.state_dict().items()})

    def forward(self, x: Tensor, probs: Tensor, index: Tensor) -> Tensor:
        rows, row_map = float8lab.moe_permute(x, index, index.numel(), map_type="index")
        sizes = torch.bincount(index.flatten(), minlength=E)
        rows = self.fc2(activate(self.fc1(rows, sizes), self.activation), sizes)
        return float8lab.moe_unpermute(rows, row_map, probs)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["high", *RECIPES])
def test_expert_mlp_equals_the_composition_of_its_parts(recipe, activation):
    """The results are equal bit for bit, since every operand has the same bytes."""
    module, (probs, index), x = experts(activation=activation), routing(), torch.randn(T, H)
    parts = Parts(module)
    actual = step(module, lambda x, probs: module(x, probs, index), x, probs, recipe=recipe)
    expected = step(parts, lambda x, probs: parts(x, probs, index), x, probs, recipe=recipe)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["high", *RECIPES])
def test_expert_mlp_equals_the_composition_of_its_parts_on_a_gpu(recipe):
    """In bfloat16, with more tokens than a tile has rows; feature sizes are no multiples of 16."""
    torch.manual_seed(1)
    module = float8lab.ExpertMLP(E, H, F, device="cuda", params_dtype=torch.bfloat16)
    parts = Parts(module)
    probs, index = torch.rand(700, TOP, device="cuda"), routing()[1].cuda().repeat(18, 1)[:700]
    x = torch.randn(700, H, device="cuda", dtype=torch.bfloat16)
    actual = step(module, lambda x, probs: module(x, probs, index), x, probs, recipe=recipe)
    expected = step(parts, lambda x, probs: parts(x, probs, index), x, probs, recipe=recipe)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def loop(module, x: Tensor, probs: Tensor, index: Tensor) -> Tensor:
    """Runs one expert after the other; the test gives it float64 tensors."""
    output = torch.zeros_like(x)
    for e in range(E):
        token, slot = (index == e).nonzero(as_tuple=True)
        h = x[token] @ module.fc1_weight[e].t() + module.fc1_bias[e]
        gate, up = h.chunk(2, dim=1)
        y = (nn.functional.silu(gate) * up) @ module.fc2_weight[e].t() + module.fc2_bias[e]
        output = output.index_add(0, token, y * probs[token, slot, None])
    return output


def test_expert_mlp_equals_a_loop_over_the_experts_in_float64():
    module, (probs, index) = experts(params_dtype=torch.float64), routing()
    inputs = torch.randn(T, H, dtype=torch.float64), probs.double()
    actual = step(module, lambda x, probs: module(x, probs, index), *inputs)
    expected = step(module, lambda x, probs: loop(module, x, probs, index), *inputs)
    torch.testing.assert_close(actual, expected)


def test_equivalent_forms_of_routing_and_input_give_equal_results():
    """The routing may be indices or a mask, x may have three dimensions, or be permuted already."""
    module, (probs, index), x = experts(), routing(), torch.randn(T, H)
    block = recipes.Float8BlockScaling()
    expected = step(module, lambda x, probs: module(x, probs, index), x, probs, recipe=block)
    local_index = index.clone()
    local_index[index == 0] = -1  # marks experts of other ranks, as E does
    mask = torch.zeros(T, E, dtype=torch.bool).scatter_(1, index, True)

    def dense_probs(probs):
        return torch.zeros(T, E).scatter(1, index, probs)

    def permuted_call(x, probs):
        rows, _, row_map = float8lab.moe_permute_with_probs(x, dense_probs(probs), mask)
        return float8lab.moe_unpermute(
            module.run_rows(rows, mask.sum(0).tolist()), row_map, dense_probs(probs)
        )

    forms = (
        lambda x, probs: module(x, dense_probs(probs), mask),
        lambda x, probs: module(x.view(2, T // 2, H), dense_probs(probs), mask, T * TOP).view(T, H),
        permuted_call,
    )
    for form in forms:
        actual = step(module, form, x, probs, recipe=block)
        # The order of the sum over a token's rows differs.
        torch.testing.assert_close(actual, expected)
    dropped = module(x, dense_probs(probs), mask, 50)
    rows, row_map = float8lab.moe_permute(x, mask, 50)
    sizes = mask.sum(0).cumsum(0).clamp(max=50).diff(prepend=torch.zeros(1, dtype=torch.long))
    expected_dropped = float8lab.moe_unpermute(
        module.run_rows(rows, sizes), row_map, dense_probs(probs)
    )
    torch.testing.assert_close(dropped, expected_dropped)
    assert torch.equal(module(x[:0], probs[:0], index[:0]), x[:0])
    local_results = [
        step(module, lambda x, probs, i=i: module(x, probs, i), x, probs, recipe=block)
        for i in (local_index, local_index.where(local_index >= 0, E))
    ]
    torch.testing.assert_close(*local_results, rtol=0, atol=0)
    assert not local_results[0][2][index == 0].any()


@pytest.mark.parametrize("shape", [*MODELS.values(), Layer(16384, 8, 2, 7168, 2048)], ids=str)
def test_memory_saved_for_backward_stays_below_0_6_of_bfloat16(shape):
    """Saves at most 0.6 times the bytes that torch's ops save in bfloat16: see ``docs/moe.md``."""
    for name in ("current", "delayed", "row", "block", "mx"):
        assert saved_share(shape, RECIPES[name]) <= 0.60


def test_expert_outputs_are_saved_only_for_the_gradient_of_the_probabilities():
    """The output of the experts is saved only if the probabilities need a gradient."""
    module, (probs, index), x = experts(), routing(), torch.randn(T, H)
    expected = step(module, lambda x, probs: module(x, probs, index), x, probs)
    actual = step(module, lambda x: module(x, probs, index), x)
    torch.testing.assert_close(actual, [*expected[:2], *expected[3:]], rtol=0, atol=0)
    saved_shapes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved_shapes.append(t.shape), lambda _: None
    ):
        module(x, probs, index)
    assert (T * TOP, H) not in saved_shapes[-3:]  # the sum over rows saves last


@pytest.mark.parametrize("recipe", [RECIPES["delayed"], RECIPES["row"]], ids=str)
def test_weights_stored_in_fp8_give_the_output_of_cast_weights(recipe):
    module, (probs, index), x = experts(bias=False), routing(), torch.randn(T, H)
    expected = step(module, lambda x, probs: module(x, probs, index), x, probs, recipe=recipe)
    with float8lab.fp8_model_init(recipe=recipe):
        stored = float8lab.ExpertMLP(E, H, F, device="cpu")
    assert isinstance(stored.fc1_weight, float8lab.Float8Tensor)
    with torch.no_grad():
        stored.fc1_weight.copy_(module.fc1_weight)
        stored.fc2_weight.copy_(module.fc2_weight)
    actual = step(stored, lambda x, probs: stored(x, probs, index), x, probs, recipe=recipe)
    if not recipe.linear.delayed:  # delayed scales of the two modules differ
        assert torch.equal(actual[0], expected[0])


def test_a_converted_module_that_is_called_alone_advances_its_scales():
    module, (probs, index) = experts(), routing()
    float8lab.convert_to_float8(nn.Sequential(module), RECIPES["delayed"])
    for _ in range(2):
        module(torch.randn(T, H), probs, index)
    for _, precision in precisions(module):
        (slots,) = precision.slots.values()
        assert slots.tensors()["steps"].max() == 2


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_frozen_weights_give_equal_results_while_gemms_are_counted(recipe):
    """An op called through the dispatcher returns an empty tensor for each result it leaves out."""
    (probs, index), x, results = routing(), torch.randn(T, 64), []
    for counting in (False, True):
        torch.manual_seed(1)
        module = float8lab.ExpertMLP(E, 64, 32, device="cpu").requires_grad_(False)
        with float8lab.count_gemms() if counting else contextlib.nullcontext():
            results.append(
                step(module, lambda x, probs, m=module: m(x, probs, index), x, probs, recipe=recipe)
            )
    for plain, counted in zip(*results, strict=True):
        assert (plain is counted is None) or torch.equal(plain, counted)
