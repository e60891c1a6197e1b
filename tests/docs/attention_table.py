"""Ask which backend runs each combination of attention on a Hopper GPU; write the attention page.

    python -m tests.docs.attention_table

The page is docs/modules/attention.md. Nothing is computed: the tensors have no values.
tests/nn/attention/test_combinations.py compares small sizes of the same combinations with float64.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import float8lab
from float8lab import recipes
from float8lab.nn.attention import dot_product
from float8lab.nn.attention.backends import Explanation, Problem, explain
from tests.docs.support_matrix import table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "modules" / "attention.md"
BEGIN, END = "<!-- begin: python -m tests.docs.attention_table -->\n", "<!-- end -->\n"


class Sizes(NamedTuple):
    """Sizes of a call: sequences, queries and keys of each, heads and their sizes."""

    B: int
    Sq: int
    Sk: int
    H: int
    G: int
    D: int
    Dv: int


LARGE = Sizes(4, 32768, 32768, 32, 8, 128, 128)


class Mask(NamedTuple):
    """A kind of mask: arguments of the constructor, and how the sequence lengths are given."""

    mask_type: str
    window: tuple[int, int] | None = None
    cross: bool = False
    lengths: str = ""
    """``rows``: padded rows; ``thd``; ``thd, gaps``: with tokens between the sequences."""


MASKS = {
    "causal": Mask("causal"),
    "no mask": Mask("no_mask"),
    "no mask, cross": Mask("no_mask", cross=True),
    "causal, more keys than queries": Mask("causal", cross=True),
    "bottom-right causal": Mask("causal_bottom_right", cross=True),
    "window `(w, 0)`": Mask("causal", (3, 0)),
    "window `(w, w)`": Mask("no_mask", (2, 2)),
    "window `(w, 0)`, bottom-right": Mask("causal_bottom_right", (3, 0), cross=True),
    "padding": Mask("padding", lengths="rows"),
    "padding, cross": Mask("padding", cross=True, lengths="rows"),
    "padding, causal": Mask("padding_causal", lengths="rows"),
    "padding, bottom-right causal": Mask("padding_causal_bottom_right", cross=True, lengths="rows"),
    "padding, window `(w, 0)`": Mask("padding_causal", (3, 0), lengths="rows"),
    "thd": Mask("padding", lengths="thd"),
    "thd, causal": Mask("padding_causal", lengths="thd"),
    "thd, causal, tokens between sequences": Mask("padding_causal", lengths="thd, gaps"),
    "thd, window `(w, 0)`": Mask("padding_causal", (3, 0), lengths="thd"),
    "arbitrary": Mask("arbitrary"),
}

FEATURES: dict[str, dict[str, Any]] = {
    "nothing more": {}, "ALiBi": {"core_attention_bias_type": "alibi"},
    "bias": {"core_attention_bias_type": "post_scale_bias"}, "dropout": {"attention_dropout": 0.25},
    "softcap": {"softcap": 2.0}, "off-by-one": {"softmax_type": "off-by-one"},
    "sinks": {"softmax_type": "learnable"}, "max logit": {"return_max_logit": True},
}  # fmt: skip
"""Arguments of the constructor and of calls."""

HEADS = {
    "32": (32, 32), "64": (64, 64), "96": (96, 96), "128": (128, 128), "192": (192, 192),
    "192, values 128": (192, 128), "256": (256, 256),
}  # fmt: skip

CONSTRUCTOR_ARGUMENTS = ("attention_dropout", "softmax_type", "return_max_logit")


def gives_matrix(mask: Mask, feature: dict[str, Any]) -> bool:
    """Whether the caller passes a matrix over all queries and keys."""
    return mask.mask_type == "arbitrary" or feature.get("core_attention_bias_type") in (
        "pre_scale_bias",
        "post_scale_bias",
    )


def build(mask: Mask, feature: dict[str, Any], sizes: Sizes, **options: Any) -> Any:
    """Build the module of a combination."""
    options = {
        **options,
        **{n: value for n, value in feature.items() if n in CONSTRUCTOR_ARGUMENTS},
    }
    return float8lab.DotProductAttention(
        sizes.H, (sizes.D, sizes.Dv), num_gqa_groups=sizes.G,
        qkv_format="thd" if "thd" in mask.lengths else "bshd", attn_mask_type=mask.mask_type,
        attention_type="cross" if mask.cross else "self", **options,
    )  # fmt: skip


def lengths_of(mask: Mask, sizes: Sizes) -> tuple[list[int], list[int]]:
    """The numbers of queries and of keys of each sequence that are no padding."""
    queries = [sizes.Sq - 2 * b for b in range(sizes.B)]
    return queries, [sizes.Sk - b for b in range(sizes.B)] if mask.cross else queries


def arguments(
    mask: Mask, feature: dict[str, Any], sizes: Sizes, make: Callable[[Any], Tensor],
    window: tuple[int, int] | None,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a call except query, key and value; ``make`` makes tensors of numbers."""
    call = {n: value for n, value in feature.items() if n not in CONSTRUCTOR_ARGUMENTS}
    call["window_size"] = window
    if call.get("core_attention_bias_type") == "post_scale_bias":
        call["core_attention_bias"] = make((sizes.H, sizes.Sq, sizes.Sk))
    if mask.mask_type == "arbitrary":
        call["attention_mask"] = make((sizes.B, 1, sizes.Sq, sizes.Sk)) > 0
    if mask.lengths:
        for side, lengths, longest in zip(
            ("q", "kv"), lengths_of(mask, sizes), (sizes.Sq, sizes.Sk), strict=True
        ):
            cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
            shared = side == "kv" and not mask.cross
            call[f"cu_seqlens_{side}"] = call["cu_seqlens_q"] if shared else cu_seqlens
            if "thd" in mask.lengths:
                call[f"max_seqlen_{side}"] = longest
            if "gaps" in mask.lengths:
                padded_offsets = torch.arange(sizes.B + 1).int() * longest
                call[f"cu_seqlens_{side}_padded"] = (
                    call["cu_seqlens_q_padded"] if shared else padded_offsets
                )
    return call


def _explain_on_a_gpu(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, names: Sequence[str]
) -> Explanation:
    """Return the result of ``explain`` for a call on a GPU."""
    return explain(*(torch.empty_like(x, device="cuda") for x in (q, k, v)), problem, names)


def decide(
    mask: Mask, feature: dict[str, Any], sizes: Sizes = LARGE, fp8: bool = False
) -> Explanation:
    """Explain a call with bfloat16 tensors on a Hopper GPU; ``fp8`` if a recipe asks for FP8."""
    window = None if mask.window is None else tuple(1024 if n > 0 else n for n in mask.window)
    sizes = sizes._replace(Sq=sizes.Sq // 2) if mask.cross else sizes
    with (
        FakeTensorMode(),
        torch.no_grad(),
        mock.patch.object(dot_product, "explain", _explain_on_a_gpu),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the warning that nothing ran in FP8
        module = build(mask, feature, sizes)
        rows = (sizes.B, sizes.Sq), *[(sizes.B, sizes.Sk)] * 2
        if "thd" in mask.lengths:
            rows = tuple((tokens * batch,) for batch, tokens in rows)
        heads = (sizes.H, sizes.D), (sizes.G, sizes.D), (sizes.G, sizes.Dv)
        qkv = [
            torch.empty(*row, *head, dtype=torch.bfloat16)
            for row, head in zip(rows, heads, strict=True)
        ]
        call = arguments(
            mask, feature, sizes, functools.partial(torch.empty, dtype=qkv[0].dtype), window
        )
        with float8lab.autocast(fp8, recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
            return module.explain(*qkv, **call)


def table_cell(mask: Mask, feature: dict[str, Any], sizes: Sizes = LARGE) -> str:
    """The cell of a combination: FP8, or the backend in high precision."""
    if decide(mask, feature, sizes, fp8=True).backend == "fp8":
        return "**FP8**"
    decision = decide(mask, feature, sizes)
    return decision.backend if decision.block is None else f"{decision.backend}, blocks"


def render() -> str:
    """The tables of the page."""
    combinations = [
        [title, *(table_cell(mask, feature) for feature in FEATURES.values())]
        for title, mask in MASKS.items()
    ]
    kinds = ("causal", "bottom-right causal", "window `(w, 0)`", "padding, causal", "thd, causal")
    heads = [
        [title, *(table_cell(MASKS[kind], {}, LARGE._replace(D=D, Dv=Dv)) for kind in kinds)]
        for title, (D, Dv) in HEADS.items()
    ]
    return "\n\n".join((
        table(["mask", *FEATURES], combinations), table(["head size", *kinds], heads), ""
    ))  # fmt: skip


def page_with(tables: str, page: str) -> str:
    """The page with these tables in place of its own."""
    before, _, remaining = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{remaining.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(render(), PAGE.read_text()))
