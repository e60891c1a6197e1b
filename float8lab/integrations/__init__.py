"""Other libraries and their formats."""

from float8lab.integrations.onnx import onnx_export

__all__ = ["onnx_export"]
