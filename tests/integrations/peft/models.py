"""Small models with LoRA on an FP8 base, and functions for comparing them."""

import os
import warnings

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of the library and its dependencies
    peft = pytest.importorskip("peft", reason="needs the extra 'peft'")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'peft'")

RECIPES = {
    "current": recipes.Float8CurrentScaling(), "delayed": recipes.DelayedScaling(),
    "rowwise": recipes.Float8RowwiseScaling(), "block": recipes.Float8BlockScaling(),
}  # fmt: skip
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


class Mlp(nn.Module):
    """Two layers with a residual, and a head, in sizes that are no multiples of a block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 144)
        self.down = nn.Linear(144, 64, bias=False)
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


def mlp(seed=0):
    torch.manual_seed(seed)
    return Mlp()


def llama(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def convert(model, recipe, *, freeze=True):
    """Convert a model to an FP8 base; the recipe None leaves it unchanged."""
    if recipe is not None:
        head = [name for name, _ in model.named_modules() if name.split(".")[-1] in HEADS]
        float8lab.convert_to_float8(model, recipe, exclude=head, freeze_weights=freeze)
    return model


HEADS = ("head", "lm_head")


def with_lora(model, seed=1, **fields):
    """Add adapters by stock PEFT, with weights that change the output from the start."""
    torch.manual_seed(seed)
    targets = ["up", "down"] if isinstance(model, Mlp) else ["q_proj", "v_proj", "down_proj"]
    fields = {"r": 4, "target_modules": targets, "init_lora_weights": False, **fields}
    return peft.get_peft_model(model, peft.LoraConfig(**fields))


def base_layers(model):
    """The layers of the base that have adapters, by name."""
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if name.endswith(".base_layer")
    }


def gradients(model):
    """The gradients of all adapters as one vector."""
    grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads)


def cosine(a, b):
    return nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0)


def weight_bytes(weight):
    return weight.qdata.view(torch.uint8).clone(), weight.scale.clone()
