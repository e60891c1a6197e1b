"""Linear layers of other libraries that are not torch.nn.Linear, and their FP8 classes.

``convert_to_float8`` recognises such a layer by the qualified name of its class, without an
import of the library; the module that supports the library registers the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from float8lab.nn.casts import plain
from float8lab.nn.gemm import LinearFunction
from float8lab.nn.layer import describe_fp8, linear_in_high_precision
from float8lab.nn.parameters import MovedInPlace
from float8lab.nn.precision import Call, Precision
from float8lab.tensor import Float8Tensor

__all__ = ["OtherLinear", "known_linear", "load_float8_class", "register_linear"]


class OtherLinear(MovedInPlace):
    """Base of the FP8 class of another library's linear layer.

    It comes before the library's class in the bases: ``class Float8Conv1D(OtherLinear, Conv1D)``.
    The layer has a parameter ``weight`` in any layout, and a ``bias``, ``[out]`` or None.

    Attributes:
        original: the library's class, which ``to_high_precision`` restores.
    """

    original: ClassVar[type]
    loaders: ClassVar[dict[str, Callable[[], type[OtherLinear]]]] = {}
    """Functions that load the FP8 class of a linear layer, by the qualified name of the layer's
    class; ``register_linear`` adds them."""
    gemm_names: ClassVar[tuple[str, ...]] = ("",)
    """The suffixes after ``_fp8`` in the names of the GEMMs' FP8 states."""
    _fp8: Precision
    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def matrix(layer: Any) -> Tensor:
        """Return the weight of a layer, converted or not, as a view ``[out, in]``."""
        raise NotImplementedError

    @staticmethod
    def from_matrix(matrix: Tensor) -> Tensor:
        """Return the weight of which ``matrix`` is the view."""
        raise NotImplementedError

    @property
    def out_features(self) -> int:
        """Size of the last dimension of the output."""
        return self.matrix(self).shape[0]

    @property
    def in_features(self) -> int:
        """Size of the last dimension of the input."""
        return self.matrix(self).shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``[..., in]`` and return ``[..., out]``."""
        weight = self.matrix(self)
        call = self._fp8.begin(x, weight, training=self.training)
        return self._gemm(self._fp8, x, weight, self.bias, call)

    def _gemm(
        self, precision: Precision, x: Tensor, weight: Tensor, bias: Tensor | None,
        call: Call | None,
    ) -> Tensor:  # fmt: skip
        """Compute ``x @ weight.T + bias``, without a call in high precision or to calibrate."""
        x = x.dequantize() if isinstance(x, Float8Tensor) else x
        if call is None:
            return linear_in_high_precision(precision, x, plain(weight), bias, None)
        y: Tensor = LinearFunction.run(x, weight, bias, call)
        if call.is_region:
            precision.end(call)
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{describe_fp8(self)}".removeprefix(", ")


def register_linear(name: str, load: Callable[[], type[OtherLinear]]) -> None:
    """Make ``convert_to_float8`` convert layers of a class.

    Args:
        name: module and name of the class, as in ``"transformers.pytorch_utils.Conv1D"``.
        load: returns the FP8 class, and is called only when a model has such a layer.
    """
    OtherLinear.loaders[name] = load


def known_linear(cls: type) -> Any:
    """Return the class of linear layers, of torch or registered, that ``cls`` derives from."""
    if issubclass(cls, nn.Linear):
        return nn.Linear
    return next((base for base in cls.__mro__ if _name(base) in OtherLinear.loaders), None)


def load_float8_class(linear_class: type) -> type[OtherLinear]:
    """Return the FP8 class of a registered class."""
    return OtherLinear.loaders[_name(linear_class)]()


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
