"""LayerNorm and RMSNorm of torch, with a fused backward and Transformer Engine's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from float8lab import arguments
from float8lab.distributed.comm import inherit_tokens, mark_sequence_parallel
from float8lab.nn.gemm import output_dtype
from float8lab.nn.norm_function import NormKind, normalize
from float8lab.nn.parallel import ignore_extra_state
from float8lab.nn.parameters import default_device, materialize

__all__ = ["LayerNorm", "RMSNorm", "check_norm", "convert_norms", "normalized_size"]


def normalized_size(
    hidden_size: int | Sequence[int] | None, normalized_shape: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the shape of a norm, given under either of two names, as a tuple.

    >>> normalized_size(64, None), normalized_size(None, [4, 16])
    ((64,), (4, 16))
    """
    if (hidden_size is None) == (normalized_shape is None):
        raise ValueError(
            "hidden_size must be given, or normalized_shape, which means the same; got "
            f"{arguments.shown(hidden_size)} and {arguments.shown(normalized_shape)}. Pass one of "
            "the two."
        )
    name, shape = "hidden_size", hidden_size
    if hidden_size is None:
        name, shape = "normalized_shape", normalized_shape
    if not isinstance(shape, (list, tuple)):
        return (arguments.check_size(name, shape),)
    if not shape:
        raise ValueError(f"{name} must have at least one size; got {shape}. Give the last one.")
    return tuple(arguments.check_size(f"{name}[{i}]", size) for i, size in enumerate(shape))


def check_norm(normalization: str, name: str, eps: float) -> float:
    """Check a module's kind of norm and its epsilon, called ``name``; return the epsilon."""
    arguments.check_choice("normalization", normalization, ("LayerNorm", "RMSNorm"))
    return arguments.check_number(name, eps, minimum=0)


def _dtype(params_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype:
    arguments.check_dtype("params_dtype", params_dtype)
    arguments.check_dtype("dtype", dtype)
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(
            f"params_dtype must be dtype, which means the same; got {params_dtype} and {dtype}. "
            "Pass one of the two."
        )
    return params_dtype or dtype or torch.get_default_dtype()


class _Norm(nn.Module):
    """Base of the two norms, which differ in ``_center``."""

    _center: ClassVar[bool]
    normalized_shape: tuple[int, ...]
    eps: Any  # torch's norms declare it differently

    def __init__(
        self,
        hidden_size: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        *,
        normalized_shape: int | Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # torch's norms would make their own parameters
        self.register_load_state_dict_pre_hook(ignore_extra_state)
        arguments.check_flags(sequence_parallel=sequence_parallel)
        arguments.check_flags(zero_centered_gamma=zero_centered_gamma)
        self.eps = eps = arguments.check_number("eps", eps, minimum=0)
        self.normalized_shape = shape = normalized_size(hidden_size, normalized_shape)
        self.elementwise_affine = True
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self._kind = NormKind(center=self._center, eps=eps, zero_centered=zero_centered_gamma)
        target = arguments.check_device("device", device) or default_device()
        options: Any = {"device": target, "dtype": _dtype(params_dtype, dtype)}
        self.weight = nn.Parameter(torch.empty(shape, **options))
        if self._center:
            self.bias = nn.Parameter(torch.empty(shape, **options))
        if target.type != "meta":
            self.reset_parameters()
        mark_sequence_parallel(self, sequence_parallel, "weight", "bias")

    def reset_parameters(self) -> None:
        """Set gamma to 1 (0 if it is zero-centered) and the bias to 0, on ``Linear``'s device."""
        materialize(self)
        nn.init.constant_(self.weight, 0.0 if self._kind.zero_centered else 1.0)
        if self._center:
            nn.init.zeros_(self.bias)

    def forward(self, inp: Tensor) -> Tensor:
        """Apply the norm.

        Args:
            inp: ``[..., hidden_size]``.
        """
        x, shape = inp, self.normalized_shape
        arguments.check_input("inp", x, shape, "hidden_size")
        bias = self.bias.flatten() if self._center else None
        flat = x.flatten(x.ndim - len(shape)) if len(shape) > 1 else x
        y = normalize(flat, self.weight.flatten(), bias, self._kind, output_dtype(x))
        y = y.reshape(x.shape) if len(shape) > 1 else y
        return inherit_tokens(y, x) if self.sequence_parallel else y


class LayerNorm(_Norm, nn.LayerNorm):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension.

    Shape: input ``[..., hidden_size]`` with any leading dimensions, also zero; output the same.

    Numerics: statistics and arithmetic are float32 (float64 for float64 input), rounded once to the
    dtype of torch.autocast if that is active, else of the input. The input is saved for backward,
    with two numbers for each row.

    Args:
        hidden_size: size of the last dimension, or sizes of the last dimensions.
        eps: a number added to the variance.
        sequence_parallel: mark the parameters (``parameter.sequence_parallel``), so that a trainer
            sums their gradients over tensor-parallel ranks.
        params_dtype: dtype of the parameters; None is the default dtype.
        zero_centered_gamma: multiply by ``1 + weight``; the weight then starts from 0.
        device: as in ``Linear``.
        normalized_shape: another name of ``hidden_size``.
        dtype: another name of ``params_dtype``.

    Raises:
        ValueError: both names of an argument are given, or neither name of the size.

    >>> norm = float8lab.LayerNorm(4, device="cpu")
    >>> norm(torch.tensor([[1.0, 1.0, 3.0, 3.0]])).round(decimals=3)
    tensor([[-1., -1.,  1.,  1.]], grad_fn=<RoundBackward1>)
    """

    _center = True


class RMSNorm(_Norm, nn.RMSNorm):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Shape, numerics, parameters and errors are those of ``LayerNorm``, without a bias; ``eps`` is
    added to the mean square.

    >>> norm = float8lab.RMSNorm(4, zero_centered_gamma=True, device="cpu")
    >>> norm(torch.tensor([[2.0, -2.0, 2.0, -2.0]])).round(decimals=3)
    tensor([[ 1., -1.,  1., -1.]], grad_fn=<RoundBackward1>)
    """

    _center = False


def convert_norms(model: nn.Module) -> dict[str, str | None]:
    """Convert the ``torch.nn.LayerNorm`` and ``RMSNorm`` of a model to this library's, in place.

    The same objects change their class, as in ``convert_to_float8``; parameters are shared.

    Returns:
        The reason why a norm was not converted, by qualified name; None for a converted norm.

    >>> float8lab.nn.convert_norms(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)))
    {'0': None, '1': "eps None means one by the input's dtype"}
    """
    arguments.check_module("model", model)
    obstacles: dict[str, str | None] = {}
    for name, norm in model.named_modules():
        if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and not isinstance(norm, _Norm):
            obstacles[name] = _obstacle(norm)
            if obstacles[name] is None:
                _convert(norm)
    return obstacles


def _obstacle(norm: nn.LayerNorm | nn.RMSNorm) -> str | None:
    """Return the reason why a norm cannot be converted, or None."""
    if type(norm) not in (nn.LayerNorm, nn.RMSNorm):
        return f"{type(norm).__name__} is a class of its own"
    if "forward" in vars(norm):
        return "forward was replaced on the layer itself"
    if norm.weight is None:
        return "it has no weight"
    if isinstance(norm, nn.LayerNorm) and norm.bias is None:
        return "it has no bias"
    return "eps None means one by the input's dtype" if norm.eps is None else None


def _convert(norm: Any) -> None:  # its class changes
    norm.__class__ = LayerNorm if type(norm) is nn.LayerNorm else RMSNorm
    norm.zero_centered_gamma = norm.sequence_parallel = False
    norm._kind = NormKind(center=norm._center, eps=norm.eps, zero_centered=False)
