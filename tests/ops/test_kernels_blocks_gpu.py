"""Block casts in both orientations: with a tile in shared memory, and each orientation separately.

On Hopper the op uses tiles for values of two bytes, so the tests of the op cover only these. Here
both are compared with the reference, and for prologues with each other.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from float8lab.formats import E4M3, FP8_DTYPES
from float8lab.ops import Prologue, reference
from float8lab.ops.kernels import cast as launcher
from float8lab.ops.kernels import cast_hopper
from tests.ops import forms

pytestmark = pytest.mark.gpu

# Full tiles; partial tiles, blocks and groups of four rows; one row; a row and a column of tiles.
SHAPES = [(256, 384), (200, 136), (130, 264), (16, 8), (1, 128), (3, 4104), (1030, 16)]
RULES = ["fp32", "pow2", "e8m0"]
SPECIAL = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-7, 6e4, -6e4, 2.0**-133]


@pytest.fixture(params=[True, False], ids=["tile", "separate"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the op may cast a tile in both orientations at once."""
    if not request.param:
        monkeypatch.setattr(launcher, "has_tiles", lambda *_: False)
    return bool(request.param)


cast = launcher.cast.__wrapped__  # the launcher without recorded calls

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Values of many magnitudes, with blocks of zeros, and special values in random places."""
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    x[:, : shape[1] // 3] = 0
    x[: shape[0] // 3] = 0
    places = torch.randperm(x.numel())[: len(SPECIAL)]
    x.view(-1)[places] = torch.tensor(SPECIAL)[: len(places)]
    return x.to(dtype).cuda()


def assert_all_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.stride() == expected.stride() or 1 in actual.shape
        if actual.dtype in FP8_DTYPES:
            nan = expected.float().isnan().cuda()
            assert torch.equal(actual.float().isnan(), nan)
            assert bool(
                (nan | (actual.view(torch.uint8) == expected.view(torch.uint8).cuda())).all()
            )
        else:
            torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
@each_dtype
def test_block_casts_equal_the_reference(dtype: torch.dtype, size: int, rule: str) -> None:
    torch.manual_seed(size)
    for index, shape in enumerate(SHAPES):
        x = matrix(shape, dtype)
        options = (FP8_DTYPES[index % 2], (1, size), rule, (0.0, 0.1)[index // 2 % 2], 16)
        *got, _ = forms.quantize_pair(cast, x, *options, False)
        *want, _ = forms.quantize_pair(reference.cast, x.cpu(), *options, False)
        assert_all_same(got, want)


@pytest.mark.usefixtures("tiles")
def test_strided_rows_equal_the_reference_and_columns_are_summed() -> None:
    wide = torch.randn(300, 1024, device="cuda").bfloat16()
    for x in (wide[:, 512:768], wide[::2], wide[5:, :8]):
        options = (E4M3, (1, 128), "pow2", 0.0, 16)
        *got, sums = forms.quantize_pair(cast, x, *options, True)
        *want, _ = forms.quantize_pair(reference.cast, x.cpu(), *options, False)
        assert_all_same(got, want)
        bound = x.double().abs().sum(0) * 2.0**-24 * x.shape[0]
        assert bool(((sums - x.double().sum(0)).abs() <= bound).all())


def test_has_tiles_accepts_only_the_operands_of_the_tile_kernel() -> None:
    def fits(x: Tensor, block: tuple[int, int] = (1, 128), align: int = 16) -> bool:
        return cast_hopper.has_tiles(("", [x], x.dtype), block, align)

    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    assert fits(x) == (torch.cuda.get_device_capability() >= (9, 0))
    assert not any(map(fits, (x.float(), x.t()[:32], x[:, 1:57], x[:, :60])))
    assert not fits(x, align=4)
    assert not any(fits(x, block) for block in ((128, 128), (1, -1), (1, 4)))


def inputs_of(kind: str, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(rows, columns, device="cuda").to(dtype)
    if kind == "layer_norm":
        each_row, each_column = torch.rand(rows).cuda(), torch.randn(columns).cuda()
        return [x, each_row, each_column, each_row + 1, each_column * 2]
    if kind == "swiglu":
        return [torch.cat((x, x.flip(0)), 1)]
    gradient = torch.randn(rows, columns // 2, device="cuda").to(dtype)
    return [x, gradient] if kind == "swiglu_backward" else [x, x.flip(1)]


@pytest.mark.parametrize("rowwise", [True, False], ids=["both", "columnwise"])
@pytest.mark.parametrize("kind", ["layer_norm", "swiglu", "gelu_backward", "swiglu_backward"])
@each_dtype
def test_prologues_have_the_same_bytes_with_and_without_tiles(
    dtype: torch.dtype, kind: str, rowwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, columns in ((300, 512), (63, 130), (1, 24)):
        matrix = Prologue(kind, inputs_of(kind, rows, columns, dtype), dtype)[:3]
        options = (E4M3, (1, 128), "fp32", 0.0, 16, rowwise, True, True)
        tile = cast(*matrix, *options)
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "has_tiles", lambda *_: False)
            separate = cast(*matrix, *options)
        assert [output is None for output in tile] == [output is None for output in separate]
        assert_all_same(
            *(
                [output for output in outputs[:5] if output is not None]
                for outputs in (tile, separate)
            )
        )
        torch.testing.assert_close(tile[5], separate[5], rtol=1e-4, atol=1e-3)
