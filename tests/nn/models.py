"""Recipes and models for the tests of modules, and helpers that measure and compare models."""

import concurrent.futures

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import recipes

UNDELAYED = {
    "current": recipes.Float8CurrentScaling(), "rowwise": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(), "mx": recipes.MXFP8BlockScaling(),
}  # fmt: skip
DELAYED = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
RECIPES = {"delayed": DELAYED, **UNDELAYED}


each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width=32, heads=2, *, checkpointed=False):
        super().__init__()
        self.heads, self.checkpointed = heads, checkpointed
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def feed(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        if self.checkpointed:
            return x + checkpoint(self.feed, self.norm2(x), use_reentrant=False)
        return x + self.feed(self.norm2(x))


class GatedMLP(nn.Module):
    """A gated MLP as in Llama, in experts of remote code and in models written by hand."""

    def __init__(self, width, hidden, *, bias=False, function=F.silu):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.function = function

    def forward(self, x):
        return self.down_proj(self.function(self.gate_proj(x)) * self.up_proj(x))


class GPT(nn.Module):
    """A GPT: by default one block keeps its activations and the other recomputes them."""

    def __init__(self, width=32, vocabulary=48, checkpointed=(False, True)):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, checkpointed=flag) for flag in checkpointed)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class Checkpointed(nn.Module):
    """A module whose forward torch's checkpoint recomputes in backward."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class CountingBackend:
    """A backend of torch.compile that counts its compilations and runs the graphs unchanged."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)


def states(model):
    """The delayed-scaling state of all layers, as lists of numbers."""
    state = float8lab.nn.ScalingState(model).state_dict()
    return {key: value.tolist() for key, value in state.items()}


def report_of(model, *args, **kwargs):
    """Converts the model and returns the report of the conversion."""
    return float8lab.conversion_report(float8lab.convert_to_float8(model, *args, **kwargs))


def gemms_of(call, *args, **kwargs):
    """The number of GEMMs of a call that run in FP8, and of those that run in high precision."""
    with float8lab.count_gemms() as counts:
        call(*args, **kwargs)
    return counts.fp8, counts.high_precision


def in_thread(function):
    """Runs ``function`` on a new thread and returns its result."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def saved_bytes(module, x, recipe=None):
    """The bytes of activations that are saved for backward, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storage_bytes = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters and t.numel():
            storage_bytes[storage.data_ptr()] = storage.nbytes()
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        float8lab.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        y = module(x)
    del y
    return sum(storage_bytes.values())


def same_gradients(a, b):
    return all(
        torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )
