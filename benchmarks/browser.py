"""Open reports in a headless browser, and make up a log to show in a report.

    python -m benchmarks.browser docs/images/report.png [--dark] [report.html]

saves a picture of a report; without ``report.html`` it shows a made-up run (see ``sample``).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import float8lab
from float8lab.inspect.watch.records import Log, Record, Step

KINDS = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")


def missing() -> str:
    """Return what this machine lacks for a browser test; empty if nothing is missing."""
    if importlib.util.find_spec("selenium") is None:
        return "needs selenium (pip install selenium)"
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        return "needs chromium and chromedriver (apt install chromium chromium-driver)"
    return ""


@contextmanager
def browser(width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Any]:
    """Yield the driver of a new headless chromium whose console and network are logged."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (
            "headless",
            "no-sandbox",
            "disable-gpu",
            "disable-quic",
            "disable-dev-shm-usage",
            "no-first-run",
            "disable-background-networking",
            "disable-component-update",
            "disable-sync",
            f"window-size={width},{height}",
            f"user-data-dir={profile}",
        ):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            # This size is exact, and may be narrower than a window can be.
            resize(driver, width, height)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Set the size of the page in pixels."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def sample(blocks: int = 6, steps: int = 120, every: int = 1, seed: int = 0) -> Log:
    """Make up the log of a run of ``4 * blocks`` layers, in which a few things go wrong.

    Gradients lose more to underflow the deeper they are, one layer's input grows an outlier, one
    weight has no SQNR, and one gradient is NaN for a while.
    """
    generator = random.Random(seed)
    layers = [f"blocks.{block}.{kind}" for block in range(blocks) for kind in KINDS]
    log = Log(
        recipe="DelayedScaling(amax_history_len=16, amax_compute_algo='max')",
        conversion="made up: no model was converted\n"
        + "\n".join(f"{layer:<32} FP8" for layer in layers),
        about={"run": "made up, for tests and pictures", "float8lab": float8lab.__version__},
        layers=layers,
    )
    gemms = {layer: {"fprop": 1, "dgrad": 1, "wgrad": 1} for layer in layers}
    for step in range(steps):
        loss = 1.4 + 4 * math.exp(-5 * step / steps) + generator.gauss(0, 0.05)
        log.steps.append(Step(step, loss=loss, gemms=gemms))
    for step in range(0, steps, every):
        for row, layer in enumerate(layers):
            for operand in ("x", "w", "dy"):
                depth, progress = row / len(layers), step / steps
                log.records.append(_record(generator, step, layer, operand, depth, progress))
    return log


def _record(
    generator: random.Random, step: int, layer: str, operand: str, depth: float, progress: float
) -> Record:
    noise = generator.gauss(0, 1)
    gradient, low, high = operand == "dy", -6, 8
    amax = {"x": 6.0, "w": 0.4, "dy": 2e-4}[operand] * 2 ** (0.3 * noise)
    flushed = {"x": 2e-4, "w": 0.0, "dy": 4e-3}[operand] * 10 ** (1.6 * (1 - depth) * progress)
    flushed *= 10 ** (0.2 * noise)
    saturated, staleness = 2e-6 * 10 ** (0.3 * noise), 0.2 * noise - 0.2
    sqnr = (26 if gradient else 31.5) - 3 * flushed / (flushed + 0.02) + 0.2 * noise
    if layer.endswith("mlp.down") and operand == "x":  # outliers come and go
        burst = max(0.0, math.sin(9 * progress + 5 * depth)) ** 6
        saturated += 0.03 * burst
        sqnr -= 14 * burst
        staleness += 3 * burst
        amax *= 1 + 30 * burst
    nan = 12 if gradient and layer == "blocks.1.mlp.up" and 0.6 < progress < 0.65 else 0
    has_sqnr = operand != "w" or layer != "blocks.0.attention.qkv"
    if gradient:
        low, high = -16, 15
    elements = 1 << 20
    center = high - 5 - 4 * flushed / (flushed + 0.05) + 0.3 * noise
    bell = {e: math.exp(-((e - center) ** 2) / 14) for e in range(low, high + 1)}
    total = sum(bell.values())
    return Record(
        step=step,
        layer=layer,
        operand=operand,
        amax=math.nan if nan else amax,
        scale_min=amax / 448,
        scale_max=amax / 448,
        saturated=saturated,
        flushed=flushed,
        subnormal=min(1.0, 3 * flushed + 1e-4),
        nan=nan,
        inf=0,
        sqnr=sqnr if has_sqnr else None,
        staleness=None if operand == "w" else staleness,
        elements=elements,
        exponents={e: int(elements * (1 - flushed) * part / total) for e, part in bell.items()},
    )


def open_report(driver: Any, path: Path) -> tuple[float, float]:
    """Open a report and wait until all of it is drawn.

    Returns:
        The seconds from the request until the report can be used (cards, table and heat map are
        drawn), and until all charts are drawn.
    """
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(path.resolve().as_uri())
    times = (
        "const { ready, complete } = document.body.dataset; return complete && [ready, complete]"
    )
    wait = WebDriverWait(driver, 60, poll_frequency=0.05)
    ready, complete = wait.until(lambda driver: driver.execute_script(times))
    return float(ready) / 1000, float(complete) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="A picture of a report.")
    parser.add_argument("png", type=Path)
    parser.add_argument("report", type=Path, nargs="?", help="default: one of a made-up run")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 1100), metavar=("W", "H"))
    parser.add_argument("--full", action="store_true", help="the whole page, whatever its height")
    args = parser.parse_args()
    if missing():
        sys.exit(missing())
    with tempfile.TemporaryDirectory() as folder:
        path = args.report or float8lab.inspect.report(sample(), Path(folder) / "report.html")
        with browser(*args.size, dark=args.dark) as driver:
            ready, complete = open_report(driver, path)
            print(f"ready after {ready:.2f} s, complete after {complete:.2f} s")
            if args.full:
                height = driver.execute_script("return document.documentElement.scrollHeight")
                resize(driver, args.size[0], height)
            args.png.parent.mkdir(parents=True, exist_ok=True)
            time.sleep(1)  # the charts are resized after the page
            driver.save_screenshot(str(args.png))
            for entry in driver.get_log("browser"):
                print(entry["level"], entry["message"])


if __name__ == "__main__":
    main()
