"""Tests of `float8lab env`: it says what is native on this machine and on simulated GPUs."""

import json
import re
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from float8lab.arguments import EXTRAS
from float8lab.formats import E4M3, E5M2
from float8lab.inspect import environment as environment_module
from float8lab.inspect.environment import (
    environment,
    why_attention_is_emulated,
    why_casts_are_missing,
    why_gemm_is_emulated,
)
from float8lab.ops import declare, gemm

GPU = torch.device("cuda")
BLOCK, TENSOR, ROW = (1, 128), (-1, -1), (1, -1)


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Simulate a GPU of this capability and a CUDA version, with or without triton."""

    def set_up(capability, cuda=(13, 0), triton=True):
        monkeypatch.setattr(declare, "_capability_of", lambda device: capability)
        monkeypatch.setattr(gemm, "_cuda_version", lambda: cuda)
        monkeypatch.setattr(torch.version, "cuda", ".".join(map(str, cuda)))
        find_spec = environment_module.util.find_spec
        monkeypatch.setattr(
            environment_module.util,
            "find_spec",
            lambda name: triton or None if name == "triton" else find_spec(name),
        )

    return set_up


def support_text():
    return "\n".join(
        " | ".join((row.name, row.status, row.reason)).rstrip() for row in environment(GPU).support
    )


@pytest.mark.parametrize("cuda", [{}, {"cuda": (12, 8)}], ids=["", "CUDA 12.8"])
def test_support_on_hopper(pretend_gpu, cuda):
    pretend_gpu((9, 0), **cuda)
    assert_expected_inline(
        support_text(),
        """\
DelayedScaling | native |
Float8CurrentScaling | native |
Float8RowwiseScaling | native |
Float8BlockScaling | native |
MXFP8BlockScaling | emulated | blocks are multiplied on SM 10.0 only; this GPU is SM 9.0
NVFP4BlockScaling | emulated | no kernel multiplies e2m1
FP8 attention | native |""",
    )


@pytest.mark.parametrize("capability", [(8, 9), (12, 0)], ids=["before Hopper", "RTX Blackwell"])
def test_support_on_gpus_with_fp8_that_are_not_hopper(pretend_gpu, capability):
    pretend_gpu(capability)
    sm = "SM {}.{}".format(*capability)
    assert_expected_inline(
        support_text().replace(f"this GPU is {sm}", "this GPU is (its SM)"),
        """\
DelayedScaling | native |
Float8CurrentScaling | native |
Float8RowwiseScaling | native |
Float8BlockScaling | emulated | blocks are multiplied on SM 9.0 only; this GPU is (its SM)
MXFP8BlockScaling | emulated | blocks are multiplied on SM 10.0 only; this GPU is (its SM)
NVFP4BlockScaling | emulated | no kernel multiplies e2m1
FP8 attention | high precision | the kernel is for SM 9.0; this GPU is (its SM)""",
    )


def test_mxfp8_is_native_on_sm_10(pretend_gpu):
    pretend_gpu((10, 0))
    assert "MXFP8BlockScaling | native |" in support_text()


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6)])
def test_gpus_before_sm_8_9_cast_in_pytorch_and_emulate_gemms(pretend_gpu, capability):
    pretend_gpu(capability)
    *emulated, attention = environment(GPU).support
    assert {row.status for row in emulated} == {"emulated"}
    assert all("PyTorch casts, since Triton knows e4m3 from" in row.reason for row in emulated)
    assert "FP8 tensor cores came with SM 8.9; this GPU is" in emulated[0].reason
    assert attention.status == "high precision"


def test_without_triton_all_support_is_missing(pretend_gpu):
    pretend_gpu((9, 0), triton=False)
    reason = "the kernels need triton, which is not installed"
    assert why_casts_are_missing(GPU) == reason
    assert {(row.status, row.reason) for row in environment(GPU).support} == {("missing", reason)}


def test_reasons_why_a_gemm_is_emulated(pretend_gpu):
    pretend_gpu((9, 0))
    assert why_gemm_is_emulated(TENSOR, ROW, GPU) == ""
    assert "e5m2 by e5m2" in why_gemm_is_emulated(TENSOR, TENSOR, GPU, E5M2, E5M2)
    assert why_gemm_is_emulated(BLOCK, BLOCK, GPU, E5M2, E4M3) == ""
    assert "row by 1x128 blocks" in why_gemm_is_emulated(ROW, BLOCK, GPU)
    assert "up to 256" in why_attention_is_emulated(GPU, 264, 128)
    pretend_gpu((8, 0))
    assert "came with SM 8.9" in why_gemm_is_emulated(TENSOR, TENSOR, GPU)
    pretend_gpu((10, 0))
    assert why_gemm_is_emulated((1, 32), (1, 32), GPU) == ""
    assert "1x32 blocks of e5m2" in why_gemm_is_emulated((1, 32), (1, 32), GPU, E5M2)


def test_reasons_agree_with_the_gemms_that_are_native(device):
    """``why_gemm_is_emulated`` gives a reason exactly where ``may_multiply`` is false."""
    if device.type != "cuda":
        pytest.skip("on a CPU nothing is native")
    for a in (TENSOR, ROW, BLOCK, (128, 128), (1, 32)):
        for b in (TENSOR, ROW, BLOCK, (128, 128), (1, 32)):
            native = gemm.may_multiply(a, b, device)
            assert native == (why_gemm_is_emulated(a, b, device) == "")


def test_report_text_on_a_cpu():
    text = str(environment("cpu"))
    text = re.sub(r"^GPUs\n(  .*\n)+", "GPUs\n  (masked)\n", text, flags=re.M)
    text = re.sub(r"^extras\n(  .*\n?)+", "extras\n  (masked)", text, flags=re.M)
    text = re.sub(r"(?<=^versions\n)((?:  .*\n)+)", _mask_versions, text, flags=re.M)
    assert_expected_inline(
        text,
        """\
float8lab 0.1.0 on cpu
versions
  float8lab  (masked)
  python     (masked)
  platform   (masked)
  torch      (masked)
  triton     (masked)
  CUDA       (masked)
  driver     (masked)
  cuDNN      (masked)
GPUs
  (masked)
FP8 on cpu
  DelayedScaling        emulated  a CPU has no FP8 GEMM; it multiplies in float32
  Float8CurrentScaling  emulated  a CPU has no FP8 GEMM; it multiplies in float32
  Float8RowwiseScaling  emulated  a CPU has no FP8 GEMM; it multiplies in float32
  Float8BlockScaling    emulated  a CPU has no FP8 GEMM; it multiplies in float32
  MXFP8BlockScaling     emulated  a CPU has no FP8 GEMM; it multiplies in float32
  NVFP4BlockScaling     emulated  a CPU has no FP8 GEMM; it multiplies in float32
  FP8 attention         emulated  a CPU has no FP8 GEMM; it multiplies in float32
extras
  (masked)""",
    )


def _mask_versions(match):
    return re.sub(r"^(  \S+ +).*$", r"\1(masked)", match[1], flags=re.M)


def test_versions_and_support_survive_json():
    info = environment("cpu")
    assert info.versions["torch"] == torch.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", info.versions["float8lab"])
    loaded = json.loads(json.dumps(info.to_json()))
    assert loaded["versions"] == info.versions
    assert [row["status"] for row in loaded["support"]] == ["emulated"] * 7


def test_the_driver_is_read_from_its_file(monkeypatch, tmp_path: Path):
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    monkeypatch.setattr(environment_module, "_DRIVER", path)
    assert environment("cpu").versions["driver"] == "580.82.07"


def test_extras_match_pyproject_and_the_install_page():
    """Every extra of ``pyproject.toml`` except the developers' tools."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = re.search(r"\[project.optional-dependencies\]\n(.*?)\n# ", text, re.S)[1]
    names = {}
    for line in section.splitlines():
        name, packages = line.split(" = ")
        # Other extras of float8lab, defined above.
        included = re.search(r'"float8lab\[([\w,]+)\]"', packages)
        requirements = set(re.findall(r'"(\w+)(?:\[\w+\])?[>=]', packages))
        names[name] = requirements.union(
            *(names[extra] for extra in included[1].split(",")) if included else ()
        )
    assert {name: set(requirements) for name, requirements in EXTRAS.items()} == names
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", page, re.M))
    assert {name: set(packages.split(", ")) for name, packages in rows.items()} == names


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(environment_module.util, "find_spec", lambda name: None)
    assert environment("cpu").extras["plot"] == "missing matplotlib"


@pytest.mark.gpu
def test_a_gpu_is_listed():
    info = environment()
    assert info.device == "cuda"
    assert torch.cuda.get_device_name(0) in info.gpus[0]
