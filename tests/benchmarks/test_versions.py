"""The comparison of two versions: the time of their kernels."""

from types import SimpleNamespace

from benchmarks.versions import ms_of_one_step


def kernel_event(start: float, us: float, name: str = "kernel") -> SimpleNamespace:
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, elapsed_us=lambda: us)
    )


def test_the_median_launch_excludes_disturbed_steps():
    steps = [(10.0, 100.0), (12.0, 900.0), (11.0, 100.0)]  # of two launches each
    events = [
        kernel_event(2 * i + j, us) for i, step in enumerate(steps) for j, us in enumerate(step)
    ]
    copies = [kernel_event(0.5, 1e6, "Memcpy DtoD"), kernel_event(1.5, 1e6, "Memset (Device)")]
    assert ms_of_one_step([*copies, *reversed(events)], 3) == 0.111
    assert ms_of_one_step(events[:5], 2) == sum((10.0, 100.0, 12.0, 900.0, 11.0)) / 2000
