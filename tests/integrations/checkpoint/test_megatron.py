"""Checkpoints in the layouts of Megatron-LM and Transformer Engine, made from a plain reference."""

import io
import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import float8lab
from float8lab import integrations
from float8lab.__main__ import main
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.inspect import CheckpointError
from float8lab.nn.precision import precisions
from tests.integrations.checkpoint import layouts
from tests.integrations.checkpoint.layouts import (
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    WORDS,
    CallOnUnpickling,
    Decoder,
)


def save(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch about one process
        dcp.save(state, checkpoint_id=path, no_dist=True)


def rename_metadata_class(path):
    """Name the class of Megatron, which has one field more than torch's."""
    data = path.read_bytes()
    torch_name, megatron_name = (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n",
    )
    protocol2 = pickle.dumps(pickle.loads(data), protocol=2)
    assert torch_name in protocol2
    path.write_bytes(protocol2.replace(torch_name, megatron_name))


def assert_close(actual, expected):
    """Assert that float32 values are equal up to the order of sums."""
    assert (actual - expected).norm() <= 64 * torch.finfo(expected.dtype).eps * expected.norm()


def assert_equals_reference(checkpoint, model, **options):
    """Assert that the layers of a checkpoint give the outputs of the reference."""
    layers = integrations.transformer_layers(checkpoint.args, "megatron", device="cpu", **options)
    state = integrations.to_transformer_layers(checkpoint.state, "megatron")
    layer_state = {name: value for name, value in state.items() if name[0].isdigit()}
    layers.load_state_dict(layer_state)  # strictly
    x = torch.randn(5, 2, HIDDEN)
    y = x
    for layer in layers:
        y = layer(y)
    assert_close(y, model(x))
    restored = integrations.from_transformer_layers(layers.state_dict(), "megatron")
    assert all(torch.equal(restored[name], checkpoint.state[name]) for name in restored)
    for name, expected in (("embedding.word_embeddings", model.words), ("output_layer", model.out)):
        assert torch.equal(state[f"{name}.weight"], expected)
    assert torch.equal(state["decoder.final_layernorm.weight"], model.norm)
    return layers, state


@pytest.mark.parametrize("llama", [True, False])
@pytest.mark.parametrize(("tp", "pp", "virtual"), [(1, 1, 1), (4, 1, 1), (2, 2, 2)])
def test_files_of_ranks_are_joined(tmp_path, llama, tp, pp, virtual):
    model = Decoder(llama)
    layouts.write_ranks(tmp_path / "run", model, tp, pp, virtual)
    checkpoint = integrations.read_megatron(tmp_path / "run", vocab_size=WORDS)
    assert checkpoint.kind == f"Megatron-LM, {tp} tensor-parallel by {pp} pipeline ranks"
    layers, state = assert_equals_reference(checkpoint, model)
    third_layer = integrations.read_megatron(tmp_path / "run", layer="decoder.layers.3").state
    assert third_layer.keys() == {name for name in checkpoint.state if ".layers.3." in name}
    report = integrations.load_te_scaling(
        {name: x for name, x in state.items() if name[0].isdigit()}, layers
    )
    names = ("self_attention.layernorm_qkv", "self_attention.proj")
    assert set(report.loaded) >= {f"2.{name}" for name in (*names, "layernorm_mlp.fc2")}
    slots = {n: next(iter(p.slots.values())) for n, p in precisions(layers[3].layernorm_mlp)}
    for seed, name in ((1, "fc1"), (2, "fc2")):
        saved_scaling = layouts.scales(1, seed)
        expected = 1 / torch.stack([*saved_scaling["scale_fwd"][:2], saved_scaling["scale_bwd"][0]])
        assert torch.equal(slots[name].tensors()["scale"], expected)


@pytest.mark.parametrize("halves", [True, False])
def test_distributed_checkpoints_equal_files_of_ranks(tmp_path, halves):
    model = Decoder(llama=True)
    layouts.write_distributed(tmp_path / "new", model, halves=halves, save=save)
    if halves:
        rename_metadata_class(tmp_path / "new" / ".metadata")
    assert_equals_reference(integrations.read_megatron(tmp_path / "new", vocab_size=WORDS), model)
    # The files of ranks have the same values, also in a part of a tensor.
    rank_files = open_checkpoint(layouts.write_ranks(tmp_path / "old", model, 4, 2))
    entries_by_name = {entry.name: entry for entry in open_checkpoint(tmp_path / "new").entries}
    for entry in rank_files.entries:
        if entry.name.endswith("weight"):
            box = tuple(slice(n // 3, 1 + 2 * n // 3) for n in entry.shape)
            assert torch.equal(entry.read(box), entries_by_name[entry.name].read(box)), entry.name
            assert torch.equal(entry.read(box), entry.read()[box])


def test_experts_of_distributed_checkpoints_are_joined(tmp_path):
    name = "decoder.layers.mlp.experts.experts.linear_fc1"
    stacked = torch.randn(2, 3, 8, 5)  # layers, experts, features of both halves, inputs
    halves = zip("wv", stacked.chunk(2, 2), strict=True)
    save({f"{name}.weight_{half}": x.contiguous() for half, x in halves}, tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, tmp_path / "common.pt")
    state_read = integrations.read_megatron(tmp_path).state
    for layer in range(2):
        layer_name = name.replace("layers", f"layers.{layer}")
        assert torch.equal(state_read[f"{layer_name}.weight"], stacked[layer])


def test_the_copy_of_a_tied_embedding_is_not_read(tmp_path):
    model = Decoder(llama=True)
    layouts.write_ranks(tmp_path / "run", model, 1, 2, untie_embeddings_and_output_weights=False)
    assert "output_layer.weight" not in integrations.read_megatron(tmp_path / "run").state


def test_inspect_and_diff_commands_read_megatron_checkpoints(tmp_path, capsys):
    model = Decoder(llama=True, words=64)
    paths = [layouts.write_ranks(tmp_path / f"{tp}", model, tp) for tp in (1, 2)]
    assert main(["inspect", str(paths[1].parent)]) == 0
    assert "Megatron-LM, 2 tensor-parallel by 1 pipeline ranks" in capsys.readouterr().out
    assert main(["diff", "--layer", "*weight", *map(str, paths)]) == 0
    assert main(["inspect", str(paths[1] / "mp_rank_01")]) == 0
    assert "Megatron-LM, a file of one rank" in capsys.readouterr().out
    with torch.no_grad():
        model.layers[3].down.weight[0, -1] += 1
    other = layouts.write_ranks(tmp_path / "other", model, 4)
    capsys.readouterr()
    assert main(["diff", "--layer", "*weight", str(paths[1]), str(other)]) == 1
    assert "decoder.layers.3.mlp.linear_fc2.weight" in capsys.readouterr().out


def test_unknown_names_are_listed_rank_by_rank(tmp_path):
    path = layouts.write_ranks(tmp_path / "run", Decoder(llama=True), 2)
    for rank in range(2):
        file = path / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        torch.save({"model": {"mixer.A_log": torch.ones(4)}}, file)
    source = open_checkpoint(path)
    names = [entry.name for entry in source.entries]
    assert names == ["mp_rank_00/mixer.A_log", "mp_rank_01/mixer.A_log"]
    assert "1 tensors are listed rank by rank" in source.notes[0]
    with pytest.raises(CheckpointError, match=r"must be a whole checkpoint; .* mixer.A_log"):
        integrations.read_megatron(path)


def _missing(path):
    shutil.rmtree(path / "mp_rank_01")


def _empty(path):
    (path / "mp_rank_01" / "model_optim_rng.pt").unlink()


def _without_model(path):
    torch.save({"iteration": 3}, path / "mp_rank_00" / "model_optim_rng.pt")


def _experts(path):
    (path / "mp_rank_00").rename(path / "mp_rank_00_000_000")


def _truncated(path):
    file = path / "mp_rank_02" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-200])


def _stored(path):
    torch.save({"model": {"linear_proj.weight": _Named()}}, path / "mp_rank_00/model_optim_rng.pt")


class _Named:
    """An object that is no tensor."""


def test_pickled_code_in_a_file_is_not_run(tmp_path):
    created, inner = tmp_path / "made", io.BytesIO()
    torch.save(CallOnUnpickling(os.mkdir, str(created)), inner)
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir()
    calls = [
        CallOnUnpickling(os.mkdir, str(created)),
        CallOnUnpickling(torch.storage._load_from_bytes, inner.getvalue()),
        CallOnUnpickling(getattr, str, "format"),
        CallOnUnpickling(eval, f"__import__('os').mkdir({str(created)!r})"),
    ]
    torch.save({"model": {"norm.weight": torch.ones(2)}, "args": calls}, file)
    assert list(integrations.read_megatron(tmp_path).state) == ["norm.weight"]
    torch.save({"model": {"norm.weight": calls[3]}}, file)
    with pytest.raises(CheckpointError, match=r"norm.weight is a __builtin__.eval"):
        integrations.read_megatron(tmp_path)
    assert not created.exists()


class Float8Tensor:
    """Pickled as FP8 weights of Transformer Engine are, by a class method and its arguments."""

    def __init__(self, *values):
        self.values = values

    @classmethod
    def _make_in_reduce_ex(cls, *values):
        raise AssertionError("nothing of a file is run")

    def __reduce_ex__(self, protocol):
        return type(self)._make_in_reduce_ex, self.values


class Float8BlockwiseQTensor(Float8Tensor):
    pass


def test_fp8_weights_of_transformer_engine_are_dequantized(tmp_path):
    weights = {}
    for name, block in (("linear_qkv", (-1, -1)), ("linear_fc1", (128, 128))):
        weight = float8lab.quantize(torch.randn(384, 200, dtype=torch.bfloat16), block=block)
        qdata, dtype = weight.qdata.view(torch.uint8), torch.bfloat16
        if block[0] == -1:
            stored = Float8Tensor(qdata, 7, weight.scale.reshape(1), dtype, weight.shape)
        else:  # scales are padded to a multiple of 4 columns
            scale = torch.nn.functional.pad(weight.scale, (0, 2))
            arguments = (weight.shape, qdata, scale, None, None)
            stored = Float8BlockwiseQTensor(*arguments, 7, dtype, None, True)
        weights[f"{name}.weight"] = weight, stored
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    torch.save({"model": {name: stored for name, (_, stored) in weights.items()}}, path)
    state_read = integrations.read_megatron(tmp_path).state
    for name, (weight, _) in weights.items():
        assert torch.equal(state_read[name], weight.dequantize())
        assert state_read[name].dtype == torch.bfloat16


DAMAGES = {
    "missing": (_missing, {}, "that of rank 1 and 0 is missing"),
    "no file": (_empty, {}, r"must have model_optim_rng.pt; it has none"),
    "no model": (_without_model, {}, "must have a model; it has iteration"),
    "experts": (_experts, {}, "must have no expert-parallel ranks; mp_rank_00_000_000 is one"),
    "truncated": (_truncated, {}, "it is not one, or it is damaged"),
    "stored in FP8": (_stored, {}, "linear_proj.weight is a tests.*_Named"),
    "expert arguments": (None, {"expert_model_parallel_size": 2}, "its arguments say 2"),
    "other ranks": (None, {"tensor_model_parallel_size": 8}, "of 8 tensor-parallel .* of 4 and 1"),
    "copies": (None, {"num_query_groups": 2}, "at least as many query groups .* has 2 and 4"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_unreadable_checkpoints_raise_with_the_reason(tmp_path, case):
    damage, changes, message = DAMAGES[case]
    path = layouts.write_ranks(tmp_path / "run", Decoder(llama=True), 4, **changes)
    if damage is not None:
        damage(path)
    with pytest.raises(CheckpointError, match=message):
        integrations.read_megatron(path)


def test_missing_iterations_and_layers_raise(tmp_path):
    path = layouts.write_ranks(tmp_path / "run", Decoder(llama=True), 1)
    path.rename(path.with_name("iter_0000001"))
    with pytest.raises(CheckpointError, match="its folder must exist; it says '7'"):
        integrations.read_megatron(tmp_path / "run")
    save({"weight": torch.ones(2)}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"is the part of one rank; open .*iter_0000001"):
        integrations.read_megatron(tmp_path / "run" / "iter_0000001" / "mp_rank_00")
    with pytest.raises(CheckpointError, match="layer must match a tensor"):
        integrations.read_megatron(tmp_path / "run" / "iter_0000001", layer="encoder")
    with pytest.raises(CheckpointError, match="must be a checkpoint of Megatron-LM"):
        integrations.read_megatron(tmp_path / "dcp")


def test_a_model_without_tensors_raises(tmp_path):
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    torch.save({"model": {}}, path)
    for layer in ((), "decoder"):
        with pytest.raises(CheckpointError, match="must have tensors of a model; it has none"):
            integrations.read_megatron(tmp_path, layer=layer)


def test_a_configuration_with_experts_raises():
    args = layouts.argparse.Namespace(num_layers=1, hidden_size=32, num_experts=8)
    with pytest.raises(NotImplementedError, match="plain attention and no experts"):
        integrations.transformer_layers(args, "megatron")


# Transformer Engine's modules, on one rank.


@pytest.mark.parametrize("llama", [True, False])
@pytest.mark.parametrize("layout", ["split", "grouped", "apart"])
def test_a_transformer_engine_layer_loads_strictly(llama, layout):
    model = layouts.Layer(llama)
    layer = float8lab.TransformerLayer(
        HIDDEN, FFN, HEADS, GROUPS, hidden_dropout=0.0, attention_dropout=0.0, bias=not llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        activation="swiglu" if llama else "gelu", fuse_qkv_params=layout != "split",
        qkv_weight_interleaved=layout == "grouped", device="cpu",
    )  # fmt: skip
    state = layouts.of_transformer_engine(model, layout)
    layer.load_state_dict(state)
    x = torch.randn(5, 2, HIDDEN)
    assert_close(layer(x), model(x))
    report = integrations.load_te_scaling(state, layer)
    assert report.loaded == ("self_attention.layernorm_qkv", "layernorm_mlp")


MODULES = {
    "Linear": (lambda: float8lab.Linear(8, 16, device="cpu"), ["weight", "bias"]),
    "LayerNormLinear": (
        lambda: float8lab.LayerNormLinear(8, 16, device="cpu"),
        ["layer_norm_weight", "layer_norm_bias", "weight", "bias"],
    ),
    "LayerNormMLP": (
        lambda: float8lab.LayerNormMLP(8, 16, device="cpu"),
        [f"{part}_{kind}" for part in ("layer_norm", "fc1", "fc2") for kind in ("weight", "bias")],
    ),
    "GroupedLinear": (
        lambda: float8lab.GroupedLinear(2, 8, 16, device="cpu"),
        ["weight0", "weight1", "bias0", "bias1"],
    ),
    "MultiheadAttention": (
        lambda: float8lab.MultiheadAttention(8, 2, device="cpu"),
        [f"{n}_{k}" for n in ("qkv.query", "qkv.key", "qkv.value") for k in ("weight", "bias")]
        + ["proj.weight", "proj.bias"],
    ),
    "DotProductAttention": (lambda: float8lab.DotProductAttention(2, 4), []),
    "LayerNorm": (lambda: float8lab.LayerNorm(8, device="cpu"), ["weight", "bias"]),
    "RMSNorm": (lambda: float8lab.RMSNorm(8, device="cpu"), ["weight"]),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_parameter_names_of_transformer_engine(name):
    build, names = MODULES[name]
    module = build()
    own_state = module.state_dict()
    assert sorted(own_state) == sorted(names)
    values = {n: torch.randn_like(x) for n, x in own_state.items()}
    extras = (torch.empty(0, dtype=torch.uint8), layouts.saved_file(None), None)
    for extra in extras:
        module.load_state_dict({**values, "_extra_state": extra})
        torch.nn.Sequential(module).load_state_dict(
            {**{f"0.{n}": x for n, x in values.items()}, "0._extra_state": extra}
        )
    assert all(torch.equal(x, values[n]) for n, x in module.state_dict().items())
    with pytest.raises(RuntimeError, match="unknown"):
        module.load_state_dict({**values, "unknown": torch.ones(1)})
