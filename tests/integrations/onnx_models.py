"""Export of models to ONNX, and the outputs of onnxruntime and of eager mode."""

import pytest
import torch

import float8lab

onnx = pytest.importorskip("onnx", reason="needs the extra 'onnx'")
pytest.importorskip("onnxscript", reason="needs the extra 'onnx'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")


def autocast_with(recipe):
    return float8lab.autocast(enabled=recipe is not None, recipe=recipe)


def export(model, inputs, recipe, path, *, dynamic=False, opset=21):
    """Export a model; each size of a ``dynamic`` input may vary, except its number of features."""
    shapes = None
    if dynamic:
        dims = range(inputs[0].ndim - 1)
        shapes = (dict.fromkeys(dims, torch.export.Dim.DYNAMIC),)
    with float8lab.onnx_export(enabled=True), autocast_with(recipe):
        program = torch.onnx.export(
            model, inputs, dynamo=True, opset_version=opset, verbose=False, dynamic_shapes=shapes
        )
    program.save(path)
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    assert {node.domain for node in proto.graph.node} == {""}  # only standard operators
    return proto


def count_nodes(proto, op):
    return sum(node.op_type == op for node in proto.graph.node)


def onnx_outputs(path, inputs):
    options = onnxruntime.SessionOptions()
    # Up to 1.31 its rewriting of int8 pairs also takes FP8 pairs, and then has no kernel for them.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(path, options)
    names = [i.name for i in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feed)]


def eager_outputs(model, inputs, recipe):
    with torch.no_grad(), autocast_with(recipe):
        y = model(*inputs)
    return y if isinstance(y, tuple) else (y,)
