"""Models that Transformers itself shards over ranks, by ``tp_plan="auto"``, in FP8."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.distributed import DistributedConfig

import float8lab
from float8lab.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.distributed.ranks import Ranks, each_check
from tests.distributed.test_parallelize import integers, unshard

transformers.utils.logging.disable_progress_bar()

# The scales are powers of two, so integers stay exact, and so do sums in any order.
RECIPES = [
    Float8CurrentScaling(power_of_2_scale=True),
    DelayedScaling(power_of_2_scale=True),
    Float8BlockScaling(power_of_2_scale=True),
]
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
TOKENS = torch.arange(24).view(2, 12)


def llama(ranks: Ranks) -> Any:
    config = transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    return transformers.LlamaForCausalLM(config).to(ranks.device)


def load_sharded(model: Any, ranks: Ranks, **options: Any) -> Any:
    """Load the same model as Transformers shards it."""
    model.save_pretrained(ranks.tmp_path)  # only the first rank writes
    dist.barrier()
    config = DistributedConfig(tp_plan="auto", tp_size=ranks.world, **options)
    return type(model).from_pretrained(ranks.tmp_path, distributed_config=config)


def linear_layers(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def check_each_layer_equals_that_of_one_rank(ranks: Ranks):
    generator = torch.Generator().manual_seed(1)
    plain = llama(ranks)
    for layer in linear_layers(plain).values():
        for parameter in layer.parameters():
            parameter.data = integers(parameter.shape, generator).to(ranks.device)
    for recipe in RECIPES:
        model = load_sharded(plain, ranks)
        wrappers = {name: layer.forward for name, layer in linear_layers(model).items()}
        float8lab.convert_to_float8(model, recipe, strict=True)
        on_one_rank = float8lab.convert_to_float8(copy.deepcopy(plain), recipe)
        for name, layer in linear_layers(model).items():
            assert layer.forward is wrappers[name]
            row_parallel = name.endswith(("o_proj", "down_proj"))
            expected = on_one_rank.get_submodule(name)
            x = integers((2, 12, layer.in_features), generator).to(ranks.device)
            local_x = x.chunk(ranks.world, -1)[ranks.rank] if row_parallel else x
            for grad in (True, False):
                y, *gradients = results(expected, x, grad)
                local_y, *local_gradients = results(layer, local_x, grad)
                assert torch.equal(unsharded(local_y, y, ranks), y), (recipe, name, grad)
                for local, expected_gradient in zip(local_gradients, gradients, strict=True):
                    assert torch.equal(
                        unsharded(local, expected_gradient, ranks), expected_gradient
                    ), (recipe, name)


def results(layer: Any, x: Tensor, grad: bool) -> list[Tensor]:
    """The output of a layer, and the gradients of its input and parameters."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad), float8lab.count_gemms() as counts:
        y = layer(leaf)
    assert (counts.fp8, counts.high_precision) == (1, 0)
    if not grad:
        return [y]
    y.backward(y.detach().sign())
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]


def unsharded(local: Tensor, expected: Tensor, ranks: Ranks) -> Tensor:
    """The global tensor of a DTensor or of shards of features."""
    local = unshard(local)
    return local if local.shape == expected.shape else torch.cat(ranks.gather(local), -1)


def check_a_model_trains_generates_and_returns_to_high_precision(ranks: Ranks):
    on_one_rank, tokens = llama(ranks), TOKENS.to(ranks.device)
    model = load_sharded(on_one_rank, ranks)
    with torch.no_grad():
        high_precision, sharded_high_precision = on_one_rank(tokens).logits, model(tokens).logits
    for converted in (on_one_rank, model):
        float8lab.convert_to_float8(converted)
        converted(tokens, labels=tokens).loss.backward()
    # Sharded sums have another order, whose effect is far smaller than that of FP8.
    with torch.no_grad():
        fp8, sharded_fp8 = on_one_rank(tokens).logits, model(tokens).logits
    assert (sharded_fp8 - fp8).norm() < (fp8 - high_precision).norm() / 8
    for (name, p), q in zip(model.named_parameters(), on_one_rank.parameters(), strict=True):
        assert (unshard(p.grad) - q.grad).norm() < q.grad.norm() / 8, name
    with float8lab.count_gemms() as counts:
        ranks.assert_same(model.generate(tokens, max_new_tokens=2, do_sample=False))
    assert (counts.fp8, counts.high_precision) == (16, 0)
    with float8lab.autocast(enabled=False), torch.no_grad():
        assert torch.equal(model(tokens).logits, sharded_high_precision)
    float8lab.to_high_precision(model)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, sharded_high_precision)
    assert {type(layer) for layer in linear_layers(model).values()} == {nn.Linear}


def check_the_report_gives_reasons_for_skipped_experts(ranks: Ranks):
    """Transformers shards experts by features, or calls them itself; other layers run in FP8."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    plain, tokens = transformers.MixtralForCausalLM(config).to(ranks.device), TOKENS
    by_features = "its gate_up_proj is a DTensor; FP8 takes those of torch.nn.Linear, and stacked"
    replaced = "forward was replaced on the layer itself"
    for options, reason in (({}, by_features), ({"ep_size": ranks.world}, replaced)):
        model = load_sharded(plain, ranks, **options)
        report = float8lab.conversion_report(float8lab.convert_to_float8(model))
        notes = {layer.name.split(".")[-1]: layer.note for layer in report.skipped}
        assert notes.keys() == {"experts", "gate"}
        assert notes["experts"].startswith(reason)
        assert len(report.converted) == 5
        model(tokens.to(ranks.device), labels=tokens.to(ranks.device)).loss.backward()


test_ranks = each_check(__name__, 2)
