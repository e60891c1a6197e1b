"""Report versions, GPUs, and what FP8 this machine runs natively, emulates or lacks, and why."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

import torch

from float8lab.arguments import EXTRAS
from float8lab.formats import E2M1, E4M3, Float8Spec, gemm_support
from float8lab.inspect.text import Grid, Printed
from float8lab.ops import has_fp8_attention
from float8lab.ops.attention import LARGEST_HEAD
from float8lab.ops.declare import capability_of, casts_by_kernel
from float8lab.ops.gemm import may_multiply
from float8lab.recipes import ALL, Recipe

__all__ = [
    "Environment", "Support", "environment", "package_version", "why_attention_is_emulated",
    "why_casts_are_missing", "why_gemm_is_emulated",
]  # fmt: skip

_DRIVER = Path("/proc/driver/nvidia/version")


def why_casts_are_missing(device: torch.device) -> str:
    """Return why this device cannot cast to FP8, or an empty string if it can."""
    lacks_triton = device.type == "cuda" and util.find_spec("triton") is None
    return "the kernels need triton, which is not installed" if lacks_triton else ""


def why_gemm_is_emulated(
    a_block: Sequence[int], b_block: Sequence[int], device: torch.device,
    a_dtype: torch.dtype = E4M3, b_dtype: torch.dtype = E4M3,
) -> str:  # fmt: skip
    """Return why a GEMM dequantizes these operands on this device; empty if it runs in FP8."""
    if device.type != "cuda":
        return "a CPU has no FP8 GEMM; it multiplies in float32"
    if E2M1 in (a_dtype, b_dtype):
        return "no kernel multiplies e2m1"
    if may_multiply(a_block, b_block, device, a_dtype=a_dtype, b_dtype=b_dtype):
        return ""
    support, capability = gemm_support(a_block, b_block), capability_of(device)
    if support is None:
        blocks = (Float8Spec(block=tuple(block)).granularity for block in (a_block, b_block))
        return f"no FP8 GEMM of {' by '.join(blocks)} blocks"
    if support.includes(capability):
        pair = "1x32 blocks of e5m2" if tuple(a_block) == (1, 32) else "e5m2 by e5m2"
        return f"no GPU multiplies {pair}"
    if a_block[1] == b_block[1] == -1:
        return f"FP8 tensor cores came with SM 8.9; this GPU is {_sm(capability)}"
    return f"blocks are multiplied on {_sm(support.since)} only; this GPU is {_sm(capability)}"


def why_attention_is_emulated(device: torch.device, *heads: int) -> str:
    """Return why unmasked FP8 attention has no kernel on this device; empty if it has one."""
    if device.type != "cuda":
        return "a CPU has no FP8 GEMM; it multiplies in float32"
    if has_fp8_attention(device, *heads):
        return ""
    if not has_fp8_attention(device):
        return f"the kernel is for SM 9.0; this GPU is {_sm(capability_of(device))}"
    return f"the kernel is for heads of up to {LARGEST_HEAD}"


@dataclass(frozen=True)
class Support:
    """How one recipe, or FP8 attention, runs on this machine."""

    name: str
    status: str
    """``"native"``, ``"partly native"``, ``"emulated"``, ``"high precision"`` or ``"missing"``."""
    reason: str


@dataclass(frozen=True, repr=False)
class Environment(Printed):
    """The versions and hardware of this machine, for ``print`` or as ``to_json()``."""

    versions: dict[str, str]
    gpus: list[str]
    """Name, compute capability and memory of each GPU."""
    device: str
    """The device that ``support`` describes."""
    support: list[Support]
    extras: dict[str, str]
    """For each extra, the packages that are missing, or ``"installed"``."""

    def to_json(self) -> dict[str, object]:
        """Return all fields as dicts, lists and strings."""
        return asdict(self)

    def summary(self) -> str:
        """Return all fields as lines of text."""
        rows = [(kernel.name, kernel.status, kernel.reason) for kernel in self.support]
        gpus = [(str(n), gpu) for n, gpu in enumerate(self.gpus)] or [("none", "")]
        grids = (
            Grid("versions", ("", ""), list(self.versions.items())),
            Grid("GPUs", ("", ""), gpus),
            Grid(f"FP8 on {self.device}", ("", "", ""), rows),
            Grid("extras", ("", ""), list(self.extras.items())),
        )
        title = f"float8lab {self.versions['float8lab']} on {self.device}"
        return "\n".join([title, *map(repr, grids)])


def environment(device: torch.device | str | None = None) -> Environment:
    """Collect the versions, GPUs and FP8 support of this machine.

    Args:
        device: the device whose FP8 support is described; by default the current GPU, or the CPU.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    gpus = [
        f"{gpu.name}, {_sm((gpu.major, gpu.minor))}, {gpu.total_memory / 2**30:.0f} GiB"
        for gpu in map(torch.cuda.get_device_properties, numbers)
    ]
    return Environment(
        versions=_versions(), gpus=gpus, device=str(device),
        support=[*(_support(recipe, device) for recipe in ALL.values()), _attention(device)],
        extras={name: _missing(needed) for name, needed in EXTRAS.items()},
    )  # fmt: skip


def package_version() -> str:
    """Return the version of float8lab."""
    # A plain import would be upwards: modules import downwards, and the package is the top.
    return importlib.import_module("float8lab").__version__


def _versions() -> dict[str, str]:
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "float8lab": package_version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": next((d.version for d in metadata.distributions(name="triton")), "not installed"),
        "CUDA": torch.version.cuda or "none (torch is built without it)",
        "driver": _driver(),
        "cuDNN": "none" if cudnn is None else str(cudnn),
    }


def _driver() -> str:
    """Read the NVIDIA driver's version from a file of Linux, since torch does not tell it."""
    text = _DRIVER.read_text() if _DRIVER.exists() else ""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d[\d.]*)", text, re.M)
    return match[1] if match else "unknown" if torch.cuda.is_available() else "none"


def _support(recipe: Recipe, device: torch.device) -> Support:
    name = type(recipe).__name__
    if missing := why_casts_are_missing(device):
        return Support(name, "missing", missing)
    gemms = {name: gemm for name, gemm in recipe.linear.gemms().items() if gemm is not None}
    why = {
        name: why_gemm_is_emulated(a.block, b.block, device, a.element_dtype, b.element_dtype)
        for name, (a, b, _) in gemms.items()
    }
    emulated = {gemm: reason for gemm, reason in why.items() if reason}
    if not emulated:
        return Support(name, "native", "")
    reasons = "; ".join(dict.fromkeys(emulated.values()))
    if not casts_by_kernel(device):
        reasons += "; PyTorch casts, since Triton knows e4m3 from SM 8.9 on"
    if len(emulated) == len(gemms):
        return Support(name, "emulated", reasons)
    return Support(name, "partly native", f"not {', '.join(emulated)}: {reasons}")


def _attention(device: torch.device) -> Support:
    missing = why_casts_are_missing(device)
    why = missing or why_attention_is_emulated(device, 128, 128)
    without = "missing" if missing else "high precision" if device.type == "cuda" else "emulated"
    return Support("FP8 attention", without if why else "native", why)


def _missing(packages: Sequence[str]) -> str:
    missing = [package for package in packages if util.find_spec(package) is None]
    return f"missing {', '.join(missing)}" if missing else "installed"


def _sm(capability: tuple[int, int]) -> str:
    return f"SM {capability[0]}.{capability[1]}"
