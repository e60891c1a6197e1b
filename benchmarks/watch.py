"""Measure what ``float8lab.inspect.watch`` costs a training step of a GPT.

    python -m benchmarks.watch                  50 million parameters, on a GPU if there is one
    python -m benchmarks.watch --device cpu

Three kinds of steps take turns: without a watch, between two watched steps, and watched. The
program prints the fastest of each kind, on a GPU the peak memory, and the cost of ``every=100``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import float8lab
from float8lab.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

__all__ = ["main", "measure"]

_NEVER = 10**9
RECIPES = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "block": Float8BlockScaling(),
}


class GPT(nn.Module):
    """A GPT of bytes with ``TransformerLayer``s and output projection in FP8; ``[S, B]`` tokens."""

    def __init__(self, layers: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim, device=device)
        self.layers = nn.ModuleList(
            float8lab.TransformerLayer(dim, 4 * dim, 8, layer_number=i + 1, device=device)
            for i in range(layers)
        )
        self.head = float8lab.LayerNormLinear(dim, 256, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[S, B, 256]`` logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def measure(
    model: GPT, *, context: int, batch: int, recipe: str, repeats: int
) -> dict[str, tuple[float, float]]:
    """Measure seconds and peak bytes of a step: ``"off"``, ``"between"`` and ``"watched"``."""
    device = model.embed.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(256, (context + 1, batch), device=device)

    def step(watch: float8lab.inspect.watch | None) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        with float8lab.autocast(recipe=RECIPES[recipe]):
            logits = model(tokens[:-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step(loss)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    found: dict[str, list[tuple[float, float]]] = {"off": [], "between": [], "watched": []}
    for turn in range(repeats + 1):
        for name, times in found.items():
            every = 1 if name == "watched" else _NEVER
            watching = float8lab.inspect.watch(model, every=every)
            with nullcontext() if name == "off" else watching as w:
                if w is not None and name == "between":
                    w.step()  # the first step is watched, so we make it an empty step
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                seconds = step(w)
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            if turn:  # the first turn warms up
                times.append((seconds, peak))
    return {
        name: (min(t for t, _ in times), max(peak for _, peak in times))
        for name, times in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all kinds of steps and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    model = GPT(options.layers, options.dim, device)
    parameters = sum(p.numel() for p in model.parameters())
    found = measure(
        model,
        context=options.context,
        batch=options.batch,
        recipe=options.recipe,
        repeats=options.repeats,
    )
    tokens = options.batch * options.context
    print(f"{parameters:,} parameters, {tokens} tokens, {options.recipe}, {device}")
    print(f"{'step':<10} {'ms':>9} {'x off':>7} {'peak MiB':>9}")
    for name, (seconds, peak) in found.items():
        memory = f"{peak / 2**20:.0f}" if peak else "-"
        ratio = seconds / found["off"][0]
        print(f"{name:<10} {1e3 * seconds:>9.1f} {ratio:>7.2f} {memory:>9}")
    slower = found["watched"][0] / found["off"][0] - 1  # one step in 100 is watched
    print(f"every=100  training takes {slower:.1f} % longer")


if __name__ == "__main__":
    main()
