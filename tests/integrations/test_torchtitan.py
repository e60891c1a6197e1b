"""``Float8Converter`` in torchtitan's trainer, with its llama3 and deepseek_v3 debug models."""

import gc
import json
import os
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import float8lab
from float8lab import recipes
from tests.distributed.ranks import Collectives, Ranks, each_check
from tests.recorder import observing

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
    titan_utils = pytest.importorskip("torchtitan.tools.utils")
    if not hasattr(dist, "set_timeout"):
        pytest.skip(
            f"torchtitan needs a newer torch than {torch.__version__}", allow_module_level=True
        )
    if not torch.cuda.is_available():
        # The trainer takes any accelerator, but no CPU, for which torch has no such module.
        no_op: Any = lambda *args: {}  # noqa: E731
        titan_utils.device_type, titan_utils.device_module = "cpu", SimpleNamespace(
            set_device=no_op, synchronize=no_op, memory_stats=no_op, empty_cache=no_op,
            reset_peak_memory_stats=no_op, get_device_name=str, current_device=lambda: 0,
            device_count=lambda: 1, get_device_properties=lambda _: SimpleNamespace(total_memory=1),
        )  # fmt: skip
    import torchtitan.trainer
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.distributed import ParallelDims, fsdp, utils
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models import deepseek_v3, llama3
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.common.decoder_sharding import (
        dense_sequence_parallel_placement,
        set_dense_ffn_sharding,
    )
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3_jobs
    from torchtitan.models.llama3 import config_registry as llama3_jobs

    from float8lab.integrations.torchtitan import Float8Converter, Float8SelectiveAC

FAMILIES = {"llama3": (llama3, llama3_jobs), "deepseek_v3": (deepseek_v3, deepseek_v3_jobs)}
# The stacked experts are three layers.
LINEAR_LAYERS = {"llama3": 2 * 5, "deepseek_v3": 2 * 4 + 3 + 6}
STEPS = 2
CHECKPOINTING = {
    "none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config(),
    "float8": Float8SelectiveAC.Config(),
}  # fmt: skip


def model_spec_of(family: str, **options: Any) -> Any:
    """The spec of a debug model with two layers; in deepseek_v3 one dense layer, one of experts."""
    model_spec = FAMILIES[family][0].model_registry(
        "debugmodel", converters=[Float8Converter.Config(**options)]
    )
    model_spec.model.layers = model_spec.model.layers[:2]
    for _, _, parent, name in list(model_spec.model.traverse(FlexAttention.Config)):
        # FlexAttention has no backward on CPUs
        setattr(parent, name, ScaledDotProductAttention.Config())
    return model_spec


def build_model(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model_spec_of(family, **options).model.build()
    model.init_states()
    return model


def skipped_layers(model: nn.Module) -> set[str]:
    lines = str(float8lab.conversion_report(model)).splitlines()[1:-1]
    return {line.split()[0] for line in lines if "  skipped  " in line}


def test_routers_and_the_output_layer_stay_in_high_precision():
    model = build_model("deepseek_v3")
    assert skipped_layers(model) == {"layers.1.moe.router.gate", "lm_head"}
    assert isinstance(model.layers["0"].attention.wo, float8lab.Linear)
    assert isinstance(model, deepseek_v3.DeepSeekV3Model)
    assert type(model).__name__ == "DeepSeekV3Model"


def test_recipe_exclude_and_overrides_apply_by_name():
    model = build_model(
        "llama3", recipe="Float8RowwiseScaling", exclude=["lm_head", "layers.0"],
        overrides={"wo": {"name": "DelayedScaling", "amax_history_len": 4}, "w2": None},
    )  # fmt: skip
    assert {name for name in skipped_layers(model) if not name.startswith("layers.0")} == {
        "layers.1.feed_forward.w2", "lm_head",
    }  # fmt: skip
    attention = model.layers["1"].attention
    assert attention.wo._fp8.recipe == recipes.DelayedScaling(amax_history_len=4)
    assert attention.qkv_linear.wqkv._fp8.recipe == recipes.Float8RowwiseScaling()
    with pytest.raises(ValueError, match=r"recipe\['name'\] must be one of .*; got 'rowwise'"):
        build_model("llama3", recipe="rowwise")
    with pytest.raises(ValueError, match="no layer is called 'output'"):
        build_model("llama3", exclude=["output"], strict=True)


def test_a_converted_model_has_the_state_of_the_plain_one():
    model = build_model("llama3")
    plain_config = model_spec_of("llama3").model
    json.dumps(model_spec_of("llama3", recipe=recipes.DelayedScaling()).model.float8.to_dict())
    torch.manual_seed(0)
    plain_model = llama3.Llama3Model.Config(
        **{name: getattr(plain_config, name) for name in (
            "dim", "vocab_size", "lm_head", "tok_embeddings", "norm", "layers",
        )}
    ).build()  # fmt: skip
    plain_model.init_states()
    converted_state, plain_state = model.state_dict(), plain_model.state_dict()
    assert converted_state.keys() == plain_state.keys()
    assert all(torch.equal(converted_state[key], plain_state[key]) for key in converted_state)


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "Float8BlockScaling"])
def test_grouped_experts_run_in_fp8(recipe):
    experts = build_model("deepseek_v3", recipe=recipe).layers["1"].moe.routed_experts.inner_experts
    assert isinstance(experts, GroupedExperts)
    counts = torch.tensor([5, 0, 17, 1, 9, 0, 0, 32])
    x = torch.randn(64, 256, requires_grad=True)
    inputs, results = [x, *experts.parameters()], []
    for enabled in (True, False):
        with float8lab.autocast(enabled=enabled), float8lab.count_gemms() as counter:
            y = experts(x, counts)
            gradients = torch.autograd.grad(
                y, inputs, torch.linspace(-1, 2, y.numel()).view(y.shape)
            )
        assert (counter.fp8, counter.high_precision) == ((9, 0) if enabled else (0, 9))
        results.append([y.detach(), *gradients])
    for fp8, exact in zip(*results, strict=True):
        assert 0 < (fp8 - exact).norm() < 0.2 * exact.norm()


def ignore_warnings() -> None:
    """Ignore the warnings of torchtitan and of the packages that it uses."""
    for module in (
        "torchtitan", "torchdata", "torch", "datasets", "importlib", "pydantic", "wandb",
    ):  # fmt: skip
        warnings.filterwarnings("ignore", module=rf"{module}($|\.)")


def prepare_trainer(ranks: Ranks) -> None:
    """Let torchtitan's trainer run on the processes of the test, and on gloo."""
    ignore_warnings()
    os.environ["LOCAL_RANK"] = str(ranks.rank)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's launch of the processes does
    torchtitan.trainer.time = SimpleNamespace(  # the trainer sleeps two seconds at the end
        sleep=lambda _: None, perf_counter=time.perf_counter
    )
    words = {str(number): number for number in range(256)} | {"<bos>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<bos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = ranks.tmp_path / f"tokenizer{ranks.rank}"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    texts = [" ".join(str((a * i * i + 3 * i) % 256) for i in range(200)) for a in range(20)]
    rows = [{"text": text} for text in texts]
    text_datasets.DATASETS["c4_test"] = DatasetConfig(
        path="", loader=lambda _: Dataset.from_list(rows), sample_processor=lambda row: row["text"]
    )
    torchtitan.trainer.Trainer.init_distributed = shared_dimensions
    if ranks.device.type == "cpu":
        fsdp.disable_fsdp_gradient_division = sum_gradients


SHARED_DIMENSIONS: dict[tuple[str, int], Any] = {}


def shared_dimensions(trainer: Any) -> Any:
    """Return the meshes of an earlier trainer: for DTensor equal meshes are one, for FSDP2 not."""
    options = trainer.config.parallelism
    kind = options.spmd_backend, options.tensor_parallel_degree
    if kind not in SHARED_DIMENSIONS:
        SHARED_DIMENSIONS[kind] = ParallelDims.from_config(options, dist.get_world_size())
    return SHARED_DIMENSIONS[kind]


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients without the factor, 1, that FSDP2 would pass to NCCL; gloo takes none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def job_config(ranks: Ranks, family: str, settings: dict[str, Any], **options: Any) -> Any:
    """torchtitan's configuration of a debug model, smaller; ``settings`` are dotted names."""
    config = getattr(FAMILIES[family][1], f"{family}_debugmodel")()
    config.model_spec = model_spec_of(family, **options)
    config.hf_assets_path = str(ranks.tmp_path / f"tokenizer{ranks.rank}")
    config.dump_folder = str(ranks.tmp_path)
    all_settings = {
        "training.local_batch_size": 2, "training.seq_len": 32, "training.steps": STEPS,
        "training.disable_cuda_graphs": True, "validator.enable": False, "debug.seed": 0,
        "metrics.log_freq": 1, "activation_checkpoint": None, "compile.components": ["model"],
        "compile.backend": "aot_eager", **settings,
    }  # fmt: skip
    for name, value in all_settings.items():
        *path, field = name.split(".")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, field, value)
    return config


def train(config: Any) -> dict[str, Tensor]:
    """Run a trainer; return the local shards of the parameters and of the optimizer's state."""
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
        gc.enable()  # the trainer disables it
    model = trainer.model_parts[0]
    state = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in trainer.optimizers.optimizers[0].state[p].items():
            state[f"{name} {key}"] = value.to_local() if hasattr(value, "to_local") else value
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in state.items()}


def assert_equal(
    state: dict[str, Tensor], expected: dict[str, Tensor], *, norms: bool = True
) -> None:
    """Assert that all states are equal; ``norms=False`` excludes the weights of norms."""
    names = [name for name in state if norms or "norm" not in name]
    assert state.keys() == expected.keys()
    unequal = [name for name in names if not torch.equal(state[name], expected[name])]
    assert not unequal, unequal


def check_fsdp_with_each_checkpointing_gives_equal_parameters(ranks: Ranks) -> None:
    prepare_trainer(ranks)
    for family in FAMILIES:
        states = []
        cases = ("partial_dtensor", "none"), *(("spmd_types", ac) for ac in CHECKPOINTING)
        for backend, ac in cases:
            settings = {
                "parallelism.spmd_backend": backend,
                "activation_checkpoint": CHECKPOINTING[ac],
            }
            with float8lab.count_gemms() as gemms, Collectives() as collectives:
                states.append(train(job_config(ranks, family, settings)))
            assert torch.uint8 in {dtype for dtype, _ in collectives.of("allgather")}
            high = {name for name in gemms.high_precision_by_module if name.startswith("layers")}
            assert {name.rpartition(".")[2] for name in high} <= {"inner_attention", "gate"}
            # Forward, recomputed forward, dgrad and wgrad; else three.
            gemms_per_layer = 4 if ac in ("selective", "full") else 3
            assert gemms.fp8 == STEPS * gemms_per_layer * LINEAR_LAYERS[family]
        for state in states[1:]:
            assert_equal(states[0], state)


def check_tensor_parallel_backends_give_equal_parameters(ranks: Ranks) -> None:
    prepare_trainer(ranks)
    for family in FAMILIES:
        states = []
        for backend in ("partial_dtensor", "spmd_types"):
            settings = {
                "parallelism.spmd_backend": backend,
                "parallelism.tensor_parallel_degree": ranks.world,
            }
            # Only DTensors are gathered in FP8, which rounds a weight once and not twice.
            with float8lab.count_gemms() as gemms:
                states.append(train(job_config(ranks, family, settings, fp8_all_gather=False)))
            assert gemms.fp8 == STEPS * 3 * LINEAR_LAYERS[family]
        # Gradients of norm weights are sums over ranks, in bfloat16 only with DTensors.
        assert_equal(*states, norms=False)


class OperandRecorder:
    """Keeps the operands of each GEMM, by layer name, kind of GEMM and side."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, int], Tensor] = {}

    def saw_cast(self, *args: Any) -> None:
        """The GEMMs receive the casts as operands."""

    def saw_gemm(self, kind: str, call: Any, *operands: Any) -> None:
        """Keep the values, computed from the data and the scales."""
        for side, (data, scale) in enumerate(operands):
            self.values[call.precision.name, kind, side] = data.float() * scale


def operands_of(model: Any, x: Tensor, dy: Tensor) -> dict[tuple[str, str, int], Tensor]:
    with observing(OperandRecorder()) as recorder:
        model(x.requires_grad_()).backward(dy)
    return recorder.values


def check_operands_of_plain_shards_equal_those_of_one_rank(ranks: Ranks) -> None:
    """The operands (x, weights, gradients) are the rows or columns of those of one rank."""
    prepare_trainer(ranks)
    config = ParallelismConfig(tensor_parallel_degree=ranks.world)
    dims = shared_dimensions(SimpleNamespace(config=SimpleNamespace(parallelism=config)))
    utils.set_spmd_backend("spmd_types")
    # M tokens, N out features, K in features; the sum runs over the second axis of each pair.
    sides = {"fprop": ("MK", "NK"), "dgrad": ("MN", "KN"), "wgrad": ("NM", "KM")}
    for recipe in ("Float8CurrentScaling", "Float8RowwiseScaling"):
        models = []
        for _ in range(2):
            layer = llama3.model_registry("debugmodel").model.layers[0].feed_forward
            set_dense_ffn_sharding(
                layer, attn_x_layout=dense_sequence_parallel_placement(), enable_sp=True
            )
            torch.manual_seed(0)
            models.append(Float8Converter.Config(recipe=recipe).build().convert(layer).build())
            models[-1].init_states()
        unsharded, sharded = models
        x, dy = torch.randn(2, 2, 32, 256)
        x[0, 0] *= 9  # only tokens of one rank
        unsharded_operands = operands_of(unsharded, x, dy)
        with utils.get_spmd_context(parallel_dims=dims)():
            sharded.parallelize(dims)
            local_inputs = [
                t.chunk(ranks.world, 1)[ranks.rank].contiguous() for t in (x.detach(), dy)
            ]
            local_operands = operands_of(sharded, *local_inputs)
        assert local_operands.keys() == unsharded_operands.keys()
        assert len(local_operands) == 3 * 3 * 2
        for (name, kind, side), value in local_operands.items():
            sharded_axis = "K" if name == "w2" else "N"
            expected, axes = unsharded_operands[name, kind, side], sides[kind][side]
            if sharded_axis in axes:
                expected = expected.chunk(ranks.world, axes.index(sharded_axis))[ranks.rank]
            assert torch.equal(value, expected), (recipe, name, kind, side)


def check_a_resumed_job_gives_equal_parameters(ranks: Ranks) -> None:
    prepare_trainer(ranks)
    for family, degree in (("deepseek_v3", 1), ("llama3", ranks.world)):
        settings = {
            "checkpoint.enable": True, "checkpoint.interval": 1, "checkpoint.folder": family,
            "parallelism.tensor_parallel_degree": degree,
        }  # fmt: skip
        uninterrupted = train(job_config(ranks, family, settings))
        resumed = train(job_config(ranks, family, {**settings, "checkpoint.load_step": 1}))
        assert_equal(uninterrupted, resumed)


def check_a_compiled_job_gives_equal_parameters(ranks: Ranks) -> None:
    prepare_trainer(ranks)
    for family, degree in (("deepseek_v3", 1), ("llama3", ranks.world)):
        settings = {"training.steps": 1, "parallelism.tensor_parallel_degree": degree}
        states = []
        for enabled in (False, True):
            state = train(job_config(ranks, family, {**settings, "compile.enable": enabled}))
            states.append({name.replace("_orig_mod.", ""): value for name, value in state.items()})
        # In a compiled model torch decomposes norms, which sums the gradients of weights in another
        # order.
        assert_equal(*states, norms=False)


test_trainer = each_check(__name__, 2)
