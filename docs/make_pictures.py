"""Make the pictures of the documentation, by the project's own commands and views.

    python -m docs.make_pictures                 all, in a few minutes
    python -m docs.make_pictures tensor advise   some (see PICTURES)

Run it from the repository root, with the extra ``dev`` installed and Debian's ``chromium`` and
``chromium-driver``. What terminals show becomes SVG, what browsers show PNG. Look at what it made
before committing it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from safetensors.torch import save_file
from torch import Tensor, nn

import float8lab
from benchmarks import browser
from float8lab import inspect, recipes

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 100
"""Of the terminals, unless a picture says otherwise."""
STEPS = 80
"""Of the main job in the pictures of its report; of each of its two runs."""

# Rich's SVG loads a font from a server; what is left names it, and falls back to the reader's own.
SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
PAGE = (
    "<!DOCTYPE html><meta charset='utf-8'><style>body {{ margin: 0; padding: 16px; "
    "width: max-content; font-family: sans-serif }}</style><body>{}</body>"
)


# --- how pictures are made -----------------------------------------------------------------------


def terminal(name: str, title: str, *shown: Any, columns: int = COLUMNS) -> None:
    """What ``rich.print`` shows of each thing, as an SVG."""
    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True, highlight=False
    )
    for thing in shown:
        console.print(Text(thing) if isinstance(thing, str) else thing)
    console.print()  # the SVG cuts off the bottom of its last line
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=SVG)
    keep(name, "\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def command(name: str, *words: str, cwd: Path, columns: int = COLUMNS) -> None:
    """What ``python -m float8lab WORDS`` writes into a terminal."""
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    written = b""
    with subprocess.Popen(
        [sys.executable, "-m", "float8lab", *words],
        stdout=inside,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env={**variables, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
    ) as program:
        os.close(inside)
        with contextlib.suppress(OSError):  # how Linux tells the end of a terminal
            while piece := os.read(outside, 1 << 16):
                written += piece
        assert program.stderr is not None
        complaints = program.stderr.read().decode()
    os.close(outside)
    if program.returncode not in (0, 1) or complaints:
        raise RuntimeError(f"{words} failed: {complaints}")
    text = "\n".join(line.rstrip() for line in written.decode().splitlines()).strip("\n")
    terminal(name, f"python -m float8lab {' '.join(words)}", Text.from_ansi(text), columns=columns)


def keep(name: str, svg: str) -> None:
    """Write an SVG."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.S)
    (IMAGES / f"{name}.svg").write_bytes(svg.encode("ascii", errors="xmlcharrefreplace"))


def shrink(path: Path) -> None:
    """Write a PNG again in the fewest bytes that lose nothing."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.save(path, optimize=True)


def element(driver: Any, selector: str, name: str) -> None:
    """A PNG of one element of the page."""
    found = driver.find_element("css selector", selector)
    driver.execute_script("arguments[0].scrollIntoView({ block: 'start' })", found)
    time.sleep(1)  # charts follow
    IMAGES.mkdir(parents=True, exist_ok=True)
    found.screenshot(str(IMAGES / f"{name}.png"))
    shrink(IMAGES / f"{name}.png")


def screen(driver: Any, name: str) -> None:
    """A PNG of what the window shows."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    driver.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
    time.sleep(1)  # charts follow
    driver.save_screenshot(str(IMAGES / f"{name}.png"))
    shrink(IMAGES / f"{name}.png")


# --- the pictures --------------------------------------------------------------------------------


def tensor(folder: Path) -> None:
    """docs/inspect.md: one tensor in a notebook, in a terminal, by matplotlib."""
    x = torch.randn(256, 1024)
    x[37] *= 1000  # an outlier row
    t = float8lab.quantize(x, block=(1, 128))
    page = folder / "tensor.html"
    page.write_text(PAGE.format(t._repr_html_()), encoding="utf-8")
    with browser.browser(900, 600) as driver:
        driver.get(page.as_uri())
        driver.execute_script("document.querySelector('details').open = true")
        element(driver, "body", "tensor_notebook")
    terminal("tensor_table", "rich.print(t)", t, columns=80)
    path = IMAGES / "tensor_plot.png"
    t.plot().savefig(path, dpi=100)
    shrink(path)


def train() -> tuple[nn.Module, torch.optim.Optimizer, inspect.watch]:
    """A transformer layer and a linear layer after four watched steps."""
    layer = float8lab.TransformerLayer(64, 256, 4, self_attn_mask_type="causal", device="cpu")
    model = nn.Sequential(layer, nn.Linear(64, 32))
    float8lab.convert_to_float8(model, recipes.DelayedScaling())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        float8lab.autocast(recipe=recipes.DelayedScaling()),
        inspect.watch(model) as w,
    ):
        for step in range(4):
            scale = 8 if step == 3 else 1  # a batch that the scales are too small for
            loss = model(scale * torch.randn(32, 2, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            w.step(loss.item())
    return model, optimizer, w


def watch(folder: Path) -> None:
    """docs/watch.md: a watched step, and a NaN that was found."""
    _, _, w = train()
    terminal("watch_table", "rich.print(w.table())", w.table(), columns=112)

    class Broken(nn.Module):
        """The square root of a number that may be negative."""

        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    model = nn.Sequential(nn.Linear(64, 256), Broken(), nn.Linear(256, 64))
    found = inspect.find_nan(model, torch.randn(32, 64))
    terminal("watch_find_nan", "print(float8lab.inspect.find_nan(model, batch))", str(found))


def report(folder: Path) -> None:
    """docs/report.md: the report of the main job."""
    page = folder / "report.html"
    job = [ROOT / "examples" / "train_gpt.py", "--device", "cpu", "--recipe", "delayed"]
    files = ["--report", page, "--out", folder]
    subprocess.run(
        [sys.executable, *map(str, [*job, "--steps", STEPS, *files])],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    pictures_of_report(page)


def pictures_of_report(page: Path) -> None:
    """Its top, the part below that is of one layer, and the top as a phone has it in the dark."""
    with browser.browser(1280, 1240) as driver:
        browser.open_report(driver, page)
        screen(driver, "report")
        browser.resize(driver, 1280, 1500)
        element(driver, "#drill", "report_layer")
    with browser.browser(400, 860, dark=True) as driver:
        browser.open_report(driver, page)
        screen(driver, "report_phone")


class Llama(nn.Module):
    """A decoder layer of Llama-3-8B in plain PyTorch, without its rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        D, K, H = 4096, 1024, 14336
        self.q, self.k, self.v, self.o = (nn.Linear(D, n, bias=False) for n in (D, K, K, D))
        self.gate, self.up = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False)
        self.down = nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [p(x).unflatten(-1, (-1, 128)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return x + down


def advise(folder: Path) -> None:
    """docs/advise.md: its three reports."""
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)
    )
    model[2].weight.data[7, 9] = 1e6  # the outlier of the page
    x, target = torch.randn(512, 64), torch.randn(512, 64)
    found = inspect.sensitivity(model, (x, target), lambda m, b: F.mse_loss(m(b[0]), b[1]))
    terminal("sensitivity", "print(float8lab.inspect.sensitivity(model, batch))", str(found),
        columns=110)  # fmt: skip
    with torch.device("meta"):
        large = nn.Sequential(Llama(), nn.Linear(4096, 128)).bfloat16()
        batch = torch.empty(4, 4096, 4096, dtype=torch.bfloat16)
    advice = inspect.advise(large, batch, recipes.Float8RowwiseScaling(), mode="compile")
    terminal("advise", "print(float8lab.inspect.advise(model, batch))", str(advice), columns=106)
    model, optimizer, _ = train()
    kept = inspect.memory_report(model, torch.randn(32, 2, 64), optimizer=optimizer)
    title = "print(float8lab.inspect.memory_report(model, batch, optimizer=optimizer))"
    terminal("memory", title, str(kept))


def checkpoints(folder: Path) -> None:
    """docs/checkpoints.md: ``inspect`` and ``diff`` in a terminal, and the page."""
    state, source = {}, {}
    for block in range(4):
        for kind, shape in (("q_proj", (256, 256)), ("up_proj", (512, 256))):
            name = f"model.layers.{block}.{kind}.weight"
            source[name] = torch.randn(shape, dtype=torch.bfloat16) * 0.02
            t = float8lab.quantize(source[name], block=(128, 128))
            state[name], state[f"{name}_scale_inv"] = t.qdata, t.blocks().clone()
    state["model.layers.1.q_proj.weight_scale_inv"][0, 1] = 0  # damage
    codes = state["model.layers.2.up_proj.weight"].view(torch.uint8)
    codes[5, 9] = 0x7F  # NaN
    crushed = source["model.layers.3.up_proj.weight"].float() / 2e-6
    state["model.layers.3.up_proj.weight"] = crushed.clamp(-448, 448).to(torch.float8_e4m3fn)
    state["model.layers.3.up_proj.weight_scale_inv"].fill_(2e-6)
    source["model.norm.weight"] = state["model.norm.weight"] = torch.ones(256)
    save_file(state, folder / "fp8.safetensors")
    save_file(source, folder / "bf16.safetensors")
    page = folder / "page.html"
    look = ("inspect", "fp8.safetensors", "--html", page.name)
    command("checkpoint_inspect", *look, cwd=folder, columns=116)
    command("checkpoint_diff", "diff", "fp8.safetensors", "bf16.safetensors", cwd=folder,
        columns=116)  # fmt: skip
    with browser.browser(1100, 1000) as driver:
        browser.open_report(driver, page)
        screen(driver, "checkpoint_page")


def selfcheck(folder: Path) -> None:
    """docs/selfcheck.md: both commands."""
    command("selfcheck", "selfcheck", "--device", "cpu", cwd=folder, columns=110)
    command("env", "env", "--device", "cpu", cwd=folder, columns=110)


def scale(folder: Path) -> None:
    """docs/scale.md: where the time of a step goes."""
    work = ("--model", "llama-3-70b", "--gpus", "1024", "--mesh", "dp=128,tp=8")
    run = [sys.executable, "-m", "float8lab", "scale", *work, "--svg", str(IMAGES / "scale.svg")]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)


PICTURES: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (tensor, watch, report, advise, checkpoints, selfcheck, scale)
}


def main() -> None:
    """Make what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m docs.make_pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    names = parser.parse_args().names or list(PICTURES)
    if unknown := [name for name in names if name not in PICTURES]:
        parser.error(f"NAME must be one of {', '.join(PICTURES)}; got {', '.join(unknown)}")
    if browser.missing():
        sys.exit(browser.missing())
    for name in names:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](Path(folder))
        print(name, flush=True)


if __name__ == "__main__":
    main()
