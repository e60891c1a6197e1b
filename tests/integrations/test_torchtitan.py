"""Float8Converter in torchtitan's own trainer, on its llama3 and deepseek_v3 debug models."""

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
    warnings.simplefilter("ignore")  # what its dependencies are deprecated for
    tools = pytest.importorskip("torchtitan.tools.utils")
    if not hasattr(dist, "set_timeout"):
        pytest.skip(
            f"torchtitan needs a newer torch than {torch.__version__}", allow_module_level=True
        )
    if not torch.cuda.is_available():
        # Its trainer takes any accelerator, but not a CPU, for which torch has no such module.
        nothing: Any = lambda *args: {}  # noqa: E731
        tools.device_type, tools.device_module = "cpu", SimpleNamespace(
            set_device=nothing, synchronize=nothing, memory_stats=nothing, empty_cache=nothing,
            reset_peak_memory_stats=nothing, get_device_name=str, current_device=lambda: 0,
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
LINEAR_LAYERS = {"llama3": 2 * 5, "deepseek_v3": 2 * 4 + 3 + 6}  # stacked experts are three
STEPS = 2
CHECKPOINTING = {
    "none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config(),
    "float8": Float8SelectiveAC.Config(),
}  # fmt: skip


def spec(family: str, **said: Any) -> Any:
    """Two layers of a debug model; those of deepseek_v3 are a dense one and one of experts."""
    found = FAMILIES[family][0].model_registry(
        "debugmodel", converters=[Float8Converter.Config(**said)]
    )
    found.model.layers = found.model.layers[:2]
    for _, _, parent, name in list(found.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())  # the other has no CPU backward
    return found


def built(family: str, **said: Any) -> Any:
    torch.manual_seed(0)
    model = spec(family, **said).model.build()
    model.init_states()
    return model


def left_alone(model: nn.Module) -> set[str]:
    lines = str(float8lab.conversion_report(model)).splitlines()[1:-1]
    return {line.split()[0] for line in lines if "  skipped  " in line}


def test_routers_and_output_layer_stay_in_high_precision():
    model = built("deepseek_v3")
    assert left_alone(model) == {"layers.1.moe.router.gate", "lm_head"}
    assert isinstance(model.layers["0"].attention.wo, float8lab.Linear)
    assert isinstance(model, deepseek_v3.DeepSeekV3Model)
    assert type(model).__name__ == "DeepSeekV3Model"


def test_layers_and_recipes_by_name():
    model = built(
        "llama3", recipe="Float8RowwiseScaling", exclude=["lm_head", "layers.0"],
        overrides={"wo": {"name": "DelayedScaling", "amax_history_len": 4}, "w2": None},
    )  # fmt: skip
    assert {name for name in left_alone(model) if not name.startswith("layers.0")} == {
        "layers.1.feed_forward.w2", "lm_head",
    }  # fmt: skip
    attention = model.layers["1"].attention
    assert attention.wo._fp8.recipe == recipes.DelayedScaling(amax_history_len=4)
    assert attention.qkv_linear.wqkv._fp8.recipe == recipes.Float8RowwiseScaling()
    with pytest.raises(ValueError, match=r"recipe\['name'\] must be one of .*; got 'rowwise'"):
        built("llama3", recipe="rowwise")
    with pytest.raises(ValueError, match="no layer is called 'output'"):
        built("llama3", exclude=["output"], strict=True)


def test_plain_keys_and_values_and_configuration_as_plain_data():
    model = built("llama3")
    plain = spec("llama3").model
    json.dumps(spec("llama3", recipe=recipes.DelayedScaling()).model.float8.to_dict())
    torch.manual_seed(0)
    other = llama3.Llama3Model.Config(
        **{name: getattr(plain, name) for name in ("dim", "vocab_size", "lm_head", "tok_embeddings",
                                                   "norm", "layers")}
    ).build()  # fmt: skip
    other.init_states()
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "Float8BlockScaling"])
def test_grouped_experts(recipe):
    experts = built("deepseek_v3", recipe=recipe).layers["1"].moe.routed_experts.inner_experts
    assert isinstance(experts, GroupedExperts)
    counts = torch.tensor([5, 0, 17, 1, 9, 0, 0, 32])
    x = torch.randn(64, 256, requires_grad=True)
    inputs, results = [x, *experts.parameters()], []
    for enabled in (True, False):
        with float8lab.autocast(enabled=enabled), float8lab.count_gemms() as seen:
            y = experts(x, counts)
            found = torch.autograd.grad(y, inputs, torch.linspace(-1, 2, y.numel()).view(y.shape))
        assert (seen.fp8, seen.high_precision) == ((9, 0) if enabled else (0, 9))
        results.append([y.detach(), *found])
    for fp8, exact in zip(*results, strict=True):
        assert 0 < (fp8 - exact).norm() < 0.2 * exact.norm()


def quiet() -> None:
    """Ignore what it and what it uses are deprecated for, and warn of."""
    for module in (
        "torchtitan", "torchdata", "torch", "datasets", "importlib", "pydantic", "wandb",
    ):  # fmt: skip
        warnings.filterwarnings("ignore", module=rf"{module}($|\.)")


def prepare(ranks: Ranks) -> None:
    """Let its trainer run on the processes of the test, and on gloo."""
    quiet()
    os.environ["LOCAL_RANK"] = str(ranks.rank)
    torch.autograd.set_multithreading_enabled(False)  # as its own start of the processes does
    torchtitan.trainer.time = SimpleNamespace(  # it waits two seconds at the end
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
    torchtitan.trainer.Trainer.init_distributed = one_mesh
    if ranks.device.type == "cpu":
        fsdp.disable_fsdp_gradient_division = sum_gradients


DIMENSIONS: dict[tuple[str, int], Any] = {}


def one_mesh(trainer: Any) -> Any:
    """The meshes of an earlier trainer: DTensor takes equal ones for one, FSDP2 does not."""
    said = trainer.config.parallelism
    kind = said.spmd_backend, said.tensor_parallel_degree
    if kind not in DIMENSIONS:
        DIMENSIONS[kind] = ParallelDims.from_config(said, dist.get_world_size())
    return DIMENSIONS[kind]


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients without the factor, 1, that FSDP2 would pass to NCCL; gloo takes none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def job(ranks: Ranks, family: str, settings: dict[str, Any], **said: Any) -> Any:
    """Its configuration of a debug model, smaller; ``settings`` are dotted names."""
    config = getattr(FAMILIES[family][1], f"{family}_debugmodel")()
    config.model_spec = spec(family, **said)
    config.hf_assets_path = str(ranks.tmp_path / f"tokenizer{ranks.rank}")
    config.dump_folder = str(ranks.tmp_path)
    given = {
        "training.local_batch_size": 2, "training.seq_len": 32, "training.steps": STEPS,
        "training.disable_cuda_graphs": True, "validator.enable": False, "debug.seed": 0,
        "metrics.log_freq": 1, "activation_checkpoint": None, "compile.components": ["model"],
        "compile.backend": "aot_eager", **settings,
    }  # fmt: skip
    for name, value in given.items():
        *path, last = name.split(".")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


def train(config: Any) -> dict[str, Tensor]:
    """Run its trainer; this rank's part of each parameter, and of its optimizer's state."""
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
        gc.enable()  # it turns this off
    model = trainer.model_parts[0]
    state = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in trainer.optimizers.optimizers[0].state[p].items():
            state[f"{name} {key}"] = value.to_local() if hasattr(value, "to_local") else value
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in state.items()}


def assert_equal(mine: dict[str, Tensor], other: dict[str, Tensor], *, norms: bool = True) -> None:
    """All are the same bytes; ``norms=False``: but for the weights of norms."""
    names = [name for name in mine if norms or "norm" not in name]
    assert mine.keys() == other.keys()
    wrong = [name for name in names if not torch.equal(mine[name], other[name])]
    assert not wrong, wrong


def check_fsdp_and_recomputed(ranks: Ranks) -> None:
    prepare(ranks)
    for family in FAMILIES:
        states = []
        cases = ("partial_dtensor", "none"), *(("spmd_types", ac) for ac in CHECKPOINTING)
        for backend, ac in cases:
            settings = {
                "parallelism.spmd_backend": backend,
                "activation_checkpoint": CHECKPOINTING[ac],
            }
            with float8lab.count_gemms() as gemms, Collectives() as seen:
                states.append(train(job(ranks, family, settings)))
            assert torch.uint8 in {dtype for dtype, _ in seen.of("allgather")}
            high = {name for name in gemms.high_precision_by_module if name.startswith("layers")}
            assert {name.rpartition(".")[2] for name in high} <= {"inner_attention", "gate"}
            products = 4 if ac in ("selective", "full") else 3  # forward again, dgrad and wgrad
            assert gemms.fp8 == STEPS * products * LINEAR_LAYERS[family]
        for state in states[1:]:
            assert_equal(states[0], state)


def check_tensor_parallel_of_plain_shards_and_dtensors(ranks: Ranks) -> None:
    prepare(ranks)
    for family in FAMILIES:
        states = []
        for backend in ("partial_dtensor", "spmd_types"):
            settings = {
                "parallelism.spmd_backend": backend,
                "parallelism.tensor_parallel_degree": ranks.world,
            }
            # Gathered in FP8, as DTensors alone are, a weight is rounded once and not twice.
            with float8lab.count_gemms() as gemms:
                states.append(train(job(ranks, family, settings, fp8_all_gather=False)))
            assert gemms.fp8 == STEPS * 3 * LINEAR_LAYERS[family]
        # The gradients of norms' weights are sums over ranks, of bfloat16 in DTensors alone.
        assert_equal(*states, norms=False)


class Operands:
    """Keeps what each GEMM multiplies: by the layer's name, the GEMM's, and the side."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, int], Tensor] = {}

    def saw_cast(self, *args: Any) -> None:
        """Casts are seen as operands."""

    def saw_gemm(self, kind: str, call: Any, *operands: Any) -> None:
        """Keep the values, which the data and the scales say."""
        for side, (data, scale) in enumerate(operands):
            self.seen[call.precision.name, kind, side] = data.float() * scale


def operands_of(model: Any, x: Tensor, dy: Tensor) -> dict[tuple[str, str, int], Tensor]:
    with observing(Operands()) as kept:
        model(x.requires_grad_()).backward(dy)
    return kept.seen


def check_operands_of_plain_shards(ranks: Ranks) -> None:
    """They are those of one rank's: of x, weights and gradients, rows or columns."""
    prepare(ranks)
    config = ParallelismConfig(tensor_parallel_degree=ranks.world)
    dims = one_mesh(SimpleNamespace(config=SimpleNamespace(parallelism=config)))
    utils.set_spmd_backend("spmd_types")
    # M tokens, N out features, K in features; the second name of a pair is what is summed over.
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
        alone, spread = models
        x, dy = torch.randn(2, 2, 32, 256)
        x[0, 0] *= 9  # tokens of one rank alone
        whole = operands_of(alone, x, dy)
        with utils.get_spmd_context(parallel_dims=dims)():
            spread.parallelize(dims)
            parts = [t.chunk(ranks.world, 1)[ranks.rank].contiguous() for t in (x.detach(), dy)]
            mine = operands_of(spread, *parts)
        assert mine.keys() == whole.keys()
        assert len(mine) == 3 * 3 * 2
        for (name, kind, side), value in mine.items():
            cut = "K" if name == "w2" else "N"
            want, axes = whole[name, kind, side], sides[kind][side]
            if cut in axes:
                want = want.chunk(ranks.world, axes.index(cut))[ranks.rank]
            assert torch.equal(value, want), (recipe, name, kind, side)


def check_checkpoint_resumes(ranks: Ranks) -> None:
    prepare(ranks)
    for family, degree in (("deepseek_v3", 1), ("llama3", ranks.world)):
        settings = {
            "checkpoint.enable": True, "checkpoint.interval": 1, "checkpoint.folder": family,
            "parallelism.tensor_parallel_degree": degree,
        }  # fmt: skip
        whole = train(job(ranks, family, settings))
        resumed = train(job(ranks, family, {**settings, "checkpoint.load_step": 1}))
        assert_equal(whole, resumed)


def check_compiled(ranks: Ranks) -> None:
    prepare(ranks)
    for family, degree in (("deepseek_v3", 1), ("llama3", ranks.world)):
        settings = {"training.steps": 1, "parallelism.tensor_parallel_degree": degree}
        states = []
        for enabled in (False, True):
            state = train(job(ranks, family, {**settings, "compile.enable": enabled}))
            states.append({name.replace("_orig_mod.", ""): value for name, value in state.items()})
        # Compiled, the norms that torch decomposes add up the gradients of weights otherwise.
        assert_equal(*states, norms=False)


test_trainer = each_check(__name__, 2)
