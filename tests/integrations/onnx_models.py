"""Models exported to ONNX, and what onnxruntime computes with them."""

import pytest
import torch

import float8lab

onnx = pytest.importorskip("onnx", reason="needs the extra 'onnx'")
pytest.importorskip("onnxscript", reason="needs the extra 'onnx'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")


def in_context(recipe):
    return float8lab.autocast(enabled=recipe is not None, recipe=recipe)


def export(model, inputs, recipe, path, *, dynamic=False, opset=21):
    """Export a model; all but the features of a ``dynamic`` input may have other sizes."""
    shapes = None
    if dynamic:
        dims = range(inputs[0].ndim - 1)
        shapes = (dict.fromkeys(dims, torch.export.Dim.DYNAMIC),)
    with float8lab.onnx_export(enabled=True), in_context(recipe):
        program = torch.onnx.export(
            model, inputs, dynamo=True, opset_version=opset, verbose=False, dynamic_shapes=shapes
        )
    program.save(path)
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    assert {node.domain for node in proto.graph.node} == {""}  # standard operators alone
    return proto


def count(proto, op):
    return sum(node.op_type == op for node in proto.graph.node)


def run(path, inputs):
    options = onnxruntime.SessionOptions()
    # Its rewriting of int8 pairs takes FP8 ones too, up to 1.31, and then has no kernel for them.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(path, options)
    names = [i.name for i in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feed)]


def eager(model, inputs, recipe):
    with torch.no_grad(), in_context(recipe):
        y = model(*inputs)
    return y if isinstance(y, tuple) else (y,)
