"""Read sizes of a transformer: of a known model, from text, or from a Transformers config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from float8lab.arguments import check_choice, check_flags, check_size

__all__ = ["KNOWN", "ModelSize", "model_size", "read_pairs"]

_NEEDED = ("layers", "width", "heads", "ffn", "vocabulary")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder with equal layers, which have attention, and an MLP or experts."""

    name: str = ""
    layers: int
    width: int
    heads: int
    groups: int = 0
    """The number of heads of keys and values; 0 means as many as ``heads``."""
    head: int = 0
    """Features of a head; 0 means ``width / heads``."""
    ffn: int
    """Features inside the MLP, or inside each expert."""
    vocabulary: int
    gated: bool = True
    """Whether the MLP's first weight has a gate, as SwiGLU does."""
    tied: bool = False
    """Whether the output layer shares the embedding's weight."""
    experts: int = 0
    active: int = 0
    """The number of experts that each token goes to."""
    shared: int = 0
    """Features inside the expert that every token goes to."""

    def __post_init__(self) -> None:
        check_flags(gated=self.gated, tied=self.tied)
        for name in _NEEDED:
            check_size(name, getattr(self, name), minimum=1)
        for name in ("groups", "head", "experts", "active", "shared"):
            check_size(name, getattr(self, name))
        if not self.head and self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads ({self.heads}); got {self.width}. "
                "Pass head, the features of a head, as well."
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"groups must divide heads ({self.heads}); got {self.groups}.")
        if bool(self.experts) != bool(self.active) or self.active > self.experts:
            raise ValueError(
                f"active must be from 1 to experts ({self.experts}); got {self.active}. "
                "Without experts, pass neither."
            )

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.groups or self.heads

    @property
    def q(self) -> int:
        """Features of the queries."""
        return self.heads * (self.head or self.width // self.heads)

    @property
    def kv(self) -> int:
        """Features of the keys, which are as many as those of the values."""
        return self.q // self.heads * self.kv_heads

    def attention_weights(self, tp: int = 1) -> list[tuple[int, int]]:
        """Return ``(N, K)`` of a rank's GEMMs around attention; q, k and v take a single GEMM."""
        return [((self.q + 2 * self.kv) // tp, self.width), (self.width, self.q // tp)]

    def mlp_weights(self, features: int, tp: int = 1) -> list[tuple[int, int]]:
        """Return ``(N, K)`` of a rank's GEMMs of an MLP, or of one expert."""
        inner = features // tp
        return [((2 if self.gated else 1) * inner, self.width), (self.width, inner)]

    @property
    def attention_parameters(self) -> int:
        """The number of parameters of one layer's attention."""
        return _count(self.attention_weights())

    @property
    def dense_parameters(self) -> int:
        """The number of parameters of one layer's MLP, or of its shared expert and router."""
        if not self.experts:
            return _count(self.mlp_weights(self.ffn))
        return _count(self.mlp_weights(self.shared)) + self.experts * self.width

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of all experts of one layer."""
        return self.experts * _count(self.mlp_weights(self.ffn))

    @property
    def vocabulary_parameters(self) -> int:
        """The number of parameters of the embedding and of the output layer."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """The number of all parameters but those of norms and biases.

        >>> from float8lab.inspect.scale.sizes import KNOWN
        >>> f"{KNOWN['llama-3-70b'].parameters / 1e9:.1f}"
        '70.6'
        """
        layer = self.attention_parameters + self.dense_parameters + self.expert_parameters
        return self.layers * layer + self.vocabulary_parameters


def _count(weights: list[tuple[int, int]]) -> int:
    return sum(N * K for N, K in weights)


_LLAMA_3 = partial(ModelSize, groups=8, vocabulary=128256)
KNOWN = {
    size.name: size
    for size in (
        ModelSize(
            name="gpt2-124m", layers=12, width=768, heads=12, ffn=3072, vocabulary=50257,
            gated=False, tied=True,
        ),
        _LLAMA_3(name="llama-3-1b", layers=16, width=2048, heads=32, ffn=8192, tied=True),
        _LLAMA_3(name="llama-3-8b", layers=32, width=4096, heads=32, ffn=14336),
        _LLAMA_3(name="llama-3-70b", layers=80, width=8192, heads=64, ffn=28672),
        _LLAMA_3(name="llama-3-405b", layers=126, width=16384, heads=128, ffn=53248),
        ModelSize(
            name="mixtral-8x7b", layers=32, width=4096, heads=32, groups=8, ffn=14336,
            vocabulary=32000, experts=8, active=2,
        ),
        ModelSize(
            name="qwen3-30b-a3b", layers=48, width=2048, heads=32, groups=4, head=128, ffn=768,
            vocabulary=151936, experts=128, active=8,
        ),
    )
}  # fmt: skip
"""Models by name, with the sizes of their published configurations."""

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_key_value_heads",),
    "head": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok",),
    "shared": ("shared_expert_intermediate_size",),
}
"""Names in Transformers configurations; of each tuple, the first name present counts."""
_OTHER = {
    "kv_lora_rank": "multi-head latent attention",
    "first_k_dense_replace": "layers without experts among others",
    "mlp_only_layers": "layers without experts among others",
    "mamba_d_state": "state-space layers",
    "linear_num_key_heads": "linear attention",
}
"""Features of models that cannot be predicted, by the configuration name that shows them."""
_UNGATED = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "nemotron")


def model_size(text: str) -> ModelSize:
    """Read the sizes of a model from a name of ``KNOWN``, ``name=value`` pairs, or a path.

    The path is a Transformers configuration file, or a directory with a ``config.json``.

    Raises:
        ValueError: ``text`` is none of these, or a model that ``ModelSize`` cannot describe.
        OSError: the file cannot be read.

    >>> from float8lab.inspect.scale.sizes import model_size
    >>> model_size("layers=2,width=64,heads=4,ffn=256,vocabulary=100").parameters
    143872
    """
    if text in KNOWN:
        return KNOWN[text]
    if "=" in text:
        return _from_pairs(text)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        check_choice("model", text, [*KNOWN, "name=value,...", "a config.json"])
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model must be a JSON file; got {text}: {error}. Pass another.") from None
    if not isinstance(config, dict):
        raise ValueError(f"model must be a JSON object; got {text}. Pass a config.json.")
    return _from_config(config, path)


def read_pairs(argument: str, text: str, names: Sequence[str]) -> dict[str, int]:
    """Read whole numbers by name from an argument's value such as ``"dp=32,tp=8"``."""
    numbers: dict[str, int] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        check_choice(argument, name, names)
        if not value.isdecimal():
            raise ValueError(f"{argument} must have a whole number for {name}; got {value!r}.")
        numbers[name] = int(value)
    return numbers


def _from_pairs(text: str) -> ModelSize:
    names = [field.name for field in fields(ModelSize) if field.name != "name"]
    sizes: dict[str, Any] = dict(read_pairs("model", text, names))
    sizes |= {name: bool(sizes[name]) for name in ("gated", "tied") if name in sizes}
    for name in _NEEDED:
        if name not in sizes:
            raise ValueError(f"model must tell {name}; got {text!r}. Add {name}=... to it.")
    return ModelSize(name="model", **sizes)


def _set_mlp(numbers: dict[str, int], config: Mapping[str, Any]) -> None:
    """Set the MLP's or experts' features where a configuration names them differently."""
    if numbers.get("experts"):
        numbers["ffn"] = config.get("moe_intermediate_size") or numbers["ffn"]
        if config.get("n_shared_experts"):
            numbers["shared"] = config["n_shared_experts"] * numbers["ffn"]
    elif "width" in numbers:
        numbers.setdefault("ffn", 4 * numbers["width"])
        numbers["active"] = 0


def _from_config(config: Mapping[str, Any], path: Path) -> ModelSize:
    config = config.get("text_config") or config
    for name, label in _OTHER.items():
        if config.get(name):
            raise ValueError(
                f"model must have equal layers of attention and MLP or experts; got {path} with "
                f"{name}, {label}. Pass sizes that come near it."
            )
    numbers: dict[str, Any] = {}
    for field, names in _NAMES.items():
        for value in [config[name] for name in names if config.get(name) is not None][:1]:
            if not isinstance(value, int):
                raise ValueError(f"model must have a whole number for {names[0]}; got {value!r}.")
            numbers[field] = value
    _set_mlp(numbers, config)
    for name in ("layers", "width", "heads", "vocabulary"):
        if name not in numbers:
            raise ValueError(
                f"model must have {_NAMES[name][0]} in its configuration; got {path} without. "
                "Pass sizes instead."
            )
    gated = config.get("model_type") not in _UNGATED
    return ModelSize(name=str(config.get("_name_or_path") or path), gated=gated, **numbers)
