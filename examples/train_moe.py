"""Train the same GPT with a mixture of experts twice, in high precision and in FP8, and compare.

    python examples/train_moe.py                                # a CPU core, two minutes
    python examples/train_moe.py --device cuda --preset 1b      # 1.4 billion parameters

Each block's MLP is an MoE layer: a router in float32 sends a token to a few experts
(``float8lab.router``), and ``float8lab.ExpertMLP`` runs all of them. The FP8 run has one more line,
``float8lab.convert_to_float8``, which leaves the routers in float32. Everything else is as in
``train_gpt.py``: same weights, same batches, bfloat16 autocast on CUDA, float32 on a CPU.

The output has the gap of the validation losses, the time of a step, and how evenly the routers use
their experts: the tokens of the fullest expert over the average, 1 at best.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig, cross_entropy
from text import load_text
from torch import Tensor, nn
from train_gpt import (
    RECIPES,
    Job,
    Progress,
    Run,
    Training,
    describe_runs,
    device_name,
    gap_percent,
)

import float8lab


@dataclass(frozen=True, kw_only=True)
class MoeConfig(GPTConfig):
    """Sizes of a GPT whose MLPs are MoE layers."""

    experts: int
    top_k: int
    """Experts per token."""
    ffn: int
    """Features between an expert's two layers."""
    balance: float = 1e-2
    """Weight of the auxiliary loss for an even load."""


PRESETS = {
    "tiny": MoeConfig(context=64, n_layer=2, n_head=4, dim=96, experts=8, top_k=2, ffn=96),
    "1b": MoeConfig(
        context=1024, n_layer=6, n_head=16, dim=2048, vocab_size=50304, experts=32, top_k=4,
        ffn=1024,
    ),
}  # fmt: skip
TRAINING = {
    "tiny": Training(steps=300, batch_size=16, learning_rate=3e-3, validation_windows=128),
    "1b": Training(steps=200, batch_size=16, learning_rate=3e-4, code=True, validation_windows=64),
}


class MoeLayer(nn.Module):
    """Routes each token to its experts and sums their weighted outputs."""

    load: Tensor

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = float8lab.ExpertMLP(config.experts, config.dim, config.ffn, device="cpu")
        self.register_buffer("load", torch.zeros(config.experts), persistent=False)
        self.balance_loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        tokens, E, K = x.shape[:-1].numel(), self.config.experts, self.config.top_k
        with torch.autocast(x.device.type, enabled=False):
            logits = self.router(x.float()).view(tokens, E)
        probs, routing_map = float8lab.router.fused_topk_with_score_function(logits, K)
        _, scores = float8lab.router.fused_compute_score_for_moe_aux_loss(logits, K, "softmax")
        counts = routing_map.sum(0)
        self.load += counts.detach()
        self.balance_loss = float8lab.router.fused_moe_aux_loss(
            scores, counts, tokens, E, K, coeff=self.config.balance
        )
        y: Tensor = self.experts(x, probs, routing_map, tokens * K)
        return y


class MoeGPT(GPT):
    """The GPT of ``gpt.py`` with MoE layers in place of its MLPs."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.mlp = MoeLayer(config)
        self.config = config

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits: Tensor = super().forward(tokens)
        if targets is None:
            return logits
        loss = cross_entropy(logits, targets)
        if self.training:
            for moe_layer in self.moe_layers():
                loss = loss + moe_layer.balance_loss
        return loss

    def moe_layers(self) -> list[MoeLayer]:
        """The MoE layers of all blocks, in order."""
        return [module for module in self.modules() if isinstance(module, MoeLayer)]

    def imbalance(self) -> list[float]:
        """For each block, the tokens of its fullest expert over the average, since the start."""
        loads = [moe_layer.load for moe_layer in self.moe_layers()]
        return [(load.max() / load.mean()).item() for load in loads]


class MoeJob(Job):
    """One comparison of MoE models."""

    def initial_model(self) -> MoeGPT:
        """Return the model with the same weights each time, on any device."""
        torch.manual_seed(self.training.seed)
        assert isinstance(self.model, MoeConfig), "of this job"
        return MoeGPT(self.model).to(self.device)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--recipe", choices=RECIPES, default="current", help="FP8 recipe (default: current)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda when there is one")
    add("--preset", choices=PRESETS, help="default: tiny on cpu, 1b on cuda")
    add("--steps", type=int, help="training steps of each run; default: the preset's")
    add("--batch-size", type=int, help="sequences a step; default: the preset's")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    add("--json", type=Path, metavar="FILE", help="also write all numbers there")
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA GPU, and torch sees none here; use --device cpu")
    return args


def make_job(args: argparse.Namespace) -> MoeJob:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    preset = args.preset or ("1b" if device.type == "cuda" else "tiny")
    options_given = {"steps": args.steps, "batch_size": args.batch_size, "seed": args.seed}
    training = Training(
        **asdict(TRAINING[preset]) | {k: v for k, v in options_given.items() if v is not None}
    )
    text = load_text(code=training.code)
    return MoeJob(model=PRESETS[preset], training=training, text=text, device=device)


def train(job: MoeJob, name: str, recipe: Any, progress: Progress) -> tuple[Run, list[float]]:
    """Train once; return the run and the imbalance of the experts."""
    model = job.initial_model()
    if recipe is not None:
        float8lab.convert_to_float8(model, recipe, exclude=["lm_head"])
        print(float8lab.conversion_report(model))
    run = job.train(name, model, progress)
    return run, model.imbalance()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the comparison; return its numbers."""
    args = parse(argv)
    job, recipe = make_job(args), RECIPES[args.recipe]()
    parameters = sum(p.numel() for p in job.initial_model().parameters())
    print(f"{parameters:,} parameters on {device_name(job.device)}, {recipe}")
    progress = Progress(2 * job.training.steps)
    runs = (("high precision", None), ("FP8", recipe))
    runs_and_imbalances = [
        train(job, name, recipe_of_run, progress) for name, recipe_of_run in runs
    ]
    progress.close()
    (baseline, baseline_imbalance), (fp8, fp8_imbalance) = runs_and_imbalances
    print(describe_runs((baseline, fp8)))
    gap = gap_percent(fp8, baseline)
    print(f"gap {gap:+.2f} %, time of a step {fp8.step_ms / baseline.step_ms:.2f}x")
    for run, loads in ((baseline, baseline_imbalance), (fp8, fp8_imbalance)):
        loads_text = " ".join(f"{load:.2f}" for load in loads)
        print(f"fullest expert over the average, by block, {run.name}: {loads_text}")
    results = {
        "parameters": parameters,
        "recipe": args.recipe,
        "runs": [asdict(baseline), asdict(fp8)],
        "gap_percent": gap,
        "imbalance": {"high precision": baseline_imbalance, "FP8": fp8_imbalance},
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=2))
    return results


if __name__ == "__main__":
    main()
