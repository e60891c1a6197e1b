"""``Float8Precision`` in a real Trainer and Fabric loop: results, checkpoints and strategies."""

import copy
import importlib
import inspect
import logging
import pickle
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import float8lab
from float8lab import recipes
from tests.distributed.ranks import Collectives, Ranks, each_check

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of Lightning and its dependencies
    lightning = pytest.importorskip("lightning")
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from float8lab.integrations.lightning import Float8Precision

# Lightning's advice (loaders, loggers, how to resume), and its calls that torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pytorch_lightning"),
]

# Scales that depend on the whole amax history, so that an incomplete checkpoint shows.
DELAYED = recipes.DelayedScaling(
    amax_history_len=8, amax_compute_algo="max", power_of_2_scale=False
)
RECIPES: dict[str, Any] = {
    "default": None,
    "delayed": DELAYED,
    "mapping": {"fp8_format": "HYBRID", "amax_history_len": 8, "amax_compute_algo": "max"},
    "block": recipes.Float8BlockScaling(),
}


def network() -> nn.Module:
    """A network of sizes that 16 does not divide; one norm is replaced, the other is not."""
    return nn.Sequential(
        nn.Linear(13, 37), nn.LayerNorm(37), nn.GELU(), nn.LayerNorm(37, bias=False),
        nn.Linear(37, 3),
    )  # fmt: skip


def batches(count: int = 4, rows: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of decreasing size of values, so that amaxes depend on earlier batches."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for step in range(count):
        x = torch.randn(rows, 13, generator=generator) / (1 + step)
        data.append((x, torch.randint(3, (rows,), generator=generator)))
    return data


def loader(count: int = 4, rows: int = 7) -> Any:
    xs, ys = zip(*batches(count, rows), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=rows)


def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), y)


class TrainingSteps:
    """The methods of a training module, for the module classes of both packages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = network()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Module(TrainingSteps, lightning.LightningModule):
    pass


class Fsdp2Module(Module):
    """FSDP2 in a Trainer: the model is converted and then sharded in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self.net[0].weight, "placements"):
            self.trainer.precision_plugin.convert_module(self.net)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def plugin(recipe: Any = None, dtype: Any = torch.float32, **kwargs: Any) -> Float8Precision:
    return Float8Precision(weights_dtype=dtype, recipe=recipe, **kwargs)


def trainer(
    device: torch.device, epochs: int, precision: Any, package: Any = lightning, **kwargs: Any
) -> Any:
    kwargs = {"devices": 1, "logger": False, "enable_checkpointing": False} | kwargs
    return package.Trainer(
        accelerator=device.type, max_epochs=epochs, plugins=[precision], enable_progress_bar=False,
        use_distributed_sampler=False, enable_model_summary=False, **kwargs,
    )  # fmt: skip


def fit(module: Any, epochs: int, precision: Any, device: Any, **fit_options: Any) -> Any:
    """Train a module, with validation before and between epochs; return the trainer."""
    package = fit_options.pop("package", lightning)
    runner = trainer(device, epochs, precision, package)
    runner.fit(module, loader(), loader(1), **fit_options)
    return runner


def same_state(a: Any, b: Any) -> bool:
    """Whether two modules have equal bytes."""
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    unsharded = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t  # noqa: E731
    return all(n == m and torch.equal(unsharded(p), unsharded(q)) for (n, p), (m, q) in pairs)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_trainer_resumes_bit_for_bit(recipe: Any, device: Any, tmp_path: Path) -> None:
    """Train epochs 1 and 2, and epoch 2 from a checkpoint; with validation before and between."""
    uninterrupted = Module()
    with float8lab.count_gemms() as counts:
        fit(uninterrupted, 2, plugin(recipe), device)
    assert counts.fp8 > 0
    assert uninterrupted.losses[-4] < uninterrupted.losses[0]

    half_way = tmp_path / "half.ckpt"
    fit(Module(), 1, plugin(recipe), device).save_checkpoint(half_way)
    state = torch.load(half_way, weights_only=True)
    assert ("Float8Precision" in state) == (recipe is not RECIPES["block"])

    resumed = Module()
    nn.init.zeros_(resumed.net[0].weight)
    fit(resumed, 2, plugin(recipe), device, ckpt_path=half_way)
    assert resumed.losses == uninterrupted.losses[4:]
    assert same_state(resumed, uninterrupted)

    if recipe is DELAYED:  # without the plugin's state the result differs
        del state["Float8Precision"]
        torch.save(state, tmp_path / "without.ckpt")
        without_state = Module()
        fit(without_state, 2, plugin(recipe), device, ckpt_path=tmp_path / "without.ckpt")
        assert not same_state(without_state, uninterrupted)


def test_pytorch_lightning_gives_the_results_of_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers its Trainer and its Fabric, and a checkpoint that the other package wrote."""
    log = "lightning_utilities.core.rank_zero.log"
    monkeypatch.setattr(log, logging.getLogger("lightning.fabric.utilities.rank_zero"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytorch_lightning = pytest.importorskip("pytorch_lightning")
        lightning_fabric = pytest.importorskip("lightning_fabric")
        OtherPrecision = importlib.import_module(
            "float8lab.integrations.pytorch_lightning"
        ).Float8Precision

    class OtherModule(TrainingSteps, pytorch_lightning.LightningModule):  # type: ignore[misc, name-defined]
        pass

    plugin_options: Any = {"weights_dtype": torch.float32, "recipe": DELAYED}
    uninterrupted, resumed, cpu, half_way = (
        Module(),
        OtherModule(),
        torch.device("cpu"),
        tmp_path / "half.ckpt",
    )
    fit(uninterrupted, 2, plugin(DELAYED), cpu)
    fit(Module(), 1, plugin(DELAYED), cpu).save_checkpoint(half_way)
    fit(
        resumed,
        2,
        OtherPrecision(**plugin_options),
        cpu,
        package=pytorch_lightning,
        ckpt_path=half_way,
    )
    assert resumed.losses == uninterrupted.losses[4:]
    assert same_state(resumed, uninterrupted)

    fabric = lightning_fabric.Fabric(
        accelerator="cpu", devices=1, plugins=[OtherPrecision(**plugin_options)]
    )
    model, optimizer = set_up_network(fabric)
    train_steps(fabric, model, optimizer, 2 * batches())
    assert same_state(model, manual_loop(DELAYED, cpu))


def test_validation_and_prediction_change_no_scale(device: Any) -> None:
    model, precision = Module(), plugin(DELAYED, replace_layers=True)
    runner = trainer(device, 1, precision)
    # In inference mode, where the state is created.
    runner.validate(model, loader(2), verbose=False)
    runner.fit(model, loader())
    before = precision.state_dict()["0"]
    assert any(key.endswith("/scale") for key in before)
    runner.validate(model, loader(2), verbose=False)
    (y, *_) = runner.predict(model, loader(2))
    assert y.shape == (7, 3)
    after = precision.state_dict()["0"]
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_trainer_accumulates_and_clips_in_bfloat16(device: Any) -> None:
    model = Module()
    precision = plugin(DELAYED, torch.bfloat16)
    runner = trainer(device, 3, precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
    runner.fit(model, loader(), loader(1))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.losses[-4] < model.losses[0]
    assert runner.precision == "float8"


def manual_loop(recipe: Any, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = float8lab.convert_to_float8(network().to(device), recipe)
    float8lab.nn.convert_norms(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in 2 * batches():
        with float8lab.autocast(recipe=recipe):
            logits = model(x.to(device))
        optimizer.zero_grad()
        cross_entropy(logits, y.to(device)).backward()
        optimizer.step()
    return model


def fabric_for(device: torch.device, *plugins: Any, **kwargs: Any) -> Any:
    kwargs = {"devices": 1} | kwargs
    return lightning.Fabric(accelerator=device.type, plugins=list(plugins), **kwargs)


def set_up_network(fabric: Any) -> tuple[Any, Any]:
    """The network and its optimizer after ``fabric.setup``."""
    torch.manual_seed(0)
    model = network()
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))  # type: ignore[no-any-return]


def train_steps(fabric: Any, model: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        loss = cross_entropy(model(x.to(fabric.device)), y.to(fabric.device))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


@pytest.mark.parametrize("recipe", [DELAYED, recipes.Float8RowwiseScaling()], ids=repr)
def test_fabric_equals_a_manual_loop_and_resumes(recipe: Any, device: Any, tmp_path: Path) -> None:
    def set_up_with_state() -> Any:
        precision = plugin(recipe)
        fabric = fabric_for(device, precision)
        model, optimizer = set_up_network(fabric)
        return fabric, model, optimizer, {"model": model, "optimizer": optimizer, "fp8": precision}

    fabric, model, optimizer, state = set_up_with_state()
    train_steps(fabric, model, optimizer, batches())
    fabric.save(tmp_path / "half.ckpt", state)
    train_steps(fabric, model, optimizer, batches())
    assert same_state(model, manual_loop(recipe, device))

    fabric, reloaded, optimizer, state = set_up_with_state()
    nn.init.zeros_(reloaded.module[0].weight)
    fabric.load(tmp_path / "half.ckpt", state)
    train_steps(fabric, reloaded, optimizer, batches())
    assert same_state(reloaded, model)


def test_a_plugin_can_be_used_by_a_trainer_and_then_by_fabric(device: Any) -> None:
    precision = plugin()
    trainer(device, 1, precision).fit(Module(), loader())
    fabric = fabric_for(device, precision)
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = copy.deepcopy(net)
    train_steps(fabric, model, optimizer, batches())
    assert not same_state(net, before)


def test_state_of_two_models_on_one_fabric_is_saved_and_loaded() -> None:
    def set_up_models(precision: Float8Precision) -> list[Any]:
        fabric = fabric_for(torch.device("cpu"), precision)
        models = [fabric.setup(nn.Linear(8, 8)), fabric.setup(nn.Linear(8, 8))]
        fabric.setup(nn.Linear(8, 8))  # freed at once, so it is in no checkpoint
        return models

    precision = plugin(DELAYED)
    first_model, second_model = set_up_models(precision)
    for _ in range(2):
        first_model(torch.ones(2, 8)).sum().backward()
        second_model(3 * torch.ones(2, 8)).sum().backward()
    state = precision.state_dict()
    assert list(state) == ["0", "1"]
    (key,) = (key for key in state["0"] if key.endswith("/history"))
    assert state["0"][key].max() == 1.0
    assert state["1"][key].max() == 3.0

    loaded_plugin = plugin(DELAYED)
    living_models = set_up_models(loaded_plugin)
    loaded_plugin.load_state_dict(state)
    loaded = loaded_plugin.state_dict()
    assert len(living_models) == len(loaded)
    for index in state:
        assert all(torch.equal(loaded[index][k], state[index][k]) for k in state[index])


def test_replaced_layers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    precision, net = plugin(), network()
    with caplog.at_level(logging.INFO, "lightning.fabric.utilities.rank_zero"):
        precision.convert_module(net)
        precision.convert_module(net)  # the Trainer does so at each fit, validate, test and predict
    norms = ["1 of 2 norm layers replaced", "norm layer '3' left alone: it has no bias"]
    report = float8lab.conversion_report(net)
    assert [record.getMessage() for record in caplog.records] == [
        "\n".join([f"Float8Precision:\n{report}", *norms])
    ]
    assert report.summary == "2 of 2 linear layers in FP8, 85.1 % of 743 parameters"
    assert isinstance(net[0], float8lab.Linear)
    assert isinstance(net[1], float8lab.LayerNorm)
    assert type(net[3]) is nn.LayerNorm


@pytest.mark.parametrize("replace_layers", [None, True])
def test_a_model_with_fp8_layers_is_not_converted(
    replace_layers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net = float8lab.convert_to_float8(network(), exclude=["4"])
    precision = plugin(replace_layers=replace_layers)
    with caplog.at_level(logging.INFO, "lightning.fabric.utilities.rank_zero"):
        precision.convert_module(net)
    assert type(net[4]) is nn.Linear
    assert type(net[1]) is nn.LayerNorm
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (replace_layers is True)
    assert all("has FP8 layers already" in line for line in messages)


def test_replace_layers_false_replaces_nothing_and_runs_fp8_layers() -> None:
    net = nn.Sequential(nn.Linear(16, 16), float8lab.Linear(16, 16, device="cpu"), nn.LayerNorm(16))
    precision = plugin(recipes.Float8BlockScaling(), replace_layers=False)
    fabric = fabric_for(torch.device("cpu"), precision)
    model = fabric.setup(net)
    assert [type(m) for m in net] == [nn.Linear, float8lab.Linear, nn.LayerNorm]
    with float8lab.count_gemms() as counts:
        output = model(torch.ones(2, 16))
    assert counts.fp8 == 1
    with float8lab.autocast(recipe=recipes.Float8BlockScaling()):
        assert torch.equal(output, net(torch.ones(2, 16)))


def test_replace_layers_set_later_applies_from_the_next_setup() -> None:
    precision, net = plugin(replace_layers=False), network()
    precision.convert_module(net)
    assert type(net[0]) is nn.Linear
    precision.replace_layers = True
    precision.convert_module(net)
    assert isinstance(net[0], float8lab.Linear)
    assert isinstance(net[1], float8lab.LayerNorm)


def test_recipe_none_keeps_the_recipes_of_converted_layers() -> None:
    net = float8lab.convert_to_float8(nn.Linear(200, 16), recipes.Float8BlockScaling())
    x = torch.randn(3, 200)
    expected = net(x)
    assert torch.equal(fabric_for(torch.device("cpu"), plugin()).setup(net)(x), expected)
    # The recipe of an enclosing autocast takes precedence.
    current_plugin = plugin(recipes.Float8CurrentScaling())
    assert not torch.equal(fabric_for(torch.device("cpu"), current_plugin).setup(net)(x), expected)


def test_auto_chooses_the_precision_of_each_layer() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8192, device="meta"))
    precision = plugin("auto")
    with pytest.warns(UserWarning, match="converted none of the 2 .* bfloat16 is faster"):
        precision.convert_module(net)
    assert "predicted on Hopper" in str(float8lab.conversion_report(net))
    assert precision.state_dict() == {}


def test_fallback_compute_dtype_autocasts_other_ops(device: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv1d(1, 1, 3), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> Any:
            self.dtypes = [(y := self.conv(x)).dtype, (z := self.linear(x[..., :6])).dtype]
            self.dtypes += [(y @ y.mT).dtype, torch.zeros(1).dtype]
            return {"y": y, "z": [z], "n": torch.ones(1, dtype=torch.int64)}

    def run(dtype: torch.dtype, fallback: Any) -> Any:
        model = fabric_for(device, plugin(None, dtype, fallback_compute_dtype=fallback)).setup(
            Net()
        )
        out = model(torch.randn(2, 1, 8, device=device))
        assert {out["y"].dtype, out["z"][0].dtype} == {torch.float32}
        assert out["n"].dtype == torch.int64
        assert {p.dtype for p in model.parameters()} == {dtype}
        return model.module.dtypes

    bf16, fp32 = torch.bfloat16, torch.float32
    assert run(fp32, bf16) == [bf16, bf16, bf16, fp32]
    assert run(fp32, None) == [fp32, fp32, fp32, fp32]
    assert run(bf16, None) == [bf16, bf16, bf16, bf16]
    assert run(bf16, torch.float16)[:3] == [torch.float16] * 3


def test_init_contexts_set_and_restore_the_default_dtype() -> None:
    precision = plugin(dtype=torch.bfloat16)
    fabric = fabric_for(torch.device("cpu"), precision)
    with fabric.init_module(empty_init=True):
        layer = nn.Linear(3, 3)
    assert layer.weight.dtype == torch.bfloat16
    assert type(layer) is nn.Linear
    with fabric.init_tensor():
        assert torch.zeros(1).dtype == torch.bfloat16
    with precision.module_init_context(), torch.device("meta"):
        assert (meta_layer := nn.Linear(3, 3)).weight.is_meta
    assert meta_layer.weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError), precision.forward_context():
        torch.zeros(2) @ torch.zeros(3)
    assert torch.get_default_dtype() == torch.float32


class Fp8Weights(Module):
    """Weights stored in FP8, trained with float32 masters."""

    def __init__(self) -> None:
        super().__init__()
        with float8lab.fp8_model_init():
            self.net = nn.Sequential(
                float8lab.Linear(13, 37, device="cpu"), float8lab.Linear(37, 3, device="cpu")
            )

    def configure_optimizers(self) -> Any:
        return float8lab.optim.MasterWeights(self.parameters(), torch.optim.AdamW, lr=1e-2)


def test_fp8_weights_stay_fp8_and_resume(device: Any, tmp_path: Path) -> None:
    def fit_fp8_weights(epochs: int, **fit_options: Any) -> Any:
        torch.manual_seed(epochs)
        model = Fp8Weights()
        if fit_options:
            nn.init.zeros_(model.net[0].weight)
        else:
            model.load_state_dict(start)
        runner = trainer(device, epochs, plugin(DELAYED, torch.bfloat16))
        runner.fit(model, loader(), **fit_options)
        return model, runner

    start = Fp8Weights().state_dict()
    uninterrupted, _ = fit_fp8_weights(2)
    _, runner = fit_fp8_weights(1)
    runner.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit_fp8_weights(2, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.losses == uninterrupted.losses[4:]
    for parameter, expected in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert isinstance(parameter, float8lab.Float8Tensor) == (parameter.ndim == 2)
        for buffer_name in ("qdata", "scale") if parameter.ndim == 2 else ("data",):
            assert torch.equal(getattr(parameter, buffer_name), getattr(expected, buffer_name))


def test_copies_of_a_plugin_hold_no_model() -> None:
    precision, layer = plugin(DELAYED), nn.Linear(8, 8)
    precision.convert_module(layer)
    assert list(precision.state_dict()) == ["0"]
    for copied in (copy.deepcopy(precision), pickle.loads(pickle.dumps(precision))):
        assert copied.recipe == DELAYED
        assert copied.state_dict() == {}


def test_invalid_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"weights_dtype must be one of .*float8_e4m3fn"):
        plugin(dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"fallback_compute_dtype must be .*got torch.float32"):
        plugin(dtype=torch.bfloat16, fallback_compute_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"recipe must be one of .*got 3"):
        plugin(3)
    with pytest.raises(TypeError, match=r"recipe must have fields of DelayedScaling; got 'x'"):
        plugin({"x": 1})
    with pytest.raises(TypeError, match=r"replace_layers must be True or False; got 'yes'"):
        plugin(replace_layers="yes")
    with pytest.raises(TypeError, match=r"fallback_compute_dtype must be .*got 'bfloat16'"):
        plugin(fallback_compute_dtype="bfloat16")


def test_missing_lightning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.fabric.plugins", None)
    with pytest.raises(ModuleNotFoundError, match='needs the extra "lightning"'):
        runpy.run_path(inspect.getfile(Float8Precision))


def test_the_plugin_is_an_attribute_of_the_package() -> None:
    assert float8lab.integrations.lightning.Float8Precision is Float8Precision
    assert {"lightning", "pytorch_lightning"} <= set(dir(float8lab.integrations))
    with pytest.raises(AttributeError, match="no attribute 'thunder'"):
        float8lab.integrations.thunder  # noqa: B018


# Tests on several processes.


class RunningRanks(LightningEnvironment):
    """An environment of processes that already run and are connected."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.rank = ranks.rank
        self.set_world_size(ranks.world)
        self.set_global_rank(ranks.rank)

    creates_processes_externally = True

    def local_rank(self) -> int:
        return self.rank


def ignore_warnings() -> None:
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module="lightning")
        warnings.filterwarnings("ignore", category=category, module="torch.distributed")
    # Fabric creates DDP on its own stream.
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)


def batches_of_rank(ranks: Ranks) -> Any:
    return batches(4 * ranks.world)[ranks.rank :: ranks.world]


def assert_fabric_resumes(ranks: Ranks, strategy: Any) -> Any:
    """Assert that training resumed half-way gives the model of uninterrupted training."""
    trained = []
    for is_resumed in (False, True):
        precision = plugin(DELAYED, replace_layers=True)
        fabric = fabric_for(
            ranks.device, precision, RunningRanks(ranks), devices=ranks.world, strategy=strategy()
        )
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = network()
        model = fabric.setup_module(model)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                value = 0.2 * torch.randn(parameter.shape, device=ranks.device)
                if hasattr(parameter, "placements"):
                    value = torch.distributed.tensor.distribute_tensor(
                        value, parameter.device_mesh, parameter.placements
                    )
                parameter.copy_(value)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "fp8": precision}
        if is_resumed:
            fabric.load(ranks.tmp_path / "half", state)
            # Lightning replaces the entry by the state when it loads a sharded checkpoint
            if state["fp8"] is not precision:
                precision.load_state_dict(state["fp8"])
        else:
            train_steps(fabric, model, optimizer, batches_of_rank(ranks))
            fabric.save(ranks.tmp_path / "half", state)
        torch.distributed.barrier()
        train_steps(fabric, model, optimizer, batches_of_rank(ranks))
        trained.append((fabric, model, precision))
    (_, uninterrupted, _), (fabric, resumed, precision) = trained
    assert same_state(uninterrupted, resumed)
    return fabric, resumed, precision


def check_fabric_ddp_resumes(ranks: Ranks) -> None:
    ignore_warnings()
    _, model, precision = assert_fabric_resumes(ranks, FabricDDP)
    for parameter in model.parameters():
        ranks.assert_same(parameter)
    state = precision.state_dict()["0"]
    assert sum(key.endswith("/scale") for key in state) == 2
    for value in state.values():
        ranks.assert_same(value)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_statistics_are_sent_to_the_loggers(package: str, tmp_path: Path) -> None:
    """Uses the classes of each package.

    A resumed training continues the steps; an error ends the watch.
    """
    trainer_package = importlib.import_module(
        f"{package}.pytorch" if package == "lightning" else package
    )
    integration = importlib.import_module(f"float8lab.integrations.{package}")
    module_class = type("Module", (TrainingSteps, trainer_package.LightningModule), {})
    logger = trainer_package.loggers.CSVLogger(tmp_path, version=0)
    stats = integration.Float8StatsCallback(every=2, layers="0")

    def fit(epochs: int, module: Any, **fit_options: Any) -> Any:
        precision = integration.Float8Precision(weights_dtype=torch.float32)
        runner = trainer(
            torch.device("cpu"),
            epochs,
            precision,
            trainer_package,
            callbacks=[stats],
            logger=logger,
        )
        runner.fit(module, loader(3), **fit_options)
        return runner

    fit(1, module_class()).save_checkpoint(tmp_path / "half.ckpt")
    assert [step.step for step in stats.watch.log.steps] == [0, 2]
    fit(2, module_class(), ckpt_path=tmp_path / "half.ckpt")
    assert [step.step for step in stats.watch.log.steps] == [4]
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "float8/net.0/gradient/sqnr" in rows[0]
    assert {row.split(",")[rows[0].split(",").index("step")] for row in rows[1:]} == {*"024"}

    failing_module = module_class()
    failing_module.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(1, failing_module)
    with float8lab.inspect.watch(failing_module):  # raises if another watch were active
        pass


def check_fabric_fsdp2_from_the_meta_device_resumes(ranks: Ranks) -> None:
    ignore_warnings()

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        assert isinstance(model[0], float8lab.Linear)
        assert model[0].weight.is_meta
        return fully_shard(model, mesh=mesh["data_parallel"])

    def strategy() -> Any:
        return FabricModelParallel(shard, data_parallel_size=ranks.world, tensor_parallel_size=1)

    fabric, model, _ = assert_fabric_resumes(ranks, strategy)
    with Collectives() as collectives:
        model(torch.ones(2, 13, device=fabric.device))
    assert torch.uint8 in {dtype for dtype, _ in collectives.of("allgather")}


def assert_trainer_resumes(ranks: Ranks, module: Any, strategy: Any) -> Any:
    def fit(model: Any, epochs: int, **fit_options: Any) -> Any:
        environment, precision = RunningRanks(ranks), plugin(DELAYED)
        runner = lightning.Trainer(
            accelerator=ranks.device.type, devices=ranks.world, strategy=strategy(),
            plugins=[precision, environment], max_epochs=epochs, use_distributed_sampler=False,
            enable_progress_bar=False, enable_model_summary=False, logger=False,
            enable_checkpointing=False, num_sanity_val_steps=0,
        )  # fmt: skip
        xs, ys = zip(*batches_of_rank(ranks), strict=True)
        data = DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=7)
        runner.fit(model, data, **fit_options)
        return runner

    uninterrupted, half_way, resumed = module(), module(), module()
    fit(uninterrupted, 2)
    fit(half_way, 1).save_checkpoint(ranks.tmp_path / "half")
    torch.distributed.barrier()
    fit(resumed, 2, ckpt_path=ranks.tmp_path / "half")
    assert resumed.losses == uninterrupted.losses[4:]
    assert same_state(resumed, uninterrupted)
    return resumed


def check_trainer_ddp_resumes(ranks: Ranks) -> None:
    ignore_warnings()
    for parameter in assert_trainer_resumes(ranks, Module, DDPStrategy).parameters():
        ranks.assert_same(parameter)


def check_trainer_fsdp2_resumes(ranks: Ranks) -> None:
    ignore_warnings()

    def strategy() -> Any:
        return ModelParallelStrategy(data_parallel_size=ranks.world, tensor_parallel_size=1)

    model = assert_trainer_resumes(ranks, Fsdp2Module, strategy)
    with Collectives() as collectives:
        model.net(torch.ones(2, 13, device=ranks.device))
    assert torch.uint8 in {dtype for dtype, _ in collectives.of("allgather")}


def check_report_is_logged_once(ranks: Ranks) -> None:
    ignore_warnings()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = sys.modules["lightning_utilities.core.rank_zero"].log
    log.addHandler(handler)
    environment = RunningRanks(ranks)
    fabric = fabric_for(
        ranks.device, plugin(), environment, devices=ranks.world, strategy=FabricDDP()
    )
    fabric.launch()
    fabric.setup(network())
    log.removeHandler(handler)
    assert sum("Float8Precision" in r.getMessage() for r in records) == (ranks.rank == 0)


test_on_two_processes = each_check(__name__, 2)
