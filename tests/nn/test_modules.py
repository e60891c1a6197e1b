"""Every module with GEMMs gives the same bytes, whatever a training loop does around a step.

The test file of each module checks its results; here a plain step of the module is the oracle.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab.nn import gemm
from float8lab.nn.precision import Precision, precisions
from tests.nn.composition import ATTENTION_RECIPES, RECIPES, perturb
from tests.nn.models import states
from tests.pairwise import pairwise
from tests.recorder import hooked_as_by_megatron

T, K, N, E, HEADS = 12, 40, 56, 3, 4
SPLITS = [5, 0, 7]


class Subject(NamedTuple):
    """A module, the shapes of its differentiable inputs and its output, and other arguments."""

    make: Callable[..., Any]
    inputs: tuple[tuple[int, ...], ...] = ((2, 6, K),)
    arguments: tuple[Any, ...] = ()
    output: tuple[int, ...] = (2, 6, K)

    def build(self, device: torch.device | str = "cpu", **kwargs: Any) -> Any:
        """Build the module with distinct parameters, which the CPU draws for every device."""
        module = self.make(device="cpu", **kwargs)
        perturb(module)
        return module.to(device)

    def data(self, device: torch.device | str = "cpu", scale: float = 1.0) -> list[Tensor]:
        """The inputs, then the gradient of the output."""
        return [torch.randn(s).to(device) * scale for s in (*self.inputs, self.output)]

    def call(self, function: Callable[..., Any], leaves: list[Tensor], **kwargs: Any) -> Tensor:
        """Call ``function`` with the arguments that the module takes."""
        if len(leaves) == 2 and not self.arguments:
            kwargs["encoder_output"] = leaves.pop()
        return function(*leaves, *self.arguments, **kwargs)


def _attention(**kwargs: Any) -> nn.Module:
    defaults = {
        "num_gqa_groups": 2, "attention_dropout": 0.0, "init_method": nn.init.xavier_normal_
    }  # fmt: skip
    return float8lab.MultiheadAttention(K, HEADS, qkv_format="bshd", **{**defaults, **kwargs})


def _layer(**kwargs: Any) -> nn.Module:
    defaults = {
        "num_gqa_groups": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "attn_input_format": "bshd", "init_method": nn.init.xavier_normal_,
        "output_layer_init_method": nn.init.xavier_normal_,
    }  # fmt: skip
    return float8lab.TransformerLayer(K, N, HEADS, **{**defaults, **kwargs})


_MLP = functools.partial(float8lab.LayerNormMLP, K, N)
_GROUPED = functools.partial(float8lab.GroupedLinear, E, K, N)
ONE_GEMM = {
    "linear": Subject(functools.partial(float8lab.Linear, K, N), output=(2, 6, N)),
    "norm-linear": Subject(functools.partial(float8lab.LayerNormLinear, K, N), output=(2, 6, N)),
    "norm-linear-rms": Subject(
        functools.partial(
            float8lab.LayerNormLinear, K, N, normalization="RMSNorm", zero_centered_gamma=True
        ),
        output=(2, 6, N),
    ),
}
MLPS = {
    "mlp": Subject(_MLP),
    "mlp-rms-gated": Subject(
        functools.partial(_MLP, normalization="RMSNorm", activation="swiglu", bias=False)
    ),
    "mlp-checkpoint": Subject(functools.partial(_MLP, activation="geglu", checkpoint=True)),
}
EXPERTS = {
    "grouped": Subject(_GROUPED, ((T, K),), (SPLITS,), (T, N)),
    "grouped-single": Subject(
        functools.partial(_GROUPED, single_grouped_weight=True, single_grouped_bias=True),
        ((T, K),), (torch.tensor(SPLITS),), (T, N),
    ),
    "experts": Subject(
        functools.partial(float8lab.ExpertMLP, E, K, N),
        ((T, K), (T, 2)), (torch.arange(2 * T).view(T, 2) % E,), (T, K),
    ),
}  # fmt: skip
ATTENTIONS = {
    "attention": Subject(functools.partial(_attention, input_layernorm=True)),
    "cross-attention": Subject(
        functools.partial(_attention, attention_type="cross", attn_mask_type="no_mask"),
        ((2, 6, K), (2, 5, K)),
    ),
    "encoder": Subject(functools.partial(_layer, normalization="RMSNorm", activation="swiglu")),
    "decoder": Subject(functools.partial(_layer, layer_type="decoder"), ((2, 6, K), (2, 5, K))),
}
GEMMS = {**ONE_GEMM, **MLPS, **EXPERTS}
FUSED_ATTENTION = Subject(functools.partial(_attention, fuse_qkv_params=True))
RECIPES_AND_HIGH = {"high": None, **RECIPES}
DENSE = {**ONE_GEMM, **MLPS}
RECIPES_BY_NAME = {**RECIPES_AND_HIGH, **ATTENTION_RECIPES}


def recipes_named(*names: str) -> dict[str, Any]:
    """The recipes of these names."""
    return {name: RECIPES_BY_NAME[name] for name in names}


FEW_RECIPES = recipes_named("delayed", "block")
HIGH_FPROP = float8lab.recipes.DelayedScaling(override_linear_precision=(True, False, False))


def parametrize_combinations(*groups: tuple[dict[str, Any], ...]) -> Any:
    """``parametrize`` over the combinations of named subjects, recipes and, if given, ways."""
    cases = [
        pytest.param(*values, id="-".join(names))
        for group in groups
        for names, values in zip(
            itertools.product(*group), itertools.product(*(axis.values() for axis in group)),
            strict=True,
        )
    ]  # fmt: skip
    return pytest.mark.parametrize(("subject", "recipe", "way")[: len(groups[0])], cases)


each_subject = parametrize_combinations((DENSE, RECIPES), ({**EXPERTS, **ATTENTIONS}, FEW_RECIPES))


def autocast(recipe: Any) -> Any:
    return float8lab.autocast(enabled=recipe is not None, recipe=recipe)


def step(
    subject: Subject, run: Any, module: Any, data: list[Tensor], recipe: Any, **kwargs: Any
) -> list[Any]:
    """The output, the gradients of the inputs, and the accumulated gradients of the parameters."""
    leaves = [x.detach().requires_grad_() for x in data[:-1]]
    with autocast(recipe):
        y = subject.call(run, list(leaves), **kwargs)
    y.backward(data[-1])
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return [y.detach(), *(x.grad for x in leaves), *gradients]


def all_equal(actual: list[Any], expected: list[Any]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def _scales(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in states(module).items() if key.endswith("/scale")}


def _weight_precisions(module: nn.Module) -> list[Precision]:
    owners = (m for m in module.modules() if not isinstance(m, float8lab.DotProductAttention))
    return [precision for owner in owners for _, precision in precisions(owner)]


WAYS: dict[str, Callable[[Any, int], Any]] = {
    "torchs-checkpoint": lambda module, number: functools.partial(
        checkpoint, module, use_reentrant=False
    ),
    "checkpoint": lambda module, number: functools.partial(float8lab.checkpoint, module),
    "microbatches": lambda module, number: functools.partial(
        module, is_first_microbatch=number == 0
    ),
}
"""By name, a function of the module and the step's number; a step calls its result."""
CORE_CHECKPOINT = {
    "of-core": lambda module, number: functools.partial(module, checkpoint_core_attention=True)
}
WAYS_WITH_EVERY_RECIPE = {name: way for name, way in WAYS.items() if name != "checkpoint"}
"""The ways that no other test runs with every recipe."""


def check_way_of_training(subject: Subject, recipe: Any, way: Any, device: Any = "cpu") -> None:
    """Three steps with accumulated gradients equal plain steps of the module, with their state."""
    plain = subject.build(device)
    module = copy.deepcopy(plain)
    for step_index in range(3):
        data = subject.data(device, step_index + 1)
        actual = step(subject, way(module, step_index), module, data, recipe)
        assert all_equal(actual, step(subject, plain, plain, data, recipe))
        # A later microbatch does not cast the weight, so it has no amax, and keeps its scale.
        state = _scales if way is WAYS["microbatches"] else states
        assert state(module) == state(plain)
    assert bool(states(plain)) == (recipe is not None and recipe.linear.delayed)
    if recipe is not None and way is WAYS["microbatches"]:
        assert None not in [precision.weight_cast for precision in _weight_precisions(module)]


@parametrize_combinations(
    (DENSE, RECIPES_AND_HIGH, WAYS_WITH_EVERY_RECIPE),
    (EXPERTS, recipes_named("delayed", "rowwise", "block"), WAYS_WITH_EVERY_RECIPE),
    (GEMMS, {**FEW_RECIPES, "delayed-backward": HIGH_FPROP}, {"checkpoint": WAYS["checkpoint"]}),
)
def test_checkpointing_and_microbatches_change_no_result(
    subject: Subject, recipe: Any, way: Any
) -> None:
    check_way_of_training(subject, recipe, way)


@pytest.mark.parametrize(
    ("subject", "recipe", "way"),
    pairwise(ATTENTIONS, ATTENTION_RECIPES, {**WAYS, **CORE_CHECKPOINT}),
)
def test_checkpointing_and_microbatches_change_no_result_of_attention(
    subject: Subject, recipe: Any, way: Any, device: Any
) -> None:
    check_way_of_training(subject, recipe, way, device)


def check_accumulation(subject: Subject, recipe: Any, device: Any = "cpu") -> None:
    module = subject.build(device)
    separate = copy.deepcopy(module)
    count = len(subject.inputs) + 1
    total = [torch.zeros_like(p) for p in module.parameters()]
    for _ in range(3):
        data = subject.data(device)
        accumulated = step(subject, module, module, data, recipe)
        separate.zero_grad()
        plain = step(subject, separate, separate, data, recipe)
        total = [running + gradient for running, gradient in zip(total, plain[count:], strict=True)]
        assert all_equal(accumulated, plain[:count] + total)
    assert states(module) == states(separate)


@parametrize_combinations(
    ({"linear": ONE_GEMM["linear"]}, RECIPES), ({**MLPS, **EXPERTS}, FEW_RECIPES)
)
def test_accumulated_gradients_are_the_sum_of_separate_ones(subject: Subject, recipe: Any) -> None:
    check_accumulation(subject, recipe)


@parametrize_combinations((ATTENTIONS, recipes_named("delayed-dpa", "block")))
def test_accumulated_gradients_of_attention_are_the_sum_of_separate_ones(
    subject: Subject, recipe: Any, device: Any
) -> None:
    check_accumulation(subject, recipe, device)


@each_subject
def test_strided_and_expanded_tensors_give_equal_results(subject: Subject, recipe: Any) -> None:
    module = subject.build()
    *leaves, dy = subject.data()
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in leaves]
    ones = torch.ones_like(dy)
    *sliced, sliced_dy = (torch.cat((x, x), -1)[..., : x.shape[-1]] for x in (*leaves, ones))
    expanded = torch.ones(()).expand_as(dy)
    expected, *results = (
        step(subject, twin, twin, data, recipe)
        for data in ([*leaves, ones], [*strided, expanded], [*sliced, sliced_dy])
        for twin in [copy.deepcopy(module)]
    )
    assert all(all_equal(actual, expected) for actual in results)


@parametrize_combinations(
    (DENSE, RECIPES_AND_HIGH),
    (EXPERTS, recipes_named("high", "current", "rowwise", "block")),
    ({"attention": FUSED_ATTENTION}, recipes_named("high", "current")),
)
def test_main_grad_receives_the_weight_gradients(subject: Subject, recipe: Any) -> None:
    """A first microbatch overwrites the 7s in ``main_grad``; Megatron's hooks see each gradient."""
    plain = subject.build()
    fused = [subject.build(fuse_wgrad_accumulation=True) for _ in range(2)]
    weights = []
    for module in fused:
        module.load_state_dict(plain.state_dict())
        parameters = module.named_parameters()
        weights.append({n: p for n, p in parameters if "weight" in n and "norm" not in n})
        for weight in weights[-1].values():
            weight.main_grad = torch.full(weight.shape, 7.0)
    hook_calls = hooked_as_by_megatron([*weights[1].values()], zero_out=recipe is None)
    for step_index, is_first in enumerate((True, False, False, None)):
        data = subject.data(scale=step_index + 1)
        results = [
            step(subject, module, module, data, recipe, is_first_microbatch=is_first)
            for module in (plain, *fused)
        ]
        count = len(subject.inputs) + 1
        assert all_equal(results[0][:count], results[1][:count])
        assert len(hook_calls) == len(weights[1]) * (step_index + 1)
    for name, parameter in plain.named_parameters():
        for module, names_of_weights in zip(fused, weights, strict=True):
            fused_parameter = module.get_parameter(name)
            assert torch.equal(
                fused_parameter.main_grad if name in names_of_weights else fused_parameter.grad,
                parameter.grad,
            )
            assert name not in names_of_weights or fused_parameter.grad is None


@each_subject
def test_no_planned_function_gets_one_tensor_as_two_arguments(
    subject: Subject, recipe: Any, monkeypatch: Any
) -> None:
    """A recorded plan could not distinguish one tensor in two arguments from two tensors."""
    calls = []

    def count_duplicates(function: Callable[..., Any], *args: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        calls.append(len(tensors) - len({id(tensor) for tensor in tensors}))
        return function(*args)

    for name in ("_fprop", "_gradients"):
        monkeypatch.setattr(gemm, name, functools.partial(count_duplicates, getattr(gemm, name)))
    module = subject.build()
    step(subject, module, module, subject.data(), recipe)
    assert calls
    assert not any(calls)


@each_subject
def test_copies_and_loaded_states_continue_with_equal_results(
    subject: Subject, recipe: Any
) -> None:
    module = subject.build()
    step(subject, module, module, subject.data(), recipe)
    state = float8lab.nn.ScalingState(module, recipe).state_dict()
    assert bool(state) == recipe.linear.delayed
    resumed = subject.build()
    resumed.load_state_dict(module.state_dict())
    float8lab.nn.ScalingState(resumed, recipe).load_state_dict(state)
    data = subject.data(scale=3.0)
    copies = [copy.deepcopy(module), resumed]
    for twin in (module, *copies):
        twin.zero_grad()
    expected = step(subject, module, module, data, recipe)
    assert all(all_equal(step(subject, twin, twin, data, recipe), expected) for twin in copies)


@each_subject
def test_inference_mode_copies_and_pickles_give_equal_outputs(
    subject: Subject, recipe: Any, tmp_path: Any
) -> None:
    module = subject.build().eval()
    *leaves, _ = subject.data()
    with float8lab.autocast(recipe=recipe):
        expected = subject.call(module, list(leaves))
        torch.save(module, tmp_path / "module.pt")
        loaded = torch.load(tmp_path / "module.pt", weights_only=False)
        with torch.inference_mode():
            for twin in (module, copy.deepcopy(module), loaded):
                assert torch.equal(subject.call(twin, list(leaves)), expected)


@parametrize_combinations((GEMMS, recipes_named("high", "delayed")))
def test_a_step_computes_a_parametrized_weight_once(subject: Subject, recipe: Any) -> None:
    """Each computation advances ``spectral_norm``'s estimate, so a recompute must not repeat it."""
    module = subject.build()
    weights = [name for name, parameter in module.named_parameters() if parameter.ndim > 1]
    normed = [
        nn.utils.parametrizations.spectral_norm(module, w).parametrizations[w] for w in weights
    ]
    runs: list[object] = []
    for norm in normed:
        norm.register_forward_hook(lambda *call: runs.append(call))
    step(subject, module, module, subject.data(), recipe)
    assert len(runs) == len(weights)


@each_subject
def test_second_and_batched_derivatives_and_torch_func_are_refused(
    subject: Subject, recipe: Any
) -> None:
    module, leaves = subject.build(), [x.requires_grad_() for x in subject.data()[:-1]]

    def run(*leaves: Tensor) -> Tensor:
        with float8lab.autocast(recipe=recipe):
            return subject.call(module, list(leaves)).sum()

    y, ones = run(*leaves), torch.ones(2)
    gradient = functools.partial(torch.autograd.grad, y, leaves[0], retain_graph=True)
    for problem, call in (
        ("differentiated again; ", lambda: gradient(create_graph=True)),
        ("batched; ", lambda: gradient(ones, is_grads_batched=True)),
        ("batched; ", lambda: torch.func.vmap(gradient)(ones)),
        ("transforms of torch.func", lambda: torch.func.grad(run)(*leaves)),
        ("transforms of torch.func", lambda: torch.func.vmap(run)(*(x[None] for x in leaves))),
    ):
        with pytest.raises(NotImplementedError, match=f"{problem}.*to_high_precision"):
            call()


@pytest.mark.parametrize("subject", GEMMS.values(), ids=GEMMS)
def test_float64_stays_in_high_precision(subject: Subject) -> None:
    """Float64 stays under both float8lab's and torch's autocast."""
    module = subject.build(params_dtype=torch.float64)
    data = [x.double() for x in subject.data()]
    with float8lab.count_gemms() as counts:
        actual = step(subject, module, module, data, RECIPES["current"])
    assert (counts.fp8, counts.high_precision > 0) == (0, True)
    for enabled in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled):
            expected = step(subject, module, module, data, None)
        for tensor, expected_tensor in zip(actual, expected, strict=True):
            assert tensor.dtype == torch.float64
            assert torch.equal(tensor, expected_tensor)


ROPE = {"rotary_pos_emb": float8lab.RotaryPositionEmbedding(K // HEADS, device="cpu")(6)}
RETURN_ALL = {"return_layernorm_output": True, "return_bias": True}
SPLITS_TENSOR = EXPERTS["grouped"]._replace(arguments=(torch.tensor(SPLITS),))
DEFAULT_LAYER = Subject(functools.partial(_layer, num_gqa_groups=None))
NO_BIAS = {"bias": False}
ENCODER = ATTENTIONS["encoder"]
ENCODER = ENCODER._replace(make=functools.partial(ENCODER.make, bias=False))
COMPILED: dict[str, tuple[Subject, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "norm-linear": (ONE_GEMM["norm-linear"], RETURN_ALL, ("current",), ()),
    "mlp-rms-gated": (MLPS["mlp-rms-gated"], RETURN_ALL, ("block",), ()),
    # Quick tests in test_compile.py cover each of the slow recipes.
    "mlp-checkpoint": (
        MLPS["mlp-checkpoint"], RETURN_ALL, ("mx", "high"),
        ("current", "rowwise", "block", "nvfp4"),
    ),
    "grouped": (SPLITS_TENSOR, {}, ("high",), ()),
    "grouped-single": (EXPERTS["grouped-single"], {}, ("delayed", "block"), ()),
    "experts": (EXPERTS["experts"], NO_BIAS, ("delayed", "rowwise"), ()),
    "attention": (ATTENTIONS["attention"], {}, (), ("delayed-dpa",)),
    "cross-attention": (ATTENTIONS["cross-attention"], {}, (), ("current",)),
    "decoder": (ATTENTIONS["decoder"], {}, ("block",), ("delayed",)),
    # Quick tests of the layer's parts cover these.
    "encoder": (ENCODER, ROPE, (), ("block", "current-dpa", "delayed")),
    "layer": (DEFAULT_LAYER, ROPE, ("delayed-dpa",), ("current", "rowwise", "mx")),
}  # fmt: skip
"""Subjects, their options (of the constructor; ROPE of the call), quick and slow recipes."""


def each_compiled(*labels: str) -> Any:
    """``parametrize`` over the entries that are in ``labels``, with their recipes."""
    return pytest.mark.parametrize(
        ("label", "name"),
        [
            pytest.param(label, name, marks=[pytest.mark.slow] * (name in COMPILED[label][3]))
            for label in labels
            for name in (*COMPILED[label][2], *COMPILED[label][3])
        ],
    )


def check_compiled(label: str, name: str, device: Any = "cpu") -> None:
    """Two compiled steps equal eager ones.

    The second step has another length, and delayed scales from the amaxes of the first.
    """
    torch._dynamo.reset()
    subject, options, *_ = COMPILED[label]
    recipe = RECIPES_BY_NAME[name]
    constructor_options, call_options = (
        ({}, {n: t.to(device) for n, t in options.items()}) if options is ROPE else (options, {})
    )
    module = subject.build(device, **constructor_options)
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        if label in DENSE:
            subject = subject._replace(inputs=((2, tokens, K),))
        results = []
        inputs = subject.data(device)[:-1]
        for run, owner in ((compiled, module), (plain, plain)):
            leaves = [x.clone().requires_grad_() for x in inputs]
            with autocast(recipe):
                y = subject.call(run, list(leaves), **call_options)
            outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
            sum(t.square().sum() for t in outputs).backward()
            gradients = [x.grad for x in (*leaves, *owner.parameters())]
            results.append([*(t.detach() for t in outputs), *gradients])
        assert all_equal(*results)
        assert states(module) == states(plain)
    torch._dynamo.reset()


@each_compiled(*(label for label in COMPILED if label in GEMMS))
def test_modules_compile_without_graph_breaks_and_equal_eager(label: str, name: str) -> None:
    check_compiled(label, name)


@each_compiled(*(label for label in COMPILED if label not in GEMMS))
def test_attention_modules_compile_without_graph_breaks_and_equal_eager(
    label: str, name: str, device: Any
) -> None:
    check_compiled(label, name, device)
