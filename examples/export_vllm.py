"""Train a Llama in FP8, write it as vLLM loads it, and read it back.

    python examples/export_vllm.py                                  # CPU, a minute
    python examples/export_vllm.py --device cuda --preset 1b        # sizes of Llama 3.2 1B

The files have the FP8 bytes that training used: no second rounding, no calibration. They are
written in compressed-tensors' format and in DeepSeek's, and beside them the same weights in
bfloat16; read by float8lab as a model that runs in FP8, and by Transformers, dequantized. vLLM is
not needed here, and not run; the command that serves the files is printed. The text is random
words, as in train_fsdp.py.

Needs the extras ``inspect`` and ``transformers``, and ``compressed-tensors`` for Transformers to
read its format.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from savings import Cost, Meter, savings
from torch import Tensor, nn
from train_fsdp import tokens

import float8lab
from float8lab import recipes
from float8lab.inspect import memory_report
from float8lab.inspect.text import bytes_text
from float8lab.integrations import export, load_fp8
from float8lab.tables import aligned

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about its own parts
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
RECIPES = {
    "block": recipes.Float8BlockScaling(),  # the one that both formats hold
    "row": recipes.Float8RowwiseScaling(),
    "current": recipes.Float8CurrentScaling(),
}
FORMATS = ("compressed-tensors", "block-fp8")
LENGTH = 64


@dataclass(frozen=True)
class Read:
    """What a checkpoint gave."""

    logits: Tensor
    cost: Cost
    """Of a forward pass; on disk and in memory."""
    note: str = ""


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES[options.preset], tie_word_embeddings=False)
    with torch.device(options.device):
        return LlamaForCausalLM(config)


def train(model: nn.Module, options: argparse.Namespace) -> None:
    """A few steps in FP8, float32 weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if options.preset == "tiny" else 1e-4)
    losses = []
    for step in range(options.steps):
        x = tokens(0, step, options.batch, LENGTH).to(options.device)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if losses:
        print(
            f"trained for {len(losses)} steps in FP8: loss {losses[0]:.3f}, then {losses[-1]:.3f}"
        )


def outside_fp8(model: nn.Module) -> Iterator[nn.Parameter]:
    """What is not exported in FP8; files hold it in bfloat16."""
    for module in model.modules():
        if not isinstance(module, float8lab.Linear):
            yield from module.parameters(recurse=False)


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@torch.no_grad()
def measured(model: Any, x: Tensor, path: Path, note: str = "") -> Read:
    """Logits of a model that was read from ``path``, and what it takes."""
    meter = Meter(x.device)
    for _ in range(8):
        with meter:
            logits = model(input_ids=x).logits
    held = memory_report(model)
    sizes = {"on disk": on_disk(path), "weights": held.sum("weights") + held.sum("scales")}
    # Not the peak of GPU memory: the trained model is there, too.
    return Read(logits.float(), Cost(meter.cost().seconds, sizes), note)


def read_by_transformers(path: Path, name: str, options: argparse.Namespace) -> str:
    """How many of the weights it reads are those that float8lab dequantizes from the file."""
    if name == "compressed-tensors":
        if importlib.util.find_spec("compressed_tensors") is None:
            return "not tried: needs compressed-tensors"
        config: Any = transformers.CompressedTensorsConfig(dequantize=True)
    else:
        config = transformers.FineGrainedFP8Config(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own parts
        theirs = LlamaForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=config
        ).state_dict()
    mine = build(argparse.Namespace(preset=options.preset, device="cpu")).bfloat16()
    load_fp8(path, mine, dequantize=True)
    ours = mine.state_dict()
    equal = sum(torch.equal(theirs[weight].cpu(), ours[weight]) for weight in ours)
    return f"{equal} of {len(ours)} equal"


def table(high: Tensor, reads: dict[str, Read]) -> str:
    """Sizes of the files, and errors against the trained float32 weights."""
    full = reads["bf16"].cost.sizes["on disk"]
    rows = [("", "on disk", "of bf16", "error of logits", "read by Transformers")]
    for name, read in reads.items():
        size = read.cost.sizes["on disk"]
        error = (read.logits - high).norm() / high.norm()
        share = f"{100 * size / full:.1f} %"
        rows.append((name, bytes_text(size), share, f"{100 * error:.2f} %", read.note))
    return "\n".join(aligned(rows))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--preset", default="tiny", choices=list(SIZES))
    add(
        "--recipe",
        default="block",
        choices=list(RECIPES),
        help="row: compressed-tensors alone holds it",
    )
    add("--format", action="append", choices=FORMATS, help="may be repeated; default: both")
    add("--steps", type=int, default=30, help="of training; 0 exports random weights")
    add("--batch", type=int, default=8)
    add("--out", type=Path, default=Path("out/vllm"), metavar="DIR", help="default: out/vllm")
    options = parser.parse_args(argv)
    options.format = options.format or list(FORMATS[: 1 + (options.recipe != "row")])
    return options


def main(argv: Sequence[str]) -> dict[str, Read]:
    """Train, write, read, compare."""
    options = parse(argv)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = build(options)
    float8lab.convert_to_float8(model, RECIPES[options.recipe], exclude=["lm_head"])
    print(float8lab.conversion_report(model).summary)
    train(model, options)
    x = tokens(1, 0, options.batch, LENGTH).to(options.device)
    with torch.no_grad(), float8lab.autocast(enabled=False):
        high = model.eval()(input_ids=x).logits
    for parameter in outside_fp8(model):
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        before = model(input_ids=x).logits

    options.out.mkdir(parents=True, exist_ok=True)
    plain = build(options).bfloat16().eval()
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(options.out / "bf16")
    reads = {"bf16": measured(plain, x, options.out / "bf16")}
    for parameter in outside_fp8(model):
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = "bfloat16"
    for name in options.format:
        path = options.out / name
        began = time.perf_counter()
        written = export(model, path, name, overwrite=True)
        taken = time.perf_counter() - began
        print(f"{path}: {len(written.fp8)} weights in FP8, written in {taken:.2f} s")
        loaded = build(options).eval()
        load_fp8(path, loaded)
        with torch.no_grad():
            same = torch.equal(loaded(input_ids=x).logits, before)
        note = read_by_transformers(path, name, options)
        reads[name] = measured(loaded.bfloat16(), x, path, note)
        print(f"read back, its logits are {'' if same else 'not '}those of the model in memory")
    print(f"\n{table(high, reads)}\n")
    first = options.format[0]
    print(savings(reads["bf16"].cost, reads[first].cost, options.device, unit="forward pass"))
    print(f"\nto serve it: vllm serve {options.out / first} --tokenizer YOUR_TOKENIZER")
    return reads


if __name__ == "__main__":
    main(sys.argv[1:])
