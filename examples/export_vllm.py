"""Train a Llama in FP8, write it as vLLM loads it, and read it back.

    python examples/export_vllm.py                                  # CPU, a minute
    python examples/export_vllm.py --device cuda --preset 1b        # sizes of Llama 3.2 1B

The files have the FP8 bytes that training used: no second rounding, no calibration. The example
writes them in the formats of compressed-tensors and of DeepSeek, and the same weights in bfloat16
beside them. float8lab reads the files as a model that runs in FP8, and Transformers reads them
dequantized. vLLM is not needed here, and not run; the command that serves the files is printed. The
text is random words, as in train_fsdp.py.

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
    warnings.simplefilter("ignore")  # transformers warns about its own parts
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
    "block": recipes.Float8BlockScaling(),  # the recipe that both formats can hold
    "row": recipes.Float8RowwiseScaling(),
    "current": recipes.Float8CurrentScaling(),
}
FORMATS = ("compressed-tensors", "block-fp8")
LENGTH = 64


@dataclass(frozen=True)
class ReadResult:
    """The results of reading a checkpoint."""

    logits: Tensor
    cost: Cost
    """The time of a forward pass, and the sizes on disk and in memory."""
    note: str = ""


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES[options.preset], tie_word_embeddings=False)
    with torch.device(options.device):
        return LlamaForCausalLM(config)


def train(model: nn.Module, options: argparse.Namespace) -> None:
    """Train for a few steps in FP8, with float32 weights."""
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


def parameters_outside_fp8(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that are not exported in FP8; files hold them in bfloat16."""
    for module in model.modules():
        if not isinstance(module, float8lab.Linear):
            yield from module.parameters(recurse=False)


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@torch.no_grad()
def measure(model: Any, x: Tensor, path: Path, note: str = "") -> ReadResult:
    """Return the logits of a model read from ``path``, its time and its sizes."""
    meter = Meter(x.device)
    for _ in range(8):
        with meter:
            logits = model(input_ids=x).logits
    memory = memory_report(model)
    sizes = {
        "on disk": bytes_on_disk(path),
        "weights": memory.sum("weights") + memory.sum("scales"),
    }
    # Without the peak of GPU memory: the trained model is in memory, too.
    return ReadResult(logits.float(), Cost(meter.cost().seconds, sizes), note)


def read_by_transformers(path: Path, name: str, options: argparse.Namespace) -> str:
    """Return how many of the weights that it reads equal those that float8lab dequantizes."""
    if name == "compressed-tensors":
        if importlib.util.find_spec("compressed_tensors") is None:
            return "not tried: needs compressed-tensors"
        config: Any = transformers.CompressedTensorsConfig(dequantize=True)
    else:
        config = transformers.FineGrainedFP8Config(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own parts
        transformers_state = LlamaForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=config
        ).state_dict()
    float8lab_model = build(argparse.Namespace(preset=options.preset, device="cpu")).bfloat16()
    load_fp8(path, float8lab_model, dequantize=True)
    float8lab_state = float8lab_model.state_dict()
    equal = sum(
        torch.equal(transformers_state[weight].cpu(), float8lab_state[weight])
        for weight in float8lab_state
    )
    return f"{equal} of {len(float8lab_state)} equal"


def table(float32_logits: Tensor, reads: dict[str, ReadResult]) -> str:
    """Return a table of the file sizes, and of errors against the trained float32 weights."""
    bfloat16_size = reads["bf16"].cost.sizes["on disk"]
    rows = [("", "on disk", "of bf16", "error of logits", "read by Transformers")]
    for name, result in reads.items():
        size = result.cost.sizes["on disk"]
        error = (result.logits - float32_logits).norm() / float32_logits.norm()
        ratio = f"{100 * size / bfloat16_size:.1f} %"
        rows.append((name, bytes_text(size), ratio, f"{100 * error:.2f} %", result.note))
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


def main(argv: Sequence[str]) -> dict[str, ReadResult]:
    """Train, write, read and compare."""
    options = parse(argv)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = build(options)
    float8lab.convert_to_float8(model, RECIPES[options.recipe], exclude=["lm_head"])
    print(float8lab.conversion_report(model).summary)
    train(model, options)
    x = tokens(1, 0, options.batch, LENGTH).to(options.device)
    with torch.no_grad(), float8lab.autocast(enabled=False):
        float32_logits = model.eval()(input_ids=x).logits
    for parameter in parameters_outside_fp8(model):
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        bfloat16_logits = model(input_ids=x).logits

    options.out.mkdir(parents=True, exist_ok=True)
    bfloat16_model = build(options).bfloat16().eval()
    bfloat16_model.load_state_dict(model.state_dict())
    bfloat16_model.save_pretrained(options.out / "bf16")
    reads = {"bf16": measure(bfloat16_model, x, options.out / "bf16")}
    for parameter in parameters_outside_fp8(model):
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = "bfloat16"
    for name in options.format:
        path = options.out / name
        start = time.perf_counter()
        export_report = export(model, path, name, overwrite=True)
        seconds = time.perf_counter() - start
        print(f"{path}: {len(export_report.fp8)} weights in FP8, written in {seconds:.2f} s")
        loaded = build(options).eval()
        load_fp8(path, loaded)
        with torch.no_grad():
            is_same = torch.equal(loaded(input_ids=x).logits, bfloat16_logits)
        note = read_by_transformers(path, name, options)
        reads[name] = measure(loaded.bfloat16(), x, path, note)
        print(f"read back, its logits are {'' if is_same else 'not '}those of the model in memory")
    print(f"\n{table(float32_logits, reads)}\n")
    first_format = options.format[0]
    print(
        savings(reads["bf16"].cost, reads[first_format].cost, options.device, unit="forward pass")
    )
    print(f"\nto serve it: vllm serve {options.out / first_format} --tokenizer YOUR_TOKENIZER")
    return reads


if __name__ == "__main__":
    main(sys.argv[1:])
