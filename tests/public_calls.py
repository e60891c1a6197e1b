"""Valid calls of public functions, modules and methods, from which tests derive wrong calls."""

import functools
import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import float8lab
from float8lab import distributed, formats, integrations, optim, recipes
from float8lab import nn as fnn
from float8lab.distributed.styles import PrepareFloat8ModuleInput
from float8lab.inspect import memory_report
from float8lab.inspect.damage import sensitivity

RECIPE = recipes.Float8CurrentScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=2)
H = 32  # features
S, B = 3, 2


class Call(NamedTuple):
    """A public callable, the arguments of a valid call, and how its result is used."""

    function: Callable[..., Any]
    arguments: Callable[[Path], dict[str, Any]]
    use: Callable[[Any], Any] = lambda result: None
    skip: tuple[str, ...] = ()
    """Parameters that take any value."""
    refusal: str = "(it works)"
    """The error of the valid call where there is no GPU or no group of processes."""
    wrong: Mapping[str, tuple[Any, ...]] = {}
    """Values by parameter whose type the parameter takes, but which must raise."""
    owner: Callable[[Path], Any] | None = None
    """Makes the object whose method ``function`` is; a call that raises must not change it."""


def _x(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, steps=torch.Size(shape).numel()).view(shape)


def _train(*inputs: Any) -> Callable[[Any], None]:
    """Forward and backward of a module, in high precision and in FP8, with finite results."""

    def use(module: Any) -> None:
        for enabled in (False, True):
            with float8lab.autocast(enabled, recipe=RECIPE):
                y = module(*inputs)
            outputs = [t for t in tree_leaves(y) if t is not None]
            assert all(t.isfinite().all() for t in outputs)
            sum(t.float().sum() for t in outputs).backward()
        repr(module)

    return use


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H))


def _converted() -> nn.Sequential:
    return float8lab.convert_to_float8(_model())


def _constant(**arguments: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: arguments


def _call(
    arguments: Callable[[Path], dict[str, Any]] = lambda folder: {},
    use: Callable[[Any], Any] = lambda result: None, *, of: Callable[..., Any] | None = None,
    **fields: Any,
) -> Callable[[str], Call]:  # fmt: skip
    """Return a call of what a name in the package is, or of the function ``of`` in its place."""
    return lambda name: Call(of or operator.attrgetter(name)(float8lab), arguments, use, **fields)


def _loss_of_model(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return _loss(model(batch))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def _linear_step(context: Any) -> None:
    with context:
        layer = float8lab.Linear(H, H)
        layer(_x(B, H)).sum().backward()


def _linear_forward(context: Any) -> None:
    with context, torch.no_grad():
        assert float8lab.Linear(H, H)(_x(B, H)).isfinite().all()


def _use_norm(norm: Any) -> None:
    _train(_x(*([B] if len(norm.normalized_shape) < 3 else []), *norm.normalized_shape))(norm)


def _use_rows(layer: Any) -> None:
    _train(_x(B, getattr(layer, "in_features", None) or layer.hidden_size))(layer)


def _use_attention(module: Any) -> None:
    q, k, v = (
        _x(S, B, heads, size)
        for heads, size in (
            (module.num_attention_heads, module.qk_channels),
            (module.num_gqa_groups, module.qk_channels),
            (module.num_gqa_groups, module.v_channels),
        )
    )
    if module.qkv_format == "thd" or module.attn_mask_type not in ("no_mask", "causal"):
        return
    y = module(*(x.requires_grad_() for x in (q, k, v)))
    assert all(x.isfinite().all() for x in tree_leaves(y))


def _use_layer(module: Any) -> None:
    size = getattr(module, "hidden_size", H)
    inner = getattr(module, "self_attention", module)
    if inner.qkv_format == "thd" or inner.attn_mask_type not in ("no_mask", "causal"):
        return
    _train(_x(S, B, size))(module)


def _use_angles(module: Any) -> None:
    angles = module(S)
    assert angles.isfinite().all()
    assert angles.shape[0] == S


def _use_cache(params: Any) -> None:
    attention = float8lab.DotProductAttention(2, 8, layer_number=1)
    q, k, v = torch.ones(3, 1, 1, 2, 8)
    torch.testing.assert_close(attention(q, k, v, inference_params=params), torch.ones(1, 1, 16))


def _export(model: nn.Module, folder: Path) -> Path:
    integrations.export(model, folder / "model", overwrite=True)
    return folder / "model"


def _megatron_checkpoint(folder: Path) -> Path:
    path = folder / "run" / "mp_rank_00"
    path.mkdir(parents=True, exist_ok=True)
    state = {"model": {"embedding.word_embeddings.weight": _x(8, H)}}
    torch.save(state, path / "model_optim_rng.pt")
    return path.parent


def _assert(truth: bool) -> None:
    assert truth


def _watch() -> Any:
    model = _converted()
    with float8lab.inspect.watch(model) as watch:
        model(_x(B, H)).sum().backward()
    return watch


def _log() -> Any:
    return _watch().log


_GPT2 = SimpleNamespace(
    n_embd=H, n_inner=None, n_head=2, n_layer=1, resid_pdrop=0.0, attn_pdrop=0.0,
    layer_norm_epsilon=1e-5, activation_function="gelu_new",
)  # fmt: skip


def _in_fp8(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` in a region with delayed scaling, whose state a failing call must not change."""

    @functools.wraps(forward)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with float8lab.autocast(recipe=DELAYED):
            return forward(module, *args, **kwargs)

    return run


def _are_finite(y: Any) -> None:
    assert all(t.isfinite().all() for t in tree_leaves(y) if t is not None)


def _called(make: Callable[[], nn.Module], arguments: dict[str, Any], folder: Path) -> nn.Module:
    """Return a module that was called in FP8, and so has state of delayed scaling."""
    module = make()
    _in_fp8(type(module).forward)(module, **arguments)
    return module


def _forward_calls() -> dict[str, Callable[[str], Call]]:
    """Calls of modules. Their use asserts finite outputs."""
    q, x, angles = _x(S, B, 2, 8), _x(S, B, H), _x(8, 1, 1, 8)
    padding = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    layer: dict[str, Any] = {"ffn_hidden_size": H, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    ends = torch.tensor([0, 1, 3])
    packed = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    qkv = {"query_layer": q, "key_layer": q, "value_layer": q}
    thd = {"query_layer": q[:, 0], "key_layer": q[:, 0], "value_layer": q[:, 0], **packed}
    inputs = (x[..., :-1], x.long(), x[0, 0, 0])
    no_mask = ("x", (padding,), (padding,) * 3, ("x", "x"), torch.ones(5, 7), padding[..., :2])
    not_lengths = ([0, 3, 6], torch.tensor([0.0, 3.0, 6.0]), torch.tensor([0, 3]), ends[None])
    too_long = torch.tensor([0, 3, 6])
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), (*not_lengths, too_long))
    mixed = {
        "query_layer": (q.half(), q[:, :1], q[..., :4]),
        "key_layer": (q.half(), q.double(), q[:, :1], q[:2], q.to("meta")),
        "value_layer": (q.half(), q.bfloat16(), q[:, :1], q[:2], q.to("meta")),
        "attention_mask": no_mask,
        **lengths,
        **{f"{name}_padded": wrong for name, wrong in lengths.items()},
        "alibi_slopes": (torch.ones(2),),
        "core_attention_bias": (torch.ones(S, S),),
    }
    padded = {
        "attention_mask": (*no_mask, padding.float(), padding[:1].expand(3, 1, 1, S)),
        "cu_seqlens_q": (*not_lengths, torch.tensor([0, 4, 5]), torch.tensor([0, 2, 1])),
        "cu_seqlens_kv": (*not_lengths, torch.tensor([0, 4, 5])),
    }
    layers = {
        "attention_mask": no_mask, **lengths, "hidden_states": inputs,
        "rotary_pos_emb": (angles[:2], angles[..., :7], (angles,)),
        "alibi_slopes": (torch.ones(4),), "core_attention_bias": (torch.ones(S, S),),
    }  # fmt: skip
    cross = {"encoder_output": (None, *inputs, x[:, :1])}
    modules: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
        "Linear": (partial(float8lab.Linear, H, H), {"inp": x}, {"inp": inputs}),
        "GroupedLinear": (
            partial(float8lab.GroupedLinear, 2, H, H), {"inp": x, "m_splits": [S * B, 0]},
            {"inp": inputs, "m_splits": ([S * B], [S * B + 1, 0], [-1, 1], [1.5, 1])},
        ),
        **{
            kind.__name__: (
                partial(kind, 2, 1), {"inp": x[0], "m_splits": [B, 0]},
                {"inp": (x, x[0].long()), "m_splits": ([B], [B + 1, 0], [-1, 1], [1.5, 1])},
            )
            for kind in (float8lab.Fp8Padding, float8lab.Fp8Unpadding)
        },
        "ExpertMLP": (
            partial(float8lab.ExpertMLP, 2, H, H),
            {"inp": x, "probs": torch.ones(S * B, 1), "routing_map": torch.ones(S * B, 1).long()},
            {"inp": inputs},
        ),
        "LayerNorm": (partial(float8lab.LayerNorm, H), {"inp": x}, {"inp": inputs}),
        "RMSNorm": (partial(float8lab.RMSNorm, H), {"inp": x}, {"inp": inputs}),
        "LayerNormLinear": (partial(float8lab.LayerNormLinear, H, H), {"inp": x}, {"inp": inputs}),
        "LayerNormMLP": (partial(float8lab.LayerNormMLP, H, H), {"inp": x}, {"inp": inputs}),
        "RotaryPositionEmbedding": (
            partial(float8lab.RotaryPositionEmbedding, 8), {"max_seq_len": S}, {}
        ),
        "DotProductAttention": (
            partial(float8lab.DotProductAttention, 2, 8, layer_number=1), qkv, mixed
        ),
        "DotProductAttention(padding)": (
            partial(float8lab.DotProductAttention, 2, 8, attn_mask_type="padding"),
            {**qkv, "attention_mask": padding}, padded,
        ),
        "DotProductAttention(arbitrary)": (
            partial(float8lab.DotProductAttention, 2, 8, attn_mask_type="arbitrary"),
            {**qkv, "attention_mask": padding},
            {"attention_mask": (None, *no_mask, padding.float()), "cu_seqlens_q": (ends,)},
        ),
        "DotProductAttention(bias)": (
            partial(float8lab.DotProductAttention, 2, 8),
            {
                **qkv, "core_attention_bias": torch.zeros(S, S),
                "core_attention_bias_type": "post_scale_bias",
            },
            {"core_attention_bias": (torch.zeros(5, 7), torch.zeros(S, S).long(), None)},
        ),
        "DotProductAttention(alibi)": (
            partial(float8lab.DotProductAttention, 2, 8),
            {**qkv, "alibi_slopes": torch.ones(2), "core_attention_bias_type": "alibi"},
            {"alibi_slopes": (torch.ones(3), torch.ones(3, 2), torch.ones(2).long())},
        ),
        "DotProductAttention(packed)": (
            partial(float8lab.DotProductAttention, 2, 8),
            {
                "query_layer": q, "key_layer": None, "value_layer": None,
                "kv_layer": torch.stack((q, q), 2),
            },
            {
                "query_layer": (None,), "key_layer": (q,), "value_layer": (q,),
                "kv_layer": (None, q, torch.stack((q, q, q), 2)), "qkv_interleave_dim": (-1, -2, 2),
                "qkv_layer": (torch.stack((q, q, q), 2),),
            },
        ),
        "DotProductAttention(thd)": (
            partial(
                float8lab.DotProductAttention, 2, 8, qkv_format="thd", attn_mask_type="padding"
            ),
            thd,
            {
                "cu_seqlens_q": (None, *not_lengths, torch.tensor([0, 1, 9])),
                "cu_seqlens_kv": (*not_lengths, torch.tensor([0, 1, 9])), "max_seqlen_q": (1,),
                "max_seqlen_kv": (1,), "attn_mask_type": ("causal",),
                "key_layer": (q[:, 0].half(), q[:2, 0]),
            },
        ),
        "MultiheadAttention": (
            partial(float8lab.MultiheadAttention, H, 4, layer_number=1, attention_dropout=0.0),
            {"hidden_states": x, "rotary_pos_emb": angles}, layers,
        ),
        "MultiheadAttention(cross)": (
            partial(float8lab.MultiheadAttention, 
                H, 4, attention_dropout=0.0, attention_type="cross", attn_mask_type="padding"
            ),
            {"hidden_states": x, "encoder_output": x, "attention_mask": (padding, padding)},
            cross,
        ),
        "TransformerLayer": (
            partial(float8lab.TransformerLayer, 
                H, num_attention_heads=4, layer_number=1, layer_type="decoder", **layer
            ),
            {"hidden_states": x, "encoder_output": x},
            {**layers, **cross, "enc_dec_attn_mask": no_mask},
        ),
        "TransformerLayer(encoder)": (
            partial(float8lab.TransformerLayer, H, num_attention_heads=4, layer_number=1, **layer),
            {"hidden_states": x},
            {**layers, "encoder_output": (x,), "enc_dec_attn_mask_type": ("x",)},
        ),
        "TransformerLayer(padding)": (
            partial(float8lab.TransformerLayer, 
                H, num_attention_heads=4, layer_type="decoder", self_attn_mask_type="padding",
                enc_dec_attn_mask_type="padding", **layer,
            ),
            {
                "hidden_states": x, "encoder_output": x, "attention_mask": padding,
                "enc_dec_attn_mask": (padding, padding),
            },
            {
                "attention_mask": padded["attention_mask"],
                "enc_dec_attn_mask": (*no_mask, padding, (padding, padding[..., :2])),
                "cu_seqlens_q": padded["cu_seqlens_q"],
            },
        ),
    }  # fmt: skip
    calls = {}
    for name, (make, arguments, wrong) in modules.items():
        forward = getattr(float8lab, name.partition("(")[0]).forward
        owner = functools.cache(partial(_called, make, arguments))
        for said, function in (("", forward), (" in FP8", _in_fp8(forward))):
            calls[f"{name}.forward{said}"] = _call(
                _constant(**arguments), _are_finite, of=function, wrong=wrong, owner=owner
            )
    return calls


def _tracker() -> float8lab.CudaRNGStatesTracker:
    tracker = float8lab.CudaRNGStatesTracker(device="cpu")
    tracker.add("model-parallel-rng", 1)
    return tracker


def _cache() -> float8lab.InferenceParams:
    params = float8lab.InferenceParams(B, 8)
    params.pre_step({"a": 1})
    params.append(1, *torch.ones(2, 1, 2, 1, 8))
    return params


def _stored() -> float8lab.Linear:
    with float8lab.fp8_model_init():
        return float8lab.Linear(H, H)


def _masters() -> optim.MasterWeights:
    optimizer = optim.MasterWeights(_stored().parameters(), torch.optim.SGD, lr=0.1)
    optimizer.step()
    return optimizer


def _delayed() -> fnn.ScalingState:
    model = float8lab.convert_to_float8(_model(), DELAYED)
    model(_x(B, H))
    return fnn.ScalingState(model)


def _sensitivity() -> Any:
    return sensitivity(_model(), _x(B, H), runs=1)


def _fork(tracker: float8lab.CudaRNGStatesTracker, name: str = "model-parallel-rng") -> None:
    with tracker.fork(name):
        torch.rand(1)


def _step(watch: Any, loss: Any = None) -> None:
    with watch:
        watch.step(loss)


def _checkpoint_report(folder: Path) -> Any:
    return float8lab.inspect.checkpoint(_export(_model(), folder))


def _checkpoint_diff(folder: Path) -> Any:
    return float8lab.inspect.diff(_export(_model(), folder), _model().state_dict())


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(H, H, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return y


def _quantized(**options: Any) -> float8lab.Float8Tensor:
    return float8lab.quantize(_x(B, H), **options)


def _parts() -> dict[str, Any]:
    x = _quantized()
    return {name: getattr(x, name) for name in ("qdata", "scale", "amax", "spec", "dtype")}


def _packed() -> dict[str, Any]:
    return {
        "packed": torch.full((1, 16), 0x21, dtype=torch.uint8),
        "scale": torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "tensor_scale": None,
        "spec": formats.MXFP4,
        "dtype": torch.bfloat16,
    }


def _method_calls() -> dict[str, Callable[[str], Call]]:
    """Calls of methods, with the object that ``owner`` makes."""
    x, q, keys = _quantized, _x(S, B, 2, 8), torch.ones(1, 2, 1, 8)
    per_block = float8lab.inspect.stats(x(), per_block=True)
    attention = float8lab.DotProductAttention
    return {
        "CudaRNGStatesTracker.add": _call(
            _constant(name="new", seed=2), owner=lambda folder: _tracker(),
            wrong={"name": (3, "model-parallel-rng"), "seed": (1.5, 1, "2", True)},
        ),
        "CudaRNGStatesTracker.fork": _call(
            _constant(), owner=lambda folder: _tracker(), wrong={"name": ("x",)},
            of=functools.wraps(float8lab.CudaRNGStatesTracker.fork)(_fork),
        ),
        "CudaRNGStatesTracker.set_states": _call(
            lambda folder: {"states": _tracker().get_states()}, owner=lambda folder: _tracker(),
            wrong={"states": ({"a": torch.ones(3)}, {"a": 1}, {3: torch.get_rng_state()})},
        ),
        "InferenceParams.pre_step": _call(
            _constant(tokens={"a": 1}), owner=lambda folder: _cache(),
            wrong={"tokens": ({"a": 1.5}, {"a": "x"}, {"a": -1}, {"a": 9}, {1: 1, 2: 1, 3: 1})},
        ),
        "InferenceParams.swap_key_value_dict": _call(
            _constant(batch_indices=[1, 0]), owner=lambda folder: _cache(),
            wrong={
                "batch_indices": (
                    [0, 5], [0.5, 1.0], torch.zeros(1, 1).long(), [-1], [0] * 3, {0: 1, 1: 0},
                    {0, 1}, b"10",
                ),
            },
        ),
        "InferenceParams.append": _call(
            _constant(layer_number=1, k=keys, v=keys), owner=lambda folder: _cache(),
            wrong={"k": (keys[0], keys[..., :4], keys.long()), "v": (keys[0], keys.long())},
        ),
        "DotProductAttention.explain": _call(
            _constant(query_layer=q, key_layer=q, value_layer=q), repr,
            owner=lambda folder: attention(2, 8), wrong={"key_layer": (q.half(),)},
        ),
        "Linear.set_tensor_parallel_group": _call(
            _constant(tp_group=None), owner=lambda folder: float8lab.Linear(H, H),
            wrong={"tp_group": ("x", 1)},
        ),
        "DotProductAttention.set_context_parallel_group": _call(
            _constant(cp_group=None), owner=lambda folder: attention(2, 8), skip=("cp_stream",),
            wrong={"cp_group": ("x", 1), "cp_comm_type": ("x",)},
        ),
        "ExpertMLP.from_experts": _call(
            lambda folder: {"experts": [_Expert(), _Expert()]}, repr,
            wrong={"names": (["w1"], ["w1", "w2", "x"]), "experts": ([nn.GELU()], [])},
        ),
        "ExpertMLP.run_rows": _call(
            _constant(rows=_x(B, H), m_splits=[B, 0]), _are_finite,
            owner=lambda folder: float8lab.ExpertMLP(2, H, H),
            wrong={"rows": (_x(B, 3),), "m_splits": ([B], [B + 1, 0], [-1, 1], [0.5, 1])},
        ),
        "Float8Tensor": _call(
            lambda folder: _parts(), lambda x: x.dequantize(),
            wrong={
                "qdata": (None, _x(B, H)),
                "scale": (None, torch.ones(2, 2), torch.ones(1), torch.ones(1, 1).half()),
                "amax": (None, torch.ones(2, 2), torch.ones(1)),
                "spec": (formats.NVFP4, formats.Float8Spec(block=(-1, -1, -1))),
                "dtype": (torch.int8, torch.float8_e4m3fn),
            },
        ),
        "Float4Tensor": _call(
            lambda folder: _packed(), lambda x: x.dequantize(),
            wrong={"spec": (formats.Float8Spec(),), "dtype": (torch.int8,)},
        ),
        "Float8Tensor.requantize_": _call(
            lambda folder: {"value": _x(B, H)}, owner=lambda folder: x(),
            wrong={"value": (_x(H), _x(B, H).long())},
        ),
        "Float8Tensor.stats": _call(
            _constant(), repr, owner=lambda folder: x(), wrong={"original": (_x(H),)}
        ),
        "Float8Tensor.compare": _call(
            lambda folder: {"original": _x(B, H)}, repr, owner=lambda folder: x(),
            wrong={"original": (_x(H),)},
        ),
        "Float8Tensor.histogram": _call(
            _constant(), repr, owner=lambda folder: x(), wrong={"by": ("x",)}
        ),
        **dict.fromkeys(
            ("inspect.TensorStats.count", "inspect.TensorStats.share"),
            _call(
                _constant(kind="zero"), owner=lambda folder: float8lab.inspect.stats(x()),
                wrong={"kind": ("x",)},
            ),
        ),
        "inspect.TensorStats.histogram": _call(
            owner=lambda folder: float8lab.inspect.stats(x()), wrong={"by": ("x",)}
        ),
        "inspect.BlockStats.share": _call(
            _constant(kind="zero"), owner=lambda folder: per_block, wrong={"kind": ("x",)}
        ),
        "inspect.MemoryReport.sum": _call(
            _constant(kind="weights"), owner=lambda folder: memory_report(_model(), _x(B, H)),
            wrong={"kind": ("x",)},
        ),
        **{
            f"inspect.{type(result).__name__}.tables": _call(
                _constant(limit=1), owner=lambda folder, result=result: result,
                wrong={"limit": (-1,)},
            )
            for result in (
                float8lab.inspect.diagnose(_log()), float8lab.inspect.compare(_log(), _log()),
                _sensitivity(), float8lab.inspect.advise(_model(), _x(B, H)),
                memory_report(_model(), _x(B, H)),
            )
        },
        "inspect.CheckpointReport.tables": _call(
            _constant(limit=1), owner=_checkpoint_report, wrong={"limit": (-1,)}
        ),
        "inspect.CheckpointDiff.tables": _call(
            _constant(limit=1), owner=_checkpoint_diff, wrong={"limit": (-1,)}
        ),
        **dict.fromkeys(
            [f"inspect.Sensitivity.{name}" for name in ("by_layer", "by_operand", "overrides")],
            _call(
                owner=lambda folder: _sensitivity(),
                wrong={"recipe": (recipes.MXFP8BlockScaling(),)},
            ),
        ),
        "inspect.watch.step": _call(
            owner=lambda folder: _watch(), of=functools.wraps(float8lab.inspect.watch.step)(_step)
        ),
        "inspect.watch.table": _call(owner=lambda folder: _watch()),
        "inspect.watch.to_jsonl": _call(
            lambda folder: {"path": folder / "log.jsonl"}, owner=lambda folder: _watch()
        ),
        "distributed.ModelState.load_state_dict": _call(
            lambda folder: {"state": distributed.ModelState(_stored()).state_dict()},
            owner=lambda folder: distributed.ModelState(_stored()),
            wrong={"state": ({}, {"weight": _x(H, H)}, {"weight.qdata": 1})},
        ),
        "distributed.Float8ReduceScatter.load_state_dict": _call(
            _constant(state={}), owner=lambda folder: distributed.Float8ReduceScatter({}),
            wrong={"state": ({":rank0": _x(1, H)}, {":rank0": 1})},
        ),
        "nn.ScalingState.load_state_dict": _call(
            lambda folder: {"state": _delayed().state_dict()}, owner=lambda folder: _delayed(),
            wrong={"state": ({}, {"x": 1})},
        ),
        "optim.MasterWeights.load_state_dict": _call(
            lambda folder: {"state_dict": _masters().state_dict()}, owner=lambda folder: _masters(),
            wrong={"state_dict": ({}, {"state": {}}, {"state": {}, "param_groups": []})},
        ),
        "optim.MasterWeights.add_param_group": _call(
            lambda folder: {"param_group": {"params": [nn.Parameter(_x(H))]}},
            owner=lambda folder: _masters(), wrong={"param_group": ({}, {"params": "x"})},
        ),
        "optim.MasterWeights.step": _call(owner=lambda folder: _masters()),
        "checkpoint": _call(
            lambda folder: {"function": nn.Linear(H, H)}, lambda y: y.sum().backward(),
            of=lambda **kwargs: float8lab.checkpoint(
                kwargs.pop("function"), _x(B, H).requires_grad_(), **kwargs
            ),
        ),
        "distributed.requantize_shards_": _call(
            _constant(parameters=[], values=[]),
            wrong={"parameters": ([_x(B, H)],), "values": ([_x(B, H)],)},
        ),
        "formats.Float8Spec": _call(
            _constant(), repr, wrong={"block": ((0, 1), (1.5, 1), "x"), "scale_rule": ("x",)}
        ),
        "formats.Float4Spec": _call(_constant(), repr, wrong={"block": ((1, 3), (2, 2))}),
        "formats.largest": _call(
            _constant(fp8_dtype=torch.float8_e5m2),
            wrong={"fp8_dtype": (torch.int8, torch.float32)},
        ),
        "formats.scale_shape": _call(
            _constant(shape=(B, H), block=(1, -1)),
            wrong={"shape": ((1,), (-1, 2)), "block": ((1,), (0, 1), (-2, 1))},
        ),
        "PrepareFloat8ModuleInput": _call(
            of=PrepareFloat8ModuleInput,
            skip=(
                "input_layouts", "desired_input_layouts", "input_kwarg_layouts",
                "desired_input_kwarg_layouts",
            ),
        ),
    }  # fmt: skip


_LINEAR: dict[str, Any] = {"in_features": H, "out_features": H, "device": "cpu"}
_TOKENS: dict[str, Any] = {"inp": _x(S, H), "routing_map": torch.eye(S, dtype=torch.bool)}
_CHUNKS = {"split_sizes": torch.tensor([1, 2]), "sorted_index": torch.tensor([1, 0])}

_BY_NAME: dict[str, Callable[[str], Call]] = {
    "Linear": _call(_constant(**_LINEAR), _use_rows),
    "LayerNorm": _call(_constant(hidden_size=H), _use_norm),
    "RMSNorm": _call(_constant(hidden_size=H), _use_norm),
    "GroupedLinear": _call(
        _constant(num_gemms=2, **_LINEAR),
        lambda layer: _train(_x(B, layer.in_features), [B] + [0] * (layer.num_gemms - 1))(layer),
    ),
    **dict.fromkeys(("Fp8Padding", "Fp8Unpadding"), _call(_constant(num_gemms=2, align_size=1))),
    "ExpertMLP": _call(
        _constant(num_experts=2, hidden_size=H, ffn_hidden_size=H, device="cpu"),
        lambda layer: _train(
            _x(B, layer.hidden_size), torch.ones(B, 1), torch.zeros(B, 1, dtype=torch.long)
        )(layer),
    ),
    "LayerNormLinear": _call(_constant(**_LINEAR), _use_rows),
    "LayerNormMLP": _call(_constant(hidden_size=H, ffn_hidden_size=H), _use_rows),
    "DotProductAttention": _call(
        _constant(num_attention_heads=2, kv_channels=8), _use_attention, skip=("cp_stream",),
        wrong={
            "backends": ("sdpa", (), ("x",)),
            "layer_number": (0,),
            "get_rng_state_tracker": (_loss,),
        },
    ),
    "MultiheadAttention": _call(
        _constant(hidden_size=H, num_attention_heads=2), _use_layer,
        wrong={"layer_number": (0,), "init_method": (_loss_of_model,)},
    ),
    "TransformerLayer": _call(
        _constant(hidden_size=H, ffn_hidden_size=H, num_attention_heads=2), _use_layer,
        wrong={"layer_number": (0,), "init_method": (_loss_of_model,)},
    ),
    "RotaryPositionEmbedding": _call(_constant(dim=8, device="cpu"), _use_angles),
    "apply_rotary_pos_emb": _call(
        _constant(t=_x(S, B, 2, 8), freqs=_x(8, 1, 1, 8)),
        lambda y: _assert(y.shape == (S, B, 2, 8)),
    ),
    "moe_dispatch": _call(
        _constant(**_TOKENS, probs=_x(S, S), gradient=None),
        lambda result: float8lab.moe_combine(result[0], result[-1]),
    ),
    "moe_combine": _call(
        lambda folder: {
            "out": _x(S, B), "handle": float8lab.moe_dispatch(**_TOKENS, probs=_x(S, S))[3]
        }
    ),
    "moe_permute": _call(_constant(**_TOKENS), lambda result: float8lab.moe_unpermute(*result)),
    "moe_permute_with_probs": _call(
        _constant(**_TOKENS, probs=_x(S, S)),
        lambda result: float8lab.moe_unpermute(result[0], result[2]),
    ),
    "moe_permute_and_pad_with_probs": _call(
        _constant(
            **_TOKENS, probs=_x(S, S), tokens_per_expert=torch.ones(S, dtype=torch.int64),
            align_size=2,
        ),
        lambda result: float8lab.moe_unpermute(
            result[0], result[2], restore_shape=(S, H), pad_offsets=result[3]
        ),
    ),
    "moe_unpermute": _call(
        lambda folder: dict(
            zip(("inp", "row_id_map"), float8lab.moe_permute(**_TOKENS), strict=True),
            merging_probs=_x(S, S),
        )
    ),
    "moe_sort_chunks_by_index": _call(_constant(inp=_x(S, H), **_CHUNKS)),
    "moe_sort_chunks_by_index_with_probs": _call(
        _constant(inp=_x(S, H), probs=_x(S), **_CHUNKS)
    ),
    "parallel_cross_entropy": _call(_constant(inp=_x(S, H), target=torch.arange(S))),
    "distributed.shard_sequence": _call(lambda folder: {"x": _x(B, H), "cp_group": None}),
    "distributed.join_sequence": _call(lambda folder: {"x": _x(B, H), "cp_group": None}),
    "distributed.get_batch_on_this_cp_rank": _call(
        lambda folder: {
            "cu_seqlens_padded": torch.tensor([0, B]),
            **dict.fromkeys(("input_ids_padded", "labels_padded", "position_ids_padded"), _x(B)),
            "cp_group": None,
        }
    ),
    "distributed.reduce_sequence_parallel_gradients": _call(
        lambda folder: {"model": nn.LayerNorm(H)}
    ),
    "distributed.fp8_reduce_scatter": _call(
        lambda folder: {"model": _model()}, refusal="model must be sharded"
    ),
    "nn.shard_state_dict": _call(
        lambda folder: {"model": _model(), "state_dict": _model().state_dict()}
    ),
    "nn.whole_state_dict": _call(lambda folder: {"model": _model()}),
    "router.fused_topk_with_score_function": _call(
        _constant(logits=_x(S, 8), topk=2, num_groups=4, group_topk=2, score_function="sigmoid"),
        lambda result: _assert(result[0].isfinite().all()),
    ),
    "router.fused_compute_score_for_moe_aux_loss": _call(
        _constant(logits=_x(S, 8), topk=2, score_function="softmax")
    ),
    "router.fused_moe_aux_loss": _call(
        _constant(
            probs=_x(S, B), tokens_per_expert=torch.ones(B), total_num_tokens=S, num_experts=B,
            topk=1, coeff=0.1,
        )
    ),
    **_forward_calls(),
    **_method_calls(),
    "InferenceParams": _call(_constant(max_batch_size=2, max_sequence_length=4), _use_cache),
    "CudaRNGStatesTracker": _call(_constant(), lambda t: t.add("a", 1)),
    **dict.fromkeys(
        ("autocast", "fp8_autocast", "fp8_model_init", "quantized_model_init"),
        _call(use=_linear_step),
    ),
    "convert_to_float8": _call(lambda folder: {"model": _model()}, repr),
    "to_high_precision": _call(lambda folder: {"model": _converted()}, lambda m: m(_x(B, H))),
    "conversion_report": _call(lambda folder: {"model": _converted()}, repr),
    "fallback": _call(_constant(policy="warn"), lambda result: float8lab.fallback("warn")),
    "get_cpu_offload_context": _call(_constant(enabled=True, model_layers=2)),
    "backward_on_this_core": _call(use=_linear_step),
    "graphed": _call(
        lambda folder: {"module": nn.Linear(H, H)}, lambda layer: layer(_x(B, H)).sum().backward()
    ),
    "make_graphed_callables": _call(
        lambda folder: {"modules": nn.Linear(H, H), "sample_args": (_x(B, H),)},
        skip=("sample_kwargs", "pool"), refusal="must have a CUDA GPU",
    ),
    "onnx_export": _call(use=_linear_forward),
    "quantize": _call(_constant(x=_x(B, H)), lambda q: _assert(q.isfinite().all())),
    "nn.ScalingState": _call(lambda folder: {"model": _converted()}, lambda s: s.state_dict()),
    "nn.convert_norms": _call(lambda folder: {"model": nn.LayerNorm(H)}),
    **dict.fromkeys(
        (
            "recipes.DelayedScaling", "recipes.Float8BlockScaling", "recipes.Float8CurrentScaling",
            "recipes.Float8RowwiseScaling", "recipes.MXFP8BlockScaling",
            "recipes.NVFP4BlockScaling",
        ),
        _call(_constant(), lambda recipe: _train(_x(B, H))(float8lab.Linear(H, H))),
    ),
    "recipes.Auto": _call(
        _constant(), repr,
        wrong={"candidates": ((), [RECIPE], (None,), (recipes.MXFP8BlockScaling(),))},
    ),
    "optim.MasterWeights": _call(
        lambda folder: {"params": _model().parameters(), "optimizer_class": torch.optim.SGD},
        lambda optimizer: optimizer.step(), skip=("params",),
    ),
    "inspect.advise": _call(
        lambda folder: {"model": _model(), "batch": _x(B, H)}, repr, skip=("batch",),
        wrong={"loss_fn": (_loss,), "filter_fn": (_loss,)},
    ),
    "inspect.sensitivity": _call(
        lambda folder: {"model": _model(), "batch": _x(B, H), "loss_fn": _loss_of_model, "runs": 1},
        repr, skip=("batch",), wrong={"loss_fn": (_loss,), "filter_fn": (_loss,)},
    ),
    "inspect.memory_report": _call(
        lambda folder: {"model": _model(), "batch": _x(B, H)}, repr, skip=("batch",),
        wrong={"loss_fn": (_loss,)},
    ),
    "inspect.find_nan": _call(
        lambda folder: {"model": _model(), "batch": _x(B, H), "loss_fn": _loss}, repr,
        skip=("batch",), wrong={"loss_fn": (_loss_of_model,)},
    ),
    "inspect.watch": _call(lambda folder: {"model": _converted()}),
    "inspect.diagnose": _call(lambda folder: {"log": _log()}),
    "inspect.track": _call(lambda folder: {"log": _log(), "to": lambda metrics, step: None}),
    "inspect.report": _call(lambda folder: {"log": _log(), "path": folder / "report.html"}),
    **{
        f"inspect.{name}": _call(lambda folder: {"x": float8lab.quantize(_x(B, H))}, repr)
        for name in ("stats", "blocks", "histogram", "html", "summary", "table", "plot")
    },
    "inspect.compare": _call(
        lambda folder: {"x": float8lab.quantize(_x(B, H)), "original": _x(B, H)}
    ),
    "inspect.health": _call(
        lambda folder: {"found": float8lab.inspect.stats(float8lab.quantize(_x(B, H)))}
    ),
    "inspect.bars": _call(
        lambda folder: {"histogram": float8lab.inspect.histogram(float8lab.quantize(_x(B, H)))}
    ),
    "inspect.checkpoint": _call(lambda folder: {"path": _export(_model(), folder)}, repr),
    "inspect.diff": _call(
        lambda folder: {"a": _export(_model(), folder), "b": _model().state_dict()}, repr
    ),
    "integrations.export": _call(
        lambda folder: {"model": _model(), "path": folder / "model", "overwrite": True}, repr
    ),
    "integrations.export_stream": _call(
        lambda folder: {"model": _model()}, lambda stream: repr([name for name, _ in stream])
    ),
    "integrations.load_fp8": _call(
        lambda folder: {"source": _export(_model(), folder), "model": _model()}, repr
    ),
    "integrations.load_te_scaling": _call(
        lambda folder: {"source": {}, "model": float8lab.Linear(H, H)}, skip=("source",),
        refusal="must have delayed scales",
    ),
    "integrations.read_megatron": _call(
        lambda folder: {"path": _megatron_checkpoint(folder), "vocab_size": 5},
        lambda result: _assert(result.state["embedding.word_embeddings.weight"].shape[1] == H),
    ),
    "integrations.to_transformer_layers": _call(
        lambda folder: {
            "state": {"model.layers.0.input_layernorm.weight": _x(H)}, "style": "llama"
        }
    ),
    "integrations.from_transformer_layers": _call(
        lambda folder: {
            "state": {"0.self_attention.layernorm_qkv.layer_norm_weight": _x(H)}, "style": "llama"
        }
    ),
    "integrations.transformer_layers": _call(
        lambda folder: {"config": _GPT2, "style": "gpt2"}, skip=("config", "overrides")
    ),
    "distributed.ModelState": _call(lambda folder: {"model": _model()}, lambda s: s.state_dict()),
    "distributed.broadcast_parameters": _call(
        lambda folder: {"module": _model()}, refusal="process group has not been initialized"
    ),
}  # fmt: skip
"""Calls by the callable's name in the package; forwards of modules have names of their own."""
CALLS: dict[str, Call] = {name: make(name) for name, make in _BY_NAME.items()}
