"""What holds for every module with GEMMs: whatever a training loop does around a step, its bytes.

Each module's own file proves what it computes; here the module is its own oracle.
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
    """A module, the shapes of its differentiable inputs, and the rest of a call."""

    make: Callable[..., Any]
    inputs: tuple[tuple[int, ...], ...] = ((2, 6, K),)
    arguments: tuple[Any, ...] = ()
    output: tuple[int, ...] = (2, 6, K)

    def build(self, device: torch.device | str = "cpu", **kwargs: Any) -> Any:
        """With parameters that are all different, the CPU's on every device."""
        module = self.make(device="cpu", **kwargs)
        perturb(module)
        return module.to(device)

    def data(self, device: torch.device | str = "cpu", scale: float = 1.0) -> list[Tensor]:
        """Inputs, then the gradient of the output."""
        return [torch.randn(s).to(device) * scale for s in (*self.inputs, self.output)]

    def call(self, function: Callable[..., Any], leaves: list[Tensor], **kwargs: Any) -> Tensor:
        """``function`` of the arguments that the module takes."""
        if len(leaves) == 2 and not self.arguments:
            kwargs["encoder_output"] = leaves.pop()
        return function(*leaves, *self.arguments, **kwargs)


def _attention(**kwargs: Any) -> nn.Module:
    how = {"num_gqa_groups": 2, "attention_dropout": 0.0, "init_method": nn.init.xavier_normal_}
    return float8lab.MultiheadAttention(K, HEADS, qkv_format="bshd", **{**how, **kwargs})


def _layer(**kwargs: Any) -> nn.Module:
    how = {
        "num_gqa_groups": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "attn_input_format": "bshd", "init_method": nn.init.xavier_normal_,
        "output_layer_init_method": nn.init.xavier_normal_,
    }  # fmt: skip
    return float8lab.TransformerLayer(K, N, HEADS, **{**how, **kwargs})


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
ALL = {"high": None, **RECIPES}
DENSE = {**ONE_GEMM, **MLPS}
BY_NAME = {**ALL, **ATTENTION_RECIPES}


def some(*names: str) -> dict[str, Any]:
    """Recipes by name."""
    return {name: BY_NAME[name] for name in names}


FEW = some("delayed", "block")
HIGH_FPROP = float8lab.recipes.DelayedScaling(override_linear_precision=(True, False, False))


def table(*groups: tuple[dict[str, Any], ...]) -> Any:
    """``parametrize`` over the products of named subjects, recipes and perhaps ways."""
    cases = [
        pytest.param(*values, id="-".join(names))
        for group in groups
        for names, values in zip(
            itertools.product(*group), itertools.product(*(axis.values() for axis in group)),
            strict=True,
        )
    ]  # fmt: skip
    return pytest.mark.parametrize(("subject", "recipe", "way")[: len(groups[0])], cases)


each_subject = table((DENSE, RECIPES), ({**EXPERTS, **ATTENTIONS}, FEW))


def autocast(recipe: Any) -> Any:
    return float8lab.autocast(enabled=recipe is not None, recipe=recipe)


def step(
    subject: Subject, run: Any, module: Any, data: list[Tensor], recipe: Any, **kwargs: Any
) -> list[Any]:
    """Output, gradients of the inputs and those that the parameters have so far."""
    leaves = [x.detach().requires_grad_() for x in data[:-1]]
    with autocast(recipe):
        y = subject.call(run, list(leaves), **kwargs)
    y.backward(data[-1])
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return [y.detach(), *(x.grad for x in leaves), *gradients]


def same(got: list[Any], want: list[Any]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _scales(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in states(module).items() if key.endswith("/scale")}


def _of_weights(module: nn.Module) -> list[Precision]:
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
"""What is called instead of the module in a step, by the step's number."""
OF_CORE = {
    "of-core": lambda module, number: functools.partial(module, checkpoint_core_attention=True)
}
OFTEN = {name: way for name, way in WAYS.items() if name != "checkpoint"}
"""Those that no other test has with every recipe."""


def check_way(subject: Subject, recipe: Any, way: Any, device: Any = "cpu") -> None:
    """Three steps whose gradients add up equal steps of the module alone, state included."""
    plain = subject.build(device)
    module = copy.deepcopy(plain)
    for number in range(3):
        data = subject.data(device, number + 1)
        got = step(subject, way(module, number), module, data, recipe)
        assert same(got, step(subject, plain, plain, data, recipe))
        # A weight that a later microbatch does not cast has no amax, which keeps its scale.
        state = _scales if way is WAYS["microbatches"] else states
        assert state(module) == state(plain)
    assert bool(states(plain)) == (recipe is not None and recipe.linear.delayed)
    if recipe is not None and way is WAYS["microbatches"]:
        assert None not in [precision.weight_cast for precision in _of_weights(module)]


@table(
    (DENSE, ALL, OFTEN),
    (EXPERTS, some("delayed", "rowwise", "block"), OFTEN),
    (GEMMS, {**FEW, "delayed-backward": HIGH_FPROP}, {"checkpoint": WAYS["checkpoint"]}),
)
def test_a_way_to_train_changes_nothing(subject: Subject, recipe: Any, way: Any) -> None:
    check_way(subject, recipe, way)


@pytest.mark.parametrize(
    ("subject", "recipe", "way"), pairwise(ATTENTIONS, ATTENTION_RECIPES, {**WAYS, **OF_CORE})
)
def test_nor_around_attention(subject: Subject, recipe: Any, way: Any, device: Any) -> None:
    check_way(subject, recipe, way, device)


def check_accumulation(subject: Subject, recipe: Any, device: Any = "cpu") -> None:
    module = subject.build(device)
    separate = copy.deepcopy(module)
    count = len(subject.inputs) + 1
    total = [torch.zeros_like(p) for p in module.parameters()]
    for _ in range(3):
        data = subject.data(device)
        accumulated = step(subject, module, module, data, recipe)
        separate.zero_grad()
        alone = step(subject, separate, separate, data, recipe)
        total = [one + other for one, other in zip(total, alone[count:], strict=True)]
        assert same(accumulated, alone[:count] + total)
    assert states(module) == states(separate)


@table(({"linear": ONE_GEMM["linear"]}, RECIPES), ({**MLPS, **EXPERTS}, FEW))
def test_accumulated_gradients_add_up(subject: Subject, recipe: Any) -> None:
    check_accumulation(subject, recipe)


@table((ATTENTIONS, some("delayed-dpa", "block")))
def test_and_those_of_attention(subject: Subject, recipe: Any, device: Any) -> None:
    check_accumulation(subject, recipe, device)


@each_subject
def test_strides_do_not_matter(subject: Subject, recipe: Any) -> None:
    module = subject.build()
    *leaves, dy = subject.data()
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in leaves]
    ones = torch.ones_like(dy)
    *sliced, of_more = (torch.cat((x, x), -1)[..., : x.shape[-1]] for x in (*leaves, ones))
    expanded = torch.ones(()).expand_as(dy)
    want, *results = (
        step(subject, twin, twin, data, recipe)
        for data in ([*leaves, ones], [*strided, expanded], [*sliced, of_more])
        for twin in [copy.deepcopy(module)]
    )
    assert all(same(got, want) for got in results)


@table(
    (DENSE, ALL),
    (EXPERTS, some("high", "current", "rowwise", "block")),
    ({"attention": FUSED_ATTENTION}, some("high", "current")),
)
def test_main_grad_takes_the_weight_gradients(subject: Subject, recipe: Any) -> None:
    """The 7s in it are overwritten by a first microbatch; Megatron's hooks see each gradient."""
    plain = subject.build()
    fused = [subject.build(fuse_wgrad_accumulation=True) for _ in range(2)]
    weights = []
    for module in fused:
        module.load_state_dict(plain.state_dict())
        named = module.named_parameters()
        weights.append({n: p for n, p in named if "weight" in n and "norm" not in n})
        for weight in weights[-1].values():
            weight.main_grad = torch.full(weight.shape, 7.0)
    seen = hooked_as_by_megatron([*weights[1].values()], zero_out=recipe is None)
    for number, is_first in enumerate((True, False, False, None)):
        data = subject.data(scale=number + 1)
        results = [
            step(subject, module, module, data, recipe, is_first_microbatch=is_first)
            for module in (plain, *fused)
        ]
        count = len(subject.inputs) + 1
        assert same(results[0][:count], results[1][:count])
        assert len(seen) == len(weights[1]) * (number + 1)
    for name, parameter in plain.named_parameters():
        for module, own in zip(fused, weights, strict=True):
            mine = module.get_parameter(name)
            assert torch.equal(mine.main_grad if name in own else mine.grad, parameter.grad)
            assert name not in own or mine.grad is None


@each_subject
def test_no_tensor_is_two_arguments(subject: Subject, recipe: Any, monkeypatch: Any) -> None:
    """Of what a GPU repeats without its Python: it could not tell that from two tensors."""
    calls = []

    def watch(function: Callable[..., Any], *args: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        calls.append(len(tensors) - len({id(tensor) for tensor in tensors}))
        return function(*args)

    for name in ("_fprop", "_gradients"):
        monkeypatch.setattr(gemm, name, functools.partial(watch, getattr(gemm, name)))
    module = subject.build()
    step(subject, module, module, subject.data(), recipe)
    assert calls
    assert not any(calls)


@each_subject
def test_copies_and_a_saved_state_go_on_with_the_same_numbers(
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
    for one in (module, *copies):
        one.zero_grad()
    want = step(subject, module, module, data, recipe)
    assert all(same(step(subject, one, one, data, recipe), want) for one in copies)


@each_subject
def test_inference_mode_deepcopy_and_pickling(subject: Subject, recipe: Any, tmp_path: Any) -> None:
    module = subject.build().eval()
    *leaves, _ = subject.data()
    with float8lab.autocast(recipe=recipe):
        expected = subject.call(module, list(leaves))
        torch.save(module, tmp_path / "module.pt")
        loaded = torch.load(tmp_path / "module.pt", weights_only=False)
        with torch.inference_mode():
            for one in (module, copy.deepcopy(module), loaded):
                assert torch.equal(subject.call(one, list(leaves)), expected)


@table((GEMMS, some("high", "delayed")))
def test_a_forward_computes_a_parametrized_weight_once(subject: Subject, recipe: Any) -> None:
    """Each time ``spectral_norm`` advances its estimate, and a recomputation must not."""
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
def test_other_derivatives_are_refused(subject: Subject, recipe: Any) -> None:
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
    """Under this library's autocast and under torch's."""
    module = subject.build(params_dtype=torch.float64)
    data = [x.double() for x in subject.data()]
    with float8lab.count_gemms() as counts:
        got = step(subject, module, module, data, RECIPES["current"])
    assert (counts.fp8, counts.high_precision > 0) == (0, True)
    for enabled in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled):
            want = step(subject, module, module, data, None)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == torch.float64
            assert torch.equal(one, other)


ROPE = {"rotary_pos_emb": float8lab.RotaryPositionEmbedding(K // HEADS, device="cpu")(6)}
ALL_RETURNED = {"return_layernorm_output": True, "return_bias": True}
SPLITS_TENSOR = EXPERTS["grouped"]._replace(arguments=(torch.tensor(SPLITS),))
DEFAULT_LAYER = Subject(functools.partial(_layer, num_gqa_groups=None))
NO_BIAS = {"bias": False}
ENCODER = ATTENTIONS["encoder"]
ENCODER = ENCODER._replace(make=functools.partial(ENCODER.make, bias=False))
COMPILED: dict[str, tuple[Subject, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "norm-linear": (ONE_GEMM["norm-linear"], ALL_RETURNED, ("current",), ()),
    "mlp-rms-gated": (MLPS["mlp-rms-gated"], ALL_RETURNED, ("block",), ()),
    # Each of the slow ones is compiled quickly in test_compile.py.
    "mlp-checkpoint": (
        MLPS["mlp-checkpoint"], ALL_RETURNED, ("mx", "high"),
        ("current", "rowwise", "block", "nvfp4"),
    ),
    "grouped": (SPLITS_TENSOR, {}, ("high",), ()),
    "grouped-single": (EXPERTS["grouped-single"], {}, ("delayed", "block"), ()),
    "experts": (EXPERTS["experts"], NO_BIAS, ("delayed", "rowwise"), ()),
    "attention": (ATTENTIONS["attention"], {}, ("delayed-dpa",), ()),
    "cross-attention": (ATTENTIONS["cross-attention"], {}, (), ("current",)),
    "decoder": (ATTENTIONS["decoder"], {}, ("block",), ("delayed",)),
    # And these in the tests of the layer's parts.
    "encoder": (ENCODER, ROPE, (), ("block", "current-dpa", "delayed")),
    "layer": (DEFAULT_LAYER, ROPE, ("delayed-dpa",), ("current", "rowwise", "mx")),
}  # fmt: skip
"""Subjects, what they are made or called with, and recipes: quick ones and slow ones."""


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
    """In two steps: the second has scales that the first one's amaxes made, and other lengths."""
    torch._dynamo.reset()
    subject, how, *_ = COMPILED[label]
    recipe = BY_NAME[name]
    made, called = ({}, {n: t.to(device) for n, t in how.items()}) if how is ROPE else (how, {})
    module = subject.build(device, **made)
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
                y = subject.call(run, list(leaves), **called)
            outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
            sum(t.square().sum() for t in outputs).backward()
            gradients = [x.grad for x in (*leaves, *owner.parameters())]
            results.append([*(t.detach() for t in outputs), *gradients])
        assert same(*results)
        assert states(module) == states(plain)
    torch._dynamo.reset()


@each_compiled(*(label for label in COMPILED if label in GEMMS))
def test_compiles_without_breaks_and_equals_eager(label: str, name: str) -> None:
    check_compiled(label, name)


@each_compiled(*(label for label in COMPILED if label not in GEMMS))
def test_so_does_attention(label: str, name: str, device: Any) -> None:
    check_compiled(label, name, device)
