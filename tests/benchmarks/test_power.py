"""The energy of a layer on a CPU, with simulated counters."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import power, report
from benchmarks.models import LayerSize

LAYER = LayerSize(D=64, H=4, G=2, F=96, batch=2, sequence=32)


class SimulatedTime:
    """A clock that advances by a millisecond when it is read, and a GPU that takes 300 W."""

    seconds = 0.0

    def perf_counter(self):
        self.seconds += 1e-3
        return self.seconds

    def joules(self):
        return 300 * self.seconds


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch):
    simulated_time = SimulatedTime()
    monkeypatch.setattr(power, "time", simulated_time)
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(power, "SETTLING", 0.0)
    return simulated_time


def test_rows_have_the_power_and_energy_of_a_layer(setting, simulated_time):
    setting.recipes = ("delayed",)
    rows = list(power.rows(setting, LAYER, simulated_time.joules, seconds=0.01, rounds=2))
    assert [row.name for row in rows] == [
        "plain bfloat16, compile", "converted, delayed, compile",
        "TransformerLayer, delayed, eager",
    ]  # fmt: skip
    for row in rows:
        assert row.refusal is None
        assert row.values["W"] == pytest.approx(300)
        joules = row.values["W"] * row.values["sustained ms"] / 1e3
        assert row.values["J a step"] == joules
        assert row.values["mJ a token"] == pytest.approx(1e3 * joules / 64)
    assert rows[0].baseline
    lines = report.tabulate(power.SUBJECT.columns, rows).splitlines()
    assert lines[0].split("|")[-2].strip() == "J / bf16"
    ratio = rows[1].values["J a step"] / rows[0].values["J a step"]
    assert [line.split("|")[-2].strip() for line in lines[2:4]] == ["1.00", f"{ratio:.2f}"]


def test_a_wrong_layer_is_not_measured(setting, monkeypatch, simulated_time):
    def converted_with_wrong_weight(plain, recipe, **options):
        layer = power.copy.deepcopy(plain)
        layer.down.weight.data.mul_(2)
        return layer

    setting.recipes = ("current",)
    monkeypatch.setattr(power, "converted", converted_with_wrong_weight)
    rows = list(power.rows(setting, LAYER, simulated_time.joules, seconds=0.01, rounds=1))
    assert [row.refusal is None for row in rows] == [True, False, True]
    assert rows[1].refusal.startswith("wrong: y ")
    assert rows[1].values == {}


class TickingCounter:
    """A GPU of 100 W whose counter ticks every 40 seconds; a step takes one second."""

    seconds = 0.0

    def step(self):
        self.seconds += 1

    def joules(self):
        return 100 * (self.seconds // 40) * 40


def test_an_interval_lasts_from_tick_to_tick(monkeypatch):
    clock = TickingCounter()
    monkeypatch.setattr(power.time, "perf_counter", lambda: clock.seconds)
    monkeypatch.setattr(power, "LONGEST_TICK", 1000)
    energy = power.energy_in_turns({"a": clock.step}, counter=clock.joules, seconds=50, rounds=2)
    assert clock.seconds == 2 * (40 + 80)
    assert energy["a"].watts == 100
    assert energy["a"].timing.samples == (1000.0, 1000.0)


def test_a_counter_that_does_not_move_is_an_error(monkeypatch):
    monkeypatch.setattr(power, "LONGEST_TICK", 0.01)
    with pytest.raises(RuntimeError, match="must move within"):
        power.energy_in_turns({"a": list}, counter=lambda: 1.0, seconds=0.01, rounds=1)


@pytest.fixture
def nvml(monkeypatch):
    """NVML with a GPU called ``uuid`` that has consumed 12345 mJ."""

    def energy(handle, millijoules):
        millijoules._obj.value = 12345
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda uuid, handle: 0 if uuid == b"GPU-uuid" else 6,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    device = SimpleNamespace(uuid="uuid")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    return library


def test_the_nvml_counter_returns_joules(nvml):
    assert power.open_counter()() == 12.345


def test_a_gpu_without_a_counter_is_named(nvml):
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle, millijoules: 3
    with pytest.raises(SystemExit, match="got: nvmlDeviceGetTotalEnergyConsumption returned 3"):
        power.open_counter()
