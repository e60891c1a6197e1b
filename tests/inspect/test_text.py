"""Tests of the views that people read: health, tables, bars, HTML and figures."""

import builtins
import math
import sys
import textwrap
import xml.etree.ElementTree as ET

import expecttest
import pytest
import torch

import float8lab
from float8lab import Float8Tensor, inspect, quantize
from float8lab.formats import E5M2, Float8Spec
from float8lab.inspect.plot import heat_cells


def example() -> tuple[torch.Tensor, Float8Tensor]:
    x = torch.tensor([[448.0, 17.0, 2.0**-12, 0.0], [math.nan, 0.01, -3.0, 600.0]])
    return x, quantize(x, scale=1.0)


class TestText(expecttest.TestCase):
    def test_statistics_text(self):
        x, t = example()
        self.assertExpectedInline(
            str(t.stats(x)),
            """\
shape            (2, 4)
dtype            torch.float32
spec             e4m3 tensor fp32
amax             448
scale            1
saturated        25% (2)
zero             25% (2)
subnormal        12.5% (1)
nan              12.5% (1)
exponents        -7..8
clipped          12.5% (1)
flushed to zero  12.5% (1)
SQNR             13.85 dB
effective bits   2.01
max error        152
mean error       -21.9

##                                    ##
##                                    ##
##      ##              ##    ##      ##
##      ##              ##    ##      ##
0   2^-9                             2^8""",
        )

    def test_comparison_text(self):
        x, t = example()
        self.assertExpectedInline(
            str(t.compare(x)).replace(", ", "\n"),
            """\
clipped 12.5% (1)
flushed to zero 12.5% (1)
SQNR 13.85 dB
effective bits 2.01
max error 152
mean error -21.9""",
        )

    def test_health_text(self):
        e5m2_data = torch.tensor([0x7C, 0xFF, 0x01, 0x7B], dtype=torch.uint8).view(E5M2)
        ones = torch.ones(1)
        special = Float8Tensor(e5m2_data, ones, ones, Float8Spec(E5M2, (-1,)), torch.float32)
        tensors = [example()[1], special, quantize(torch.ones(0)), quantize(torch.ones(3))]
        self.assertExpectedInline(
            "\n".join(inspect.health(t.stats()) for t in tensors),
            """\
12.5% NaN, 25% saturated, 12.5% subnormal, 25% zero
25% NaN, 25% inf, 25% saturated, 25% subnormal, 0% zero
empty
100% saturated, 0% subnormal, 0% zero""",
        )

    def test_summary_text(self):
        self.assertExpectedInline(
            inspect.summary(example()[1]),
            """\
shape      (2, 4)
dtype      torch.float32
spec       e4m3 tensor fp32
amax       448
scale      1
saturated  25% (2)
zero       25% (2)
subnormal  12.5% (1)
nan        12.5% (1)
exponents  -7..8

   0 ######################################## 2
2^-7 #################### 1
2^-6 0
2^-5 0
2^-4 0
2^-3 0
2^-2 0
2^-1 0
 2^0 0
 2^1 #################### 1
 2^2 0
 2^3 0
 2^4 #################### 1
 2^5 0
 2^6 0
 2^7 0
 2^8 ######################################## 2""",
        )

    def test_histogram_repr(self):
        t = quantize(torch.tensor([1.0, 1.0, -2.0, 0.0, 300.0]), scale=1.0)
        e5m2 = quantize(torch.tensor([1.0, -2.0]), fp8_dtype=E5M2)
        views = [t.histogram("exponent"), t.histogram(), e5m2.stats(per_block=True)]
        self.assertExpectedInline(
            "\n".join(map(repr, views)),
            """\
                      ##
                      ##
##                    ####            ##
##                    ####            ##
0   2^-9                             2^8
                                            ##
                                            ##
              ##              ##            ##                ##
              ##              ##            ##                ##
-448                                                         448
<BlockStats of (1,) blocks, e5m2 tensor fp32>""",
        )

    def test_bars_of_values(self):
        t = quantize(torch.tensor([1.0, 1.0, -2.0, 0.0]), scale=1.0)
        self.assertExpectedInline(
            inspect.bars(t.histogram(), width=4),
            """\
 0 ## 1
 1 #### 2
-2 ## 1""",
        )

    def test_rich_prints_the_summary(self):
        console = pytest.importorskip("rich.console")
        terminal = console.Console(width=60, color_system=None)
        with terminal.capture() as captured:
            terminal.print(example()[1])
            terminal.print(quantize(torch.empty(2, 3, device="meta")))
        # Only ASCII, as in the source files.
        text = captured.get().encode("ascii", "replace").decode()
        table, _, bars = inspect.summary(example()[1]).partition("\n\n")
        text = "\n".join(map(str.rstrip, text.splitlines())).replace(bars, "(bars)")
        self.assertExpectedInline(
            text.replace(textwrap.indent(table, " "), "(table)"),
            """\
Float8Tensor

(table)

(bars)
Float8Tensor(..., size=(2, 3),
             fp8=e4m3 tensor fp32, dtype=torch.float32,
device='meta')""",
        )


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_html_is_well_formed_and_self_contained(has_matplotlib, monkeypatch):
    t = quantize(torch.randn(70, 300).cumsum(1), block=(1, 128))
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = t._repr_html_()
    root = ET.fromstring(page)  # raises unless every tag and quote is closed and escaped
    assert "http" not in page
    assert "<script" not in page
    assert root.find("pre").text == repr(t)
    if has_matplotlib:
        assert root.find("img").get("src").startswith("data:image/png;base64,iVBOR")
    else:
        assert root.findall("pre")[1].text == str(t.histogram("exponent"))


def test_html_escapes_its_text():
    page = inspect.html(quantize(torch.ones(2)), "<script>&'")
    assert "<script" not in page
    assert ET.fromstring(page).find("pre").text == "<script>&'"


@pytest.mark.parametrize(
    "x", [torch.zeros(3, 3), torch.tensor(2.0), torch.ones(0, 3), torch.full((2, 2), math.nan)]
)
def test_html_of_zero_scalar_empty_and_nan_tensors_is_well_formed(x):
    ET.fromstring(quantize(x)._repr_html_())


def test_heat_map_cells_hold_the_largest_value():
    x = torch.ones(64, 256)
    x[10, 128:], x[11, 128:] = 8.0, 2.0
    title, cells = heat_cells(quantize(x, block=(1, 128)))
    assert (title, cells.shape) == ("log2 of the scales, (64, 2)", (64, 2))
    cells = heat_cells(quantize(x, block=(1, 128)), most=32)[1]
    assert (cells - cells[0, 0])[5].tolist() == [0.0, 3.0]
    assert (cells - cells[0, 0]).sum() == 3.0
    x[3, 5], x[9] = math.nan, 0.0
    title, cells = heat_cells(
        quantize(x, scale=1.0), most=32
    )  # one scale: the data is shown instead, and no green square
    assert (title, cells.shape) == ("log2 of the FP8 data, (64, 256)", (32, 32))
    assert (cells[5, 0], cells[5, 31], cells[1, 0]) == (0.0, 3.0, 0.0)
    assert heat_cells(quantize(torch.zeros(3, 3)))[1].isnan().all()


def test_plot_draws_the_histogram_and_the_scales():
    pytest.importorskip("matplotlib")
    t = quantize(torch.randn(64, 256), block=(1, 128))
    left, right, *_ = t.plot().axes
    counts = t.histogram("exponent")
    assert [bar.get_height() for bar in left.patches] == [counts.zero, *counts.counts.tolist()]
    drawn = right.images[0].get_array()
    assert torch.equal(torch.as_tensor(drawn.filled()), t.blocks().log2())
    assert quantize(torch.ones(0, 256), block=(1, 128)).plot().axes
    assert t.plot()._repr_png_().startswith(b"\x89PNG")  # a notebook shows this


def test_only_plots_need_optional_packages(monkeypatch):
    import_module = builtins.__import__

    def import_without_extras(name, *args, **kwargs):
        if name.split(".")[0] in ("rich", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_extras)
    t = quantize(torch.ones(2, 2))
    assert t._repr_html_()
    assert inspect.summary(t)
    assert "saturated" in str(inspect.table(t))
    assert repr(t)
    with pytest.raises(ModuleNotFoundError, match='needs the extra "plot": matplotlib;'):
        inspect.plot(t)


def test_repr_uses_no_fallback():
    with float8lab.fallback("error"):
        assert "health: " in repr(quantize(torch.randn(3000, 3)))
