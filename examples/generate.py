"""Generate with weights and key/value cache in FP8, and compare with bfloat16.

    python examples/generate.py                                # CPU: trains a small model first
    python examples/generate.py --device cuda --preset 8b      # sizes of Llama 3 8B, random weights

Three runs of one model continue the same prompts greedily: in bfloat16; with keys and values in FP8
(``InferenceParams(cache_dtype=torch.float8_e4m3fn)``); with the weights stored in FP8, too. The two
FP8 runs then read the text that the first run wrote, token by token through their caches, and their
logits are compared with those of the first. On a GPU a step of one token is a CUDA graph.

A last run serves prompts of different lengths in a paged cache: when a sequence ends, the next
prompt takes its place (``serve``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from layers import store_in_fp8, use_transformer_layers
from llama import PRESETS, Llama, LlamaConfig, rotary_angles
from savings import Cost, Meter, savings
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from train_gpt import Batches, Job, Progress, Training, load_text

import float8lab
from float8lab import recipes
from float8lab.inspect import memory_report
from float8lab.inspect.text import bytes_text
from float8lab.tables import aligned

SIZES = {
    **PRESETS,
    "8b": LlamaConfig(
        context=8192, n_layer=32, n_head=32, n_group=8, dim=4096, ffn=14336, vocab_size=128256
    ),
}
RECIPES = {
    "row": recipes.Float8RowwiseScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}


@dataclass(frozen=True)
class Run:
    """The results of one way to generate."""

    name: str
    tokens: Tensor
    """``[B, new]``, the run's own continuation of the prompts."""
    logits: Tensor
    """``[B, new, V]``, the logits for the text that the first run wrote."""
    cost: Cost


class Steps:
    """Steps of a model and its cache; on a GPU, steps of one token are CUDA graphs."""

    def __init__(self, model: Llama, cache: float8lab.InferenceParams) -> None:
        self.model, self.cache = model, cache
        head_size = model.config.dim // model.config.n_head
        device = model.lm_head.weight.device
        self.rotary = rotary_angles(cache.max_sequence_length, head_size, device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.warmed_up: set[int] = set()

    def next_logits(self, tokens: Tensor, last: Tensor | None = None) -> Tensor:
        """Return ``[B, V]`` after ``[B, T]`` more tokens; row b ends with token ``last[b]``."""
        rows, length = tokens.shape
        if length > 1 or not tokens.is_cuda:
            return self._run(tokens, last)
        if rows in self.graphs:
            graph, graph_tokens, logits = self.graphs[rows]
            graph_tokens.copy_(tokens)
            graph.replay()
            return logits.clone()
        if rows in self.warmed_up:  # the first step has compiled kernels and created buffers
            graph_tokens, graph = tokens.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._run(graph_tokens, None)
            self.graphs[rows] = graph, graph_tokens, logits
            graph.replay()
            return logits.clone()
        self.warmed_up.add(rows)
        return self._run(tokens, None)

    def _run(self, tokens: Tensor, last: Tensor | None) -> Tensor:
        x = self.model.tokens(tokens)
        for block in self.model.blocks:
            x = block(x, rotary_pos_emb=self.rotary, inference_params=self.cache)
        x = x[:, -1] if last is None else x[torch.arange(len(x), device=x.device), last]
        logits: Tensor = self.model.lm_head(self.model.norm(x))
        return logits.float()


@torch.no_grad()
def generate(
    model: Llama,
    prompt: Tensor,
    count: int,
    cache: float8lab.InferenceParams,
    meter: Meter,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the likeliest next tokens, ``[B, count]``, and their logits, ``[B, count, V]``.

    The model reads its own tokens, or ``forced`` if given. The meter times each call except the one
    on the prompt.
    """
    cache.reset()
    steps = Steps(model, cache)
    cache.pre_step(dict.fromkeys(range(len(prompt)), prompt.shape[1]))
    logits_of_steps = [steps.next_logits(prompt)]
    for i in range(count - 1):
        token = logits_of_steps[-1].argmax(-1) if forced is None else forced[:, i]
        with meter:
            cache.pre_step(dict.fromkeys(range(len(prompt)), 1))
            logits_of_steps.append(steps.next_logits(token[:, None]))
    logits = torch.stack(logits_of_steps, dim=1)
    return logits.argmax(-1), logits


@torch.no_grad()
def serve(
    model: Llama, prompts: Sequence[Tensor], counts: Sequence[int], cache: float8lab.InferenceParams
) -> list[list[int]]:
    """Return the likeliest continuations, ``counts[i]`` tokens of prompt i, batched as they fit.

    A prompt joins the batch as soon as another sequence has ended: the step that reads it gives the
    other sequences one token each.
    """
    cache.reset()
    steps, device = Steps(model, cache), prompts[0].device
    continuations: list[list[int]] = [[] for _ in prompts]
    waiting, active = list(range(len(prompts)))[::-1], list[int]()
    while waiting or active:
        while waiting and len(active) < cache.max_batch_size:
            active.append(waiting.pop())
        next_tokens = [
            torch.tensor(continuations[i][-1:], device=device) if continuations[i] else prompts[i]
            for i in active
        ]
        cache.pre_step({i: len(tokens) for i, tokens in zip(active, next_tokens, strict=True)})
        last = torch.tensor([len(tokens) - 1 for tokens in next_tokens], device=device)
        logits = steps.next_logits(pad_sequence(next_tokens, batch_first=True), last)
        for i, token in zip(active, logits.argmax(-1).tolist(), strict=True):
            continuations[i].append(token)
        active = [i for i in active if len(continuations[i]) < counts[i]]
    return continuations


def run(
    name: str,
    model: Llama,
    prompt: Tensor,
    options: argparse.Namespace,
    *,
    fp8_cache: bool = False,
    fp8_weights: bool = False,
    forced: Tensor | None = None,
) -> Run:
    """Generate, then read the text that the first run wrote."""
    cache = float8lab.InferenceParams(
        len(prompt),
        prompt.shape[1] + options.new,
        cache_dtype=torch.float8_e4m3fn if fp8_cache else None,
    )
    meter = Meter(prompt.device)
    precision: AbstractContextManager[Any] = nullcontext()
    if fp8_weights:
        precision = float8lab.autocast(recipe=RECIPES[options.recipe])
    with precision:
        tokens, logits = generate(model, prompt, options.new, cache, meter)
        memory = memory_report(model)
        sizes = {"weights": memory.sum("weights") + memory.sum("scales"), "cache": cache.nbytes}
        cost = meter.cost(sizes)
        if forced is not None:
            logits = generate(model, prompt, options.new, cache, Meter("cpu"), forced)[1]
    # On the CPU, or the next run's peak would include them.
    return Run(name, tokens, logits.cpu(), cost)


def table(runs: Sequence[Run]) -> str:
    """Return a table of the runs, compared with the first."""
    base = runs[0]
    rows: list[tuple[str, ...]] = [
        ("", "weights", "cache", "tokens/s", "error of logits", "same token")
    ]
    for result in runs:
        sizes = (bytes_text(result.cost.sizes[name]) for name in ("weights", "cache"))
        speed = f"{len(result.tokens) / result.cost.seconds:.0f}"
        error = (result.logits - base.logits).norm() / base.logits.norm()
        same = (result.logits.argmax(-1) == base.logits.argmax(-1)).double().mean()
        rows.append((result.name, *sizes, speed, f"{100 * error:.2f} %", f"{100 * same:.1f} %"))
    return "\n".join(aligned(rows))


def serve_and_describe(model: Llama, prompt: Tensor, count: int) -> str:
    """Serve prompts of different lengths in half as many rows; return a line with the speed."""
    lengths = [len(prompt[0]) * (i + 1) // len(prompt) for i in range(len(prompt))]
    counts = [max(2, count * (len(prompt) - i) // len(prompt)) for i in range(len(prompt))]
    prompts = [tokens[:length] for tokens, length in zip(prompt, lengths, strict=True)]
    rows, longest = max(1, len(prompt) // 2), prompt.shape[1] + count
    cache = float8lab.InferenceParams(
        rows, longest, cache_dtype=torch.float8_e4m3fn, is_paged=True, page_size=16
    )
    for _ in range(2 if prompt.is_cuda else 1):  # kernels are compiled the first time
        start = time.perf_counter()
        continuations = serve(model, prompts, counts, cache)
        seconds = time.perf_counter() - start
    return (
        f"paged: {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens in {rows} rows, "
        f"{sum(map(len, continuations)) / seconds:.0f} tokens/s, prompts included"
    )


def model_and_prompt(options: argparse.Namespace) -> tuple[Llama, Tensor]:
    """A Llama in bfloat16, trained on the text of ``train_gpt.py`` or random, and ``[B, T]``."""
    device, config = torch.device(options.device), SIZES[options.preset]
    torch.manual_seed(options.seed)
    with device:
        model = Llama(config)
    if not options.train_steps:
        prompt = torch.randint(config.vocab_size, (options.batch, options.prompt), device=device)
        return model.bfloat16().eval(), prompt
    training = Training(
        steps=options.train_steps, batch_size=16, learning_rate=3e-3, validations=1,
        validation_windows=64, seed=options.seed,
    )  # fmt: skip
    job = Job(model=config, training=training, text=load_text(), device=device)
    progress = Progress(training.steps)
    trained = job.train("training", model, progress)
    progress.close()
    print(f"trained for {training.steps} steps: validation loss {trained.validation_loss[-1]:.3f}")
    batches = Batches(job.text.validation.to(device), options.prompt)
    prompt, _ = next(batches.spread(options.batch, options.batch))
    return model.bfloat16().eval(), prompt


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--preset", default="tiny", choices=list(SIZES))
    add("--recipe", default="row", choices=list(RECIPES), help="of weights and activations")
    add("--batch", type=int, help="prompts; default: 8, of 8b 16")
    add("--prompt", type=int, help="tokens of each prompt; default: 32, of 8b 1024")
    add("--new", type=int, help="tokens to generate; default: 32, of 8b 128")
    add("--train-steps", type=int, help="default: 200; 8b is not trained")
    add("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    large = options.preset == "8b"
    defaults = {"batch": (8, 16), "prompt": (32, 1024), "new": (32, 128), "train_steps": (200, 0)}
    for name, sizes in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, sizes[large])
    if options.new < 2:
        parser.error("--new must be 2 or more: the prompt gives the first token, a cache the rest")
    return options


def main(argv: Sequence[str]) -> list[Run]:
    """Generate in three ways and print a comparison."""
    options = parse(argv)
    model, prompt = model_and_prompt(options)
    use_transformer_layers(model)
    print(f"{len(prompt)} prompts of {prompt.shape[1]} tokens, {options.new} new ones each\n")
    runs = [run("bf16", model, prompt, options)]
    text = runs[0].tokens
    runs.append(run("FP8 cache", model, prompt, options, fp8_cache=True, forced=text))
    store_in_fp8(model, RECIPES[options.recipe])
    runs.append(
        run("FP8 weights, cache", model, prompt, options,
            fp8_cache=True, fp8_weights=True, forced=text)
    )  # fmt: skip
    print(f"{table(runs)}\n")
    if options.train_steps:
        whole_text = torch.cat((prompt[:1], runs[-1].tokens[:1]), dim=1)[0]
        print(f"the first, in FP8: {bytes(whole_text.tolist()).decode(errors='replace')!r}")
    for result in runs[1:]:
        matched = (result.tokens == text).cumprod(1).sum(1).double().mean()
        print(f"{result.name}: left alone, writes what bf16 does for {matched:.1f} of {options.new}"
              " tokens on average")  # fmt: skip
    with float8lab.autocast(recipe=RECIPES[options.recipe]):
        print(serve_and_describe(model, prompt, options.new))
    print(f"\n{savings(runs[0].cost, runs[-1].cost, options.device, unit='token')}")
    return runs


if __name__ == "__main__":
    main(sys.argv[1:])
