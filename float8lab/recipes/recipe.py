"""Recipes say how the three GEMMs of a linear layer are cast to FP8. They are plain frozen data.

``y = x @ w.T`` (fprop), ``dx = dy @ w`` (dgrad), ``dw = dy.T @ x`` (wgrad). For each GEMM a recipe
says whether it runs in FP8, and if so how its two operands are cast: six ``Spec`` in all. It also
says where the amax comes from. ``Recipe.linear`` holds exactly these facts; modules read them and
never ask for a recipe's class.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

from float8lab.arguments import check_instance
from float8lab.formats import Spec, largest

__all__ = [
    "ALL", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Float8RowwiseScaling",
    "Format", "GemmPlan", "LinearPlan", "MXFP8BlockScaling", "NVFP4BlockScaling", "Recipe",
    "check_recipe", "recipe_numbered",
]  # fmt: skip


class _FormatPair(NamedTuple):
    forward: torch.dtype
    backward: torch.dtype

    @property
    def max_fwd(self) -> float:
        """The largest finite value of the forward tensors' format."""
        return largest(self.forward)

    @property
    def max_bwd(self) -> float:
        """The largest finite value of the gradients' format."""
        return largest(self.backward)


class Format(Enum):
    """FP8 formats of the forward tensors (x, w) and of the gradients (dy)."""

    E4M3 = _FormatPair(torch.float8_e4m3fn, torch.float8_e4m3fn)
    """Everything in e4m3: 3 mantissa bits, largest value 448."""
    E5M2 = _FormatPair(torch.float8_e5m2, torch.float8_e5m2)
    """Everything in e5m2: 2 mantissa bits, largest value 57344."""
    HYBRID = _FormatPair(torch.float8_e4m3fn, torch.float8_e5m2)
    """e4m3 forward, e5m2 for gradients."""


class GemmPlan(NamedTuple):
    """The casts of the operands of one GEMM, ``left @ right.T``; blocks refer to operand rows."""

    left: Spec
    right: Spec
    fast_accum: bool
    """Let the tensor cores accumulate with fewer bits."""


_SAVES = {"auto": 2**25, "fp8": sys.maxsize, "recompute": 0}
"""The size at which backward recasts an input; to save less memory is not worth a launch."""


class LinearPlan(NamedTuple):
    """The casts and the GEMMs of a linear layer under a recipe."""

    fprop: GemmPlan | None
    """The GEMM of x and w; None where this GEMM runs in high precision."""
    dgrad: GemmPlan | None
    """The GEMM of dy and w transposed."""
    wgrad: GemmPlan | None
    """The GEMM of dy transposed and x transposed."""
    x: Spec
    """The cast of x for fprop, for other uses in FP8, and for an x that is stored in FP8."""
    w: Spec
    dy: Spec
    delayed: bool
    """Whether scales come from the amax history instead of from the tensor itself."""
    epsilon: float
    """The recipe's ``amax_epsilon``."""
    recast_size: int = sys.maxsize
    """The number of elements from which backward recasts x instead of saving its FP8 data."""

    def gemms(self) -> dict[str, GemmPlan | None]:
        """Return the three GEMMs by name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def token_blocks(self) -> set[int]:
        """The numbers of tokens in operand blocks, except 1 and -1 (all tokens)."""
        sizes = {gemm.left.block[0] for gemm in (self.fprop, self.dgrad) if gemm}
        if self.wgrad:
            sizes |= {self.wgrad.left.block[1], self.wgrad.right.block[1]}
        return sizes - {1, -1}

    @property
    def largest_block(self) -> int:
        """The largest block size that does not span a dimension; all other sizes divide it."""
        specs = [self.x, self.w, self.dy, *(s for gemm in self[:3] if gemm for s in gemm[:2])]
        return max(1, *(size for spec in specs for size in spec.block))

    @property
    def casts_x_once(self) -> bool:
        """Whether fprop and wgrad run in FP8 and take x in the same format and block size."""
        return bool(self.fprop and self.wgrad and self.fprop.left == self.wgrad.right)

    @property
    def amax_epsilon(self) -> float:
        """The smallest amax from which a scale is computed."""
        return float(self.epsilon)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Recipe:
    """Base class of all recipes: frozen, keyword-only, compared and hashed by value."""

    fp8_format: Format = Format.HYBRID
    """Number formats of forward tensors and gradients."""
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    """Run the fprop, dgrad, wgrad GEMM in high precision instead of FP8."""
    fast_accum: tuple[bool, bool, bool] = (True, False, False)
    """Let the fprop, dgrad, wgrad GEMM accumulate with fewer bits where the GPU offers it."""
    fp8_dpa: bool = False
    """Run dot-product attention in FP8 (read by attention modules only)."""
    fp8_mha: bool = False
    """Run it in FP8 like ``fp8_dpa``; tensors between attention and its projections stay in high
    precision."""
    save: str = "auto"
    """How a layer's input is saved for wgrad. ``"fp8"`` saves its FP8 data. ``"recompute"`` saves
    nothing where backward can recompute the input from other saved tensors, else FP8 data.
    ``"auto"`` acts as ``"recompute"`` for large inputs and as ``"fp8"`` for small ones."""

    def __post_init__(self) -> None:
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        for field, value in values:
            if field.name in ("override_linear_precision", "fast_accum"):
                is_triple = isinstance(value, tuple) and [*map(type, value)] == [bool] * 3
                self._require(is_triple, field.name, "a tuple of three bools")
            if isinstance(field.default, bool):
                self._require(isinstance(value, bool), field.name, "a bool")
        if isinstance(self.fp8_format, Spec):
            raise _packed("fp8_format", self.fp8_format)
        self._require(isinstance(self.fp8_format, Format), "fp8_format", "a recipes.Format")
        is_known = isinstance(self.save, str) and self.save in _SAVES
        self._require(is_known, "save", f"one of {', '.join(map(repr, _SAVES))}")
        self._check()
        shown = [f"{f.name}={_show(value)}" for f, value in values if value != f.default]
        key = (type(self), *(value for _, value in values))
        object.__setattr__(self, "_repr", f"{type(self).__name__}({', '.join(shown)})")
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))
        plan = self._plan()
        casts = {"x": plan.x, "w": plan.w, "dy": plan.dy}
        for name, gemm in plan.gemms().items():
            if gemm is not None:
                casts |= {f"{name}'s left": gemm.left, f"{name}'s right": gemm.right}
        for operand, spec in casts.items():
            if spec.is_packed:
                raise _packed(f"the cast of {operand}", spec)
        object.__setattr__(self, "linear", plan)
        object.__setattr__(self, "number", self._numbers.setdefault(self, len(self._numbers)))

    # __post_init__ sets these once on each instance. They are declared as ClassVar so that they are
    # no dataclass fields and take no part in __init__, fields() or replace().
    linear: ClassVar[LinearPlan]
    number: ClassVar[int]
    """The number of this recipe in this process, by which a compiled graph refers to it."""
    _numbers: ClassVar[dict[Recipe, int]] = {}
    """All recipes of this process with their numbers, in numerical order; none is ever removed."""
    _repr: ClassVar[str]
    _key: ClassVar[tuple[Any, ...]]
    _hash: ClassVar[int]

    def _require(self, condition: bool, field: str, requirement: str) -> None:
        if not condition:
            raise ValueError(
                f"{field} must be {requirement}; got {getattr(self, field)!r}. "
                f"See the fields of recipes.{type(self).__name__}."
            )

    def _check(self) -> None:
        """Check the fields of a recipe whose GEMMs take e4m3 and e5m2."""
        epsilon: Any = getattr(self, "amax_epsilon", 0.0)
        number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
        is_usable = number and 0 <= epsilon < float("inf")
        self._require(is_usable, "amax_epsilon", "a finite number >= 0")
        formats = "Format.E4M3 or Format.HYBRID (no GPU multiplies e5m2 by e5m2)"
        self._require(self.fp8_format is not Format.E5M2, "fp8_format", formats)

    def _plan(self) -> LinearPlan:
        raise NotImplementedError("construct one of the recipes in float8lab.recipes")

    def _make_plan(
        self, *, x: tuple[int, int], w: tuple[int, int], scale_rule: str | None = None,
        wgrad: bool = True, delayed: bool = False,
    ) -> LinearPlan:  # fmt: skip
        """Make a plan with these blocks; this recipe's fields give the other settings."""
        forward, backward = self.fp8_format.value
        if scale_rule is None:
            scale_rule = "pow2" if getattr(self, "power_of_2_scale", False) else "fp32"
        x_spec, w_spec = (Spec(forward, block, scale_rule) for block in (x, w))
        dy_spec = Spec(backward, x, scale_rule)
        pairs = ((x_spec, w_spec), (dy_spec, w_spec), (dy_spec, x_spec))
        options = zip(pairs, self.override_linear_precision, self.fast_accum, strict=True)
        fprop, dgrad, wgrad_plan = (
            None if skips_fp8 else GemmPlan(*pair, fast) for pair, skips_fp8, fast in options
        )
        return LinearPlan(
            fprop, dgrad, wgrad_plan if wgrad else None, x_spec, w_spec, dy_spec, delayed=delayed,
            epsilon=float(getattr(self, "amax_epsilon", 0.0)), recast_size=_SAVES[self.save],
        )  # fmt: skip

    def __repr__(self) -> str:
        return self._repr

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Recipe) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # __dict__ is not pickled, since its hash and number are valid only in this process.
        return _make, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})


def check_recipe(name: str, value: Any) -> None:
    """Raise unless ``value`` is a recipe or None."""
    if isinstance(value, Spec):
        raise _packed(name, value)
    check_instance(name, value, Recipe, "one of float8lab.recipes", optional=True)


def _packed(name: str, spec: Spec) -> NotImplementedError:
    return NotImplementedError(
        f"{name} must be made of formats that GEMMs take; got {spec.describe()}, for which there "
        "is no kernel yet. Choose an FP8 recipe; a frozen weight stored in 4 bits is dequantized "
        "and multiplied in high precision."
    )


@functools.cache
def recipe_numbered(number: int) -> Recipe:
    """Return a recipe that equals the one with this ``number``."""
    return next(itertools.islice(Recipe._numbers, number, None))


def _make(kind: type[Recipe], values: dict[str, Any]) -> Recipe:
    return kind(**values)


def _show(value: Any) -> str:
    if isinstance(value, Format):
        return f"Format.{value.name}"
    if isinstance(value, functools.partial):
        return f"partial({_show(value.func)}, {value.args}, {value.keywords})"
    if callable(value):  # its repr may have its address, which is another in each process
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DelayedScaling(Recipe):
    """One scale per tensor, computed from the amaxes of earlier steps.

    ``encode = 2 ** (floor(log2(largest / amax)) - margin)``, with amax chosen from a history of
    ``amax_history_len`` steps; the decode scale is its inverse. A tensor without history is scaled
    by its own amax.
    """

    margin: int = 0
    """The encode scale is divided by ``2 ** margin``, for headroom; from -100 to 100."""
    interval: int = 1
    """Recompute the scale on every ``interval``-th step."""
    amax_history_len: int = 1
    """Number of steps that the amax history holds."""
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "most_recent"
    """``"max"`` of the history, its ``"most_recent"`` entry, or a function from the history
    ``[amax_history_len, slots]`` (newest first) to one amax per slot."""
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    """A replacement for the formula: ``f(amax, old_scaling_factor, fp8_max, recipe)`` returns the
    new encode scales; all tensors are ``[slots]``."""
    reduce_amax: bool = True
    """Reduce amaxes over the ranks of the autocast's group at every update."""
    power_of_2_scale: bool = True
    """Round the encode scale down to a power of two, which makes dequantizing exact."""

    def _check(self) -> None:
        algo, factor = self.amax_compute_algo, self.scaling_factor_compute_algo
        is_usable = algo in ("max", "most_recent") if isinstance(algo, str) else callable(algo)
        is_margin = _is_int(self.margin) and abs(self.margin) <= 100  # 2 ** margin fits in float32
        self._require(is_margin, "margin", "an integer from -100 to 100")
        self._require(_is_int(self.interval) and self.interval > 0, "interval", "an integer > 0")
        has_length = _is_int(self.amax_history_len) and self.amax_history_len > 0
        self._require(has_length, "amax_history_len", "an integer > 0")
        self._require(is_usable, "amax_compute_algo", '"max", "most_recent" or a callable')
        is_optional = factor is None or callable(factor)
        self._require(is_optional, "scaling_factor_compute_algo", "None or a callable")
        super()._check()

    def _plan(self) -> LinearPlan:
        return self._make_plan(x=(-1, -1), w=(-1, -1), delayed=True)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, computed from the tensor itself: ``amax / largest``."""

    power_of_2_scale: bool = False
    """Round the encode scale down to a power of two."""
    amax_epsilon: float = 0.0
    """Smaller amaxes are raised to this value."""

    def _plan(self) -> LinearPlan:
        return self._make_plan(x=(-1, -1), w=(-1, -1))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Float8RowwiseScaling(Recipe):
    """One scale per token and per output channel (per row of each GEMM operand)."""

    fp8_format: Format = Format.E4M3
    power_of_2_scale: bool = False
    """Round the encode scales down to a power of two."""
    amax_epsilon: float = 0.0
    """Smaller amaxes are raised to this value."""
    high_precision_wgrad: bool = False
    """Compute the weight gradient in high precision."""

    def _plan(self) -> LinearPlan:
        return self._make_plan(x=(1, -1), w=(1, -1), wgrad=not self.high_precision_wgrad)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Float8BlockScaling(Recipe):
    """1x128 blocks for activations and gradients, 128x128 blocks for weights.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.
    """

    fp8_format: Format = Format.E4M3
    fast_accum: tuple[bool, bool, bool] = (False, False, False)
    power_of_2_scale: bool = False
    """Round the encode scales down to a power of two."""
    amax_epsilon: float = 0.0
    """Smaller amaxes are raised to this value."""

    def _plan(self) -> LinearPlan:
        return self._make_plan(x=(1, 128), w=(128, 128))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MXFP8BlockScaling(Recipe):
    """OCP MX: 1x32 blocks with power-of-two (e8m0) scales, along the contraction of every GEMM.

    Only GPUs of SM 10 have MX tensor cores. On other GPUs the operands are quantized, dequantized
    and multiplied in high precision, and reports say so.
    """

    fp8_format: Format = Format.E4M3
    fast_accum: tuple[bool, bool, bool] = (False, False, False)

    def _plan(self) -> LinearPlan:
        return self._make_plan(x=(1, 32), w=(1, 32), scale_rule="e8m0")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NVFP4BlockScaling(Recipe):
    """e2m1 in 1x16 blocks, with an e4m3 scale per block and a float32 scale per tensor.

    Weights have 16x16 blocks, so that backward multiplies by exactly the weight that forward used.
    A block that holds inf or NaN gets the scale NaN.

    No kernel multiplies 4-bit data yet: operands are quantized, dequantized and multiplied in high
    precision, and reports say so. Meanwhile an element takes a byte, and the two scales of a block
    are held as their float32 product. Attention under ``fp8_dpa`` runs in ``fp8_format``.

    Two parts of NVIDIA's training recipe are missing: random Hadamard transforms of the operands of
    wgrad, and stochastic rounding of gradients.

    Source: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
    """

    fp8_format: Format = Format.E4M3
    fast_accum: tuple[bool, bool, bool] = (False, False, False)
    disable_2d_quantization: bool = False
    """Give weights 1x16 blocks, too; a transposed weight then has scales of its own."""

    def _check(self) -> None:
        self._require(self.fp8_format is Format.E4M3, "fp8_format", "Format.E4M3")

    def _plan(self) -> LinearPlan:
        weight = (1, 16) if self.disable_2d_quantization else (16, 16)
        return self._make_plan(x=(1, 16), w=weight, scale_rule="e2m1 e4m3 fp32")


ALL: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=16, amax_compute_algo="max"),
    "current": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mx": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
"""The recipes by short name, with usual field values, for code that chooses, reports or compares
recipes. Those with measured speed are ordered by their numerics, the coarsest first."""
