"""Float8Precision in a real Trainer and a real Fabric loop: numbers, checkpoints, strategies."""

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
    warnings.simplefilter("ignore")  # what Lightning and its dependencies are deprecated for
    lightning = pytest.importorskip("lightning")
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from float8lab.integrations.lightning import Float8Precision

# Lightning's advice (loaders, loggers, how to resume), and what it calls that torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pytorch_lightning"),
]

# Scales that follow the whole history bit by bit: what a checkpoint forgets, shows.
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
    """Sizes that no 16 divides; one norm that is replaced and one that is not."""
    return nn.Sequential(
        nn.Linear(13, 37), nn.LayerNorm(37), nn.GELU(), nn.LayerNorm(37, bias=False),
        nn.Linear(37, 3),
    )  # fmt: skip


def batches(count: int = 4, rows: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each smaller than the one before, for amaxes to depend on what was seen earlier."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for step in range(count):
        x = torch.randn(rows, 13, generator=generator) / (1 + step)
        made.append((x, torch.randint(3, (rows,), generator=generator)))
    return made


def loader(count: int = 4, rows: int = 7) -> Any:
    xs, ys = zip(*batches(count, rows), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=rows)


def cross_entropy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), y)


class Steps:
    """What a module does, whichever package its class is of."""

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


class Module(Steps, lightning.LightningModule):
    pass


class Sharded(Module):
    """FSDP2 in a Trainer: converted, then sharded, where Lightning has the model sharded."""

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


def fit(module: Any, epochs: int, precision: Any, device: Any, **how: Any) -> Any:
    """Train a module, with validation before and between epochs; returns the trainer."""
    package = how.pop("package", lightning)
    runner = trainer(device, epochs, precision, package)
    runner.fit(module, loader(), loader(1), **how)
    return runner


def same(a: Any, b: Any) -> bool:
    """Whether two modules have the same bytes."""
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    plain = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t  # noqa: E731
    return all(n == m and torch.equal(plain(p), plain(q)) for (n, p), (m, q) in pairs)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_trainer_resumes_bit_for_bit(recipe: Any, device: Any, tmp_path: Path) -> None:
    """Epochs 1 and 2, and epoch 2 from a checkpoint; with validation before and between."""
    whole = Module()
    with float8lab.count_gemms() as counts:
        fit(whole, 2, plugin(recipe), device)
    assert counts.fp8 > 0
    assert whole.losses[-4] < whole.losses[0]

    half = tmp_path / "half.ckpt"
    fit(Module(), 1, plugin(recipe), device).save_checkpoint(half)
    state = torch.load(half, weights_only=True)
    assert ("Float8Precision" in state) == (recipe is not RECIPES["block"])

    rest = Module()
    nn.init.zeros_(rest.net[0].weight)
    fit(rest, 2, plugin(recipe), device, ckpt_path=half)
    assert rest.losses == whole.losses[4:]
    assert same(rest, whole)

    if recipe is DELAYED:  # the checkpoint's state is what does it
        del state["Float8Precision"]
        torch.save(state, tmp_path / "without.ckpt")
        forgetful = Module()
        fit(forgetful, 2, plugin(recipe), device, ckpt_path=tmp_path / "without.ckpt")
        assert not same(forgetful, whole)


def test_pytorch_lightning_does_as_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Trainer and its Fabric, and a checkpoint that the other package has written."""
    log = "lightning_utilities.core.rank_zero.log"
    monkeypatch.setattr(log, logging.getLogger("lightning.fabric.utilities.rank_zero"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("pytorch_lightning")
        fabric_of_other = pytest.importorskip("lightning_fabric")
        plugin_of_other = importlib.import_module(
            "float8lab.integrations.pytorch_lightning"
        ).Float8Precision

    class Other(Steps, other.LightningModule):  # type: ignore[misc, name-defined]
        pass

    how: Any = {"weights_dtype": torch.float32, "recipe": DELAYED}
    whole, rest, cpu, half = Module(), Other(), torch.device("cpu"), tmp_path / "half.ckpt"
    fit(whole, 2, plugin(DELAYED), cpu)
    fit(Module(), 1, plugin(DELAYED), cpu).save_checkpoint(half)
    fit(rest, 2, plugin_of_other(**how), cpu, package=other, ckpt_path=half)
    assert rest.losses == whole.losses[4:]
    assert same(rest, whole)

    fabric = fabric_of_other.Fabric(accelerator="cpu", devices=1, plugins=[plugin_of_other(**how)])
    model, optimizer = set_up(fabric)
    steps(fabric, model, optimizer, 2 * batches())
    assert same(model, manual_loop(DELAYED, cpu))


def test_validating_and_predicting_changes_no_scale(device: Any) -> None:
    model, precision = Module(), plugin(DELAYED, replace_layers=True)
    runner = trainer(device, 1, precision)
    runner.validate(model, loader(2), verbose=False)  # in inference mode; the state is made there
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


def set_up(fabric: Any) -> tuple[Any, Any]:
    """The network and its optimizer, as Fabric has them."""
    torch.manual_seed(0)
    model = network()
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))  # type: ignore[no-any-return]


def steps(fabric: Any, model: Any, optimizer: Any, data: Any) -> None:
    for x, y in data:
        loss = cross_entropy(model(x.to(fabric.device)), y.to(fabric.device))
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


@pytest.mark.parametrize("recipe", [DELAYED, recipes.Float8RowwiseScaling()], ids=repr)
def test_fabric_is_the_loop_by_hand_and_resumes(recipe: Any, device: Any, tmp_path: Path) -> None:
    def started() -> Any:
        precision = plugin(recipe)
        fabric = fabric_for(device, precision)
        model, optimizer = set_up(fabric)
        return fabric, model, optimizer, {"model": model, "optimizer": optimizer, "fp8": precision}

    fabric, model, optimizer, state = started()
    steps(fabric, model, optimizer, batches())
    fabric.save(tmp_path / "half.ckpt", state)
    steps(fabric, model, optimizer, batches())
    assert same(model, manual_loop(recipe, device))

    fabric, again, optimizer, state = started()
    nn.init.zeros_(again.module[0].weight)
    fabric.load(tmp_path / "half.ckpt", state)
    steps(fabric, again, optimizer, batches())
    assert same(again, model)


def test_a_plugin_serves_a_trainer_and_then_fabric(device: Any) -> None:
    precision = plugin()
    trainer(device, 1, precision).fit(Module(), loader())
    fabric = fabric_for(device, precision)
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = copy.deepcopy(net)
    steps(fabric, model, optimizer, batches())
    assert not same(net, before)


def test_states_of_two_models_on_one_fabric() -> None:
    def trained(precision: Float8Precision) -> list[Any]:
        fabric = fabric_for(torch.device("cpu"), precision)
        models = [fabric.setup(nn.Linear(8, 8)), fabric.setup(nn.Linear(8, 8))]
        fabric.setup(nn.Linear(8, 8))  # gone at once: it is in no checkpoint
        return models

    precision = plugin(DELAYED)
    one, two = trained(precision)
    for _ in range(2):
        one(torch.ones(2, 8)).sum().backward()
        two(3 * torch.ones(2, 8)).sum().backward()
    state = precision.state_dict()
    assert list(state) == ["0", "1"]
    (key,) = (key for key in state["0"] if key.endswith("/history"))
    assert state["0"][key].max() == 1.0
    assert state["1"][key].max() == 3.0

    other = plugin(DELAYED)
    kept = trained(other)
    other.load_state_dict(state)
    loaded = other.state_dict()
    assert len(kept) == len(loaded)
    for index in state:
        assert all(torch.equal(loaded[index][k], state[index][k]) for k in state[index])


def test_reports_what_was_replaced(caplog: pytest.LogCaptureFixture) -> None:
    precision, net = plugin(), network()
    with caplog.at_level(logging.INFO, "lightning.fabric.utilities.rank_zero"):
        precision.convert_module(net)
        precision.convert_module(net)  # the Trainer does so at each fit, validate, test, predict
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
def test_a_model_with_fp8_layers_is_left_alone(
    replace_layers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net = float8lab.convert_to_float8(network(), exclude=["4"])
    precision = plugin(replace_layers=replace_layers)
    with caplog.at_level(logging.INFO, "lightning.fabric.utilities.rank_zero"):
        precision.convert_module(net)
    assert type(net[4]) is nn.Linear
    assert type(net[1]) is nn.LayerNorm
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (replace_layers is True)
    assert all("has FP8 layers already" in line for line in told)


def test_replace_layers_false_replaces_nothing_and_runs_fp8_layers() -> None:
    net = nn.Sequential(nn.Linear(16, 16), float8lab.Linear(16, 16, device="cpu"), nn.LayerNorm(16))
    precision = plugin(recipes.Float8BlockScaling(), replace_layers=False)
    fabric = fabric_for(torch.device("cpu"), precision)
    model = fabric.setup(net)
    assert [type(m) for m in net] == [nn.Linear, float8lab.Linear, nn.LayerNorm]
    with float8lab.count_gemms() as counts:
        got = model(torch.ones(2, 16))
    assert counts.fp8 == 1
    with float8lab.autocast(recipe=recipes.Float8BlockScaling()):
        assert torch.equal(got, net(torch.ones(2, 16)))


def test_replace_layers_set_later_holds_from_the_next_setup_on() -> None:
    precision, net = plugin(replace_layers=False), network()
    precision.convert_module(net)
    assert type(net[0]) is nn.Linear
    precision.replace_layers = True
    precision.convert_module(net)
    assert isinstance(net[0], float8lab.Linear)
    assert isinstance(net[1], float8lab.LayerNorm)


def test_recipe_none_leaves_converted_layers_their_own() -> None:
    net = float8lab.convert_to_float8(nn.Linear(200, 16), recipes.Float8BlockScaling())
    x = torch.randn(3, 200)
    expected = net(x)
    assert torch.equal(fabric_for(torch.device("cpu"), plugin()).setup(net)(x), expected)
    given = plugin(recipes.Float8CurrentScaling())  # an enclosing autocast's recipe wins
    assert not torch.equal(fabric_for(torch.device("cpu"), given).setup(net)(x), expected)


def test_auto_chooses_for_each_layer() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8192, device="meta"))
    precision = plugin("auto")
    with pytest.warns(UserWarning, match="converted none of the 2 .* bfloat16 is faster"):
        precision.convert_module(net)
    assert "predicted on Hopper" in str(float8lab.conversion_report(net))
    assert precision.state_dict() == {}


def test_fallback_is_an_autocast_for_what_is_not_fp8(device: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv1d(1, 1, 3), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> Any:
            self.seen = [(y := self.conv(x)).dtype, (z := self.linear(x[..., :6])).dtype]
            self.seen += [(y @ y.mT).dtype, torch.zeros(1).dtype]
            return {"y": y, "z": [z], "n": torch.ones(1, dtype=torch.int64)}

    def run(dtype: torch.dtype, fallback: Any) -> Any:
        model = fabric_for(device, plugin(None, dtype, fallback_compute_dtype=fallback)).setup(
            Net()
        )
        out = model(torch.randn(2, 1, 8, device=device))
        assert {out["y"].dtype, out["z"][0].dtype} == {torch.float32}
        assert out["n"].dtype == torch.int64
        assert {p.dtype for p in model.parameters()} == {dtype}
        return model.module.seen

    bf16, fp32 = torch.bfloat16, torch.float32
    assert run(fp32, bf16) == [bf16, bf16, bf16, fp32]
    assert run(fp32, None) == [fp32, fp32, fp32, fp32]
    assert run(bf16, None) == [bf16, bf16, bf16, bf16]
    assert run(bf16, torch.float16)[:3] == [torch.float16] * 3


def test_init_contexts_set_the_dtype_and_put_it_back() -> None:
    precision = plugin(dtype=torch.bfloat16)
    fabric = fabric_for(torch.device("cpu"), precision)
    with fabric.init_module(empty_init=True):
        layer = nn.Linear(3, 3)
    assert layer.weight.dtype == torch.bfloat16
    assert type(layer) is nn.Linear
    with fabric.init_tensor():
        assert torch.zeros(1).dtype == torch.bfloat16
    with precision.module_init_context(), torch.device("meta"):
        assert (made := nn.Linear(3, 3)).weight.is_meta
    assert made.weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError), precision.forward_context():
        torch.zeros(2) @ torch.zeros(3)
    assert torch.get_default_dtype() == torch.float32


class Stored(Module):
    """Weights of one byte, trained with float32 masters."""

    def __init__(self) -> None:
        super().__init__()
        with float8lab.fp8_model_init():
            self.net = nn.Sequential(
                float8lab.Linear(13, 37, device="cpu"), float8lab.Linear(37, 3, device="cpu")
            )

    def configure_optimizers(self) -> Any:
        return float8lab.optim.MasterWeights(self.parameters(), torch.optim.AdamW, lr=1e-2)


def test_weights_stored_in_fp8_stay_so_and_resume(device: Any, tmp_path: Path) -> None:
    def fitted(epochs: int, **how: Any) -> Any:
        torch.manual_seed(epochs)
        model = Stored()
        if how:
            nn.init.zeros_(model.net[0].weight)
        else:
            model.load_state_dict(start)
        runner = trainer(device, epochs, plugin(DELAYED, torch.bfloat16))
        runner.fit(model, loader(), **how)
        return model, runner

    start = Stored().state_dict()
    whole, _ = fitted(2)
    _, runner = fitted(1)
    runner.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = fitted(2, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses == whole.losses[4:]
    for one, other in zip(rest.parameters(), whole.parameters(), strict=True):
        assert one.dtype == torch.bfloat16
        assert isinstance(one, float8lab.Float8Tensor) == (one.ndim == 2)
        for part in ("qdata", "scale") if one.ndim == 2 else ("data",):
            assert torch.equal(getattr(one, part), getattr(other, part))


def test_copies_know_no_model() -> None:
    precision, layer = plugin(DELAYED), nn.Linear(8, 8)
    precision.convert_module(layer)
    assert list(precision.state_dict()) == ["0"]
    for made in (copy.deepcopy(precision), pickle.loads(pickle.dumps(precision))):
        assert made.recipe == DELAYED
        assert made.state_dict() == {}


def test_arguments_are_checked() -> None:
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


def test_found_by_attribute() -> None:
    assert float8lab.integrations.lightning.Float8Precision is Float8Precision
    assert {"lightning", "pytorch_lightning"} <= set(dir(float8lab.integrations))
    with pytest.raises(AttributeError, match="no attribute 'thunder'"):
        float8lab.integrations.thunder  # noqa: B018


# On several processes


class Started(LightningEnvironment):
    """The processes run already, and are connected."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.rank = ranks.rank
        self.set_world_size(ranks.world)
        self.set_global_rank(ranks.rank)

    creates_processes_externally = True

    def local_rank(self) -> int:
        return self.rank


def quiet() -> None:
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module="lightning")
        warnings.filterwarnings("ignore", category=category, module="torch.distributed")
    # Fabric makes DDP on a stream of its own.
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)


def own_batches(ranks: Ranks) -> Any:
    return batches(4 * ranks.world)[ranks.rank :: ranks.world]


def resumes_on_fabric(ranks: Ranks, strategy: Any) -> Any:
    """The model, trained for twice the steps, and one that was resumed from half of them."""
    trained = []
    for resumed in (False, True):
        precision = plugin(DELAYED, replace_layers=True)
        fabric = fabric_for(
            ranks.device, precision, Started(ranks), devices=ranks.world, strategy=strategy()
        )
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = network()
        model = fabric.setup_module(model)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                full = 0.2 * torch.randn(parameter.shape, device=ranks.device)
                if hasattr(parameter, "placements"):
                    full = torch.distributed.tensor.distribute_tensor(
                        full, parameter.device_mesh, parameter.placements
                    )
                parameter.copy_(full)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "fp8": precision}
        if resumed:
            fabric.load(ranks.tmp_path / "half", state)
            if state["fp8"] is not precision:  # of a sharded checkpoint Lightning gives it back
                precision.load_state_dict(state["fp8"])
        else:
            steps(fabric, model, optimizer, own_batches(ranks))
            fabric.save(ranks.tmp_path / "half", state)
        torch.distributed.barrier()
        steps(fabric, model, optimizer, own_batches(ranks))
        trained.append((fabric, model, precision))
    (_, whole, _), (fabric, rest, precision) = trained
    assert same(whole, rest)
    return fabric, rest, precision


def check_fabric_ddp(ranks: Ranks) -> None:
    quiet()
    _, model, precision = resumes_on_fabric(ranks, FabricDDP)
    for parameter in model.parameters():
        ranks.assert_same(parameter)
    state = precision.state_dict()["0"]
    assert sum(key.endswith("/scale") for key in state) == 2
    for value in state.values():
        ranks.assert_same(value)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_statistics_go_to_the_loggers(package: str, tmp_path: Path) -> None:
    """Each package by its own classes; of a resumed training the steps go on; an error ends it."""
    trainers = importlib.import_module(f"{package}.pytorch" if package == "lightning" else package)
    integration = importlib.import_module(f"float8lab.integrations.{package}")
    steps = type("Module", (Steps, trainers.LightningModule), {})
    logger = trainers.loggers.CSVLogger(tmp_path, version=0)
    stats = integration.Float8StatsCallback(every=2, layers="0")

    def fit(epochs: int, module: Any, **how: Any) -> Any:
        precision = integration.Float8Precision(weights_dtype=torch.float32)
        runner = trainer(
            torch.device("cpu"), epochs, precision, trainers, callbacks=[stats], logger=logger
        )
        runner.fit(module, loader(3), **how)
        return runner

    fit(1, steps()).save_checkpoint(tmp_path / "half.ckpt")
    assert [step.step for step in stats.watch.log.steps] == [0, 2]
    fit(2, steps(), ckpt_path=tmp_path / "half.ckpt")
    assert [step.step for step in stats.watch.log.steps] == [4]
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "float8/net.0/gradient/sqnr" in rows[0]
    assert {row.split(",")[rows[0].split(",").index("step")] for row in rows[1:]} == {*"024"}

    broken = steps()
    broken.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(1, broken)
    with float8lab.inspect.watch(broken):  # no other watch is active
        pass


def check_fabric_fsdp2_from_the_meta_device(ranks: Ranks) -> None:
    quiet()

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        assert isinstance(model[0], float8lab.Linear)
        assert model[0].weight.is_meta
        return fully_shard(model, mesh=mesh["data_parallel"])

    def strategy() -> Any:
        return FabricModelParallel(shard, data_parallel_size=ranks.world, tensor_parallel_size=1)

    fabric, model, _ = resumes_on_fabric(ranks, strategy)
    with Collectives() as seen:
        model(torch.ones(2, 13, device=fabric.device))
    assert torch.uint8 in {dtype for dtype, _ in seen.of("allgather")}


def resumes_in_trainer(ranks: Ranks, module: Any, strategy: Any) -> Any:
    def fit(model: Any, epochs: int, **how: Any) -> Any:
        environment, precision = Started(ranks), plugin(DELAYED)
        runner = lightning.Trainer(
            accelerator=ranks.device.type, devices=ranks.world, strategy=strategy(),
            plugins=[precision, environment], max_epochs=epochs, use_distributed_sampler=False,
            enable_progress_bar=False, enable_model_summary=False, logger=False,
            enable_checkpointing=False, num_sanity_val_steps=0,
        )  # fmt: skip
        xs, ys = zip(*own_batches(ranks), strict=True)
        data = DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=7)
        runner.fit(model, data, **how)
        return runner

    whole, half, rest = module(), module(), module()
    fit(whole, 2)
    fit(half, 1).save_checkpoint(ranks.tmp_path / "half")
    torch.distributed.barrier()
    fit(rest, 2, ckpt_path=ranks.tmp_path / "half")
    assert rest.losses == whole.losses[4:]
    assert same(rest, whole)
    return rest


def check_trainer_ddp(ranks: Ranks) -> None:
    quiet()
    for parameter in resumes_in_trainer(ranks, Module, DDPStrategy).parameters():
        ranks.assert_same(parameter)


def check_trainer_fsdp2(ranks: Ranks) -> None:
    quiet()

    def strategy() -> Any:
        return ModelParallelStrategy(data_parallel_size=ranks.world, tensor_parallel_size=1)

    model = resumes_in_trainer(ranks, Sharded, strategy)
    with Collectives() as seen:
        model.net(torch.ones(2, 13, device=ranks.device))
    assert torch.uint8 in {dtype for dtype, _ in seen.of("allgather")}


def check_report_is_logged_once(ranks: Ranks) -> None:
    quiet()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = sys.modules["lightning_utilities.core.rank_zero"].log
    log.addHandler(handler)
    environment = Started(ranks)
    fabric = fabric_for(
        ranks.device, plugin(), environment, devices=ranks.world, strategy=FabricDDP()
    )
    fabric.launch()
    fabric.setup(network())
    log.removeHandler(handler)
    assert sum("Float8Precision" in r.getMessage() for r in records) == (ranks.rank == 0)


test_on_two_processes = each_check(__name__, 2)
