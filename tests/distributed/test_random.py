"""CudaRNGStatesTracker: streams repeat, are separate and leave the default generator alone."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import float8lab


@pytest.fixture
def tracker(device):
    tracker = float8lab.CudaRNGStatesTracker(device)
    tracker.add("model-parallel-rng", 7)
    tracker.add("other", 8)
    return tracker


def stream(seed, device, count=3):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(count, device=device, generator=generator)


@contextlib.contextmanager
def default_generator_unchanged(device):
    torch.manual_seed(3)
    expected = torch.rand(2, device=device)
    torch.manual_seed(3)
    yield
    assert torch.equal(torch.rand(2, device=device), expected)


def test_dropout_inside_fork_repeats_and_leaves_the_default_generator_alone(tracker, device):
    x = torch.ones(64, device=device)
    with default_generator_unchanged(device), tracker.fork():
        first = F.dropout(x, 0.5)
        second = F.dropout(x, 0.5)
    assert not torch.equal(first, second)
    repeated = float8lab.CudaRNGStatesTracker(device)
    repeated.add("model-parallel-rng", 7)
    with repeated.fork():
        assert torch.equal(F.dropout(x, 0.5), first)
        assert torch.equal(F.dropout(x, 0.5), second)


def test_streams_are_those_of_their_seeds_and_continue_also_in_nested_forks(tracker, device):
    def draw():
        return torch.rand((), device=device)

    torch.manual_seed(5)
    default = [draw() for _ in range(2)]
    torch.manual_seed(5)
    a, b = [], []
    values = [draw()]
    with tracker.fork():
        a.append(draw())
        with tracker.fork("other"):
            b.append(draw())
            with tracker.fork():  # continues the outer stream
                a.append(draw())
            b.append(draw())
        a.append(draw())
    for name, drawn in (("other", b), ("model-parallel-rng", a)):
        with tracker.fork(name):
            drawn.append(draw())
    values.append(draw())
    for drawn, seed in ((a, 7), (b, 8)):
        generator = torch.Generator(device).manual_seed(seed)
        expected = [torch.rand((), device=device, generator=generator) for _ in drawn]
        assert torch.equal(torch.stack(drawn), torch.stack(expected))
    assert torch.equal(torch.stack(values), torch.stack(default))


def test_states_are_copies_that_can_be_set_again(tracker, device):
    states = tracker.get_states()
    assert list(states) == ["model-parallel-rng", "other"]
    assert all(s.dtype == torch.uint8 and s.device.type == "cpu" for s in states.values())
    with tracker.fork():
        first = torch.rand(3, device=device)
        later = tracker.get_states()  # also inside a fork
        second = torch.rand(3, device=device)
        tracker.set_states(later)
        assert torch.equal(torch.rand(3, device=device), second)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(3, device=device), first)
    assert torch.equal(tracker.get_states()["other"], states["other"])


def test_set_states_replaces_all_streams(tracker, device):
    with tracker.fork():
        torch.rand(1, device=device)
    states = tracker.get_states()
    fresh = float8lab.CudaRNGStatesTracker(device)
    fresh.add("gone", 1)
    fresh.set_states({"new": states["model-parallel-rng"]})
    with fresh.fork("new"), tracker.fork():
        pass
    with fresh.fork("new"):
        a = torch.rand(3, device=device)
    with tracker.fork():
        assert torch.equal(a, torch.rand(3, device=device))
    with pytest.raises(ValueError, match="there are: 'new'"), fresh.fork("gone"):
        pass


def test_exception_inside_fork_restores_the_default_generator(tracker, device):
    with default_generator_unchanged(device), pytest.raises(ArithmeticError), tracker.fork():
        raise ArithmeticError(torch.rand(1, device=device))
    with tracker.fork():  # the stream has advanced
        assert not torch.equal(torch.rand(3, device=device), stream(7, device))


def test_repeated_names_and_seeds_raise(tracker):
    with pytest.raises(ValueError, match=r"name must be new.* got 'other'"):
        tracker.add("other", 9)
    with pytest.raises(ValueError, match=r"seed must be new.* got 8"):
        tracker.add("third", 8)
    with pytest.raises(ValueError, match=r"got 'third', and there are: 'model-parallel-rng', 'o"):
        tracker.fork("third").__enter__()
    tracker.reset()
    assert tracker.get_states() == {}
    with pytest.raises(ValueError, match="there are: none"):
        tracker.fork().__enter__()
    tracker.add("other", 8)


def test_bookkeeping_never_advances_the_default_generator(device):
    with default_generator_unchanged(device):
        tracker = float8lab.CudaRNGStatesTracker(device)
        tracker.add("a", 1)
        tracker.set_states(tracker.get_states())
        tracker.reset()


@pytest.mark.gpu
def test_default_device_is_the_gpu():
    tracker = float8lab.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    with tracker.fork():
        assert torch.equal(torch.rand(3, device="cuda"), stream(7, "cuda"))


@pytest.mark.usefixtures("uncollected")
@pytest.mark.gpu
def test_captured_graph_draws_new_numbers_at_each_replay():
    tracker = float8lab.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    eager = float8lab.CudaRNGStatesTracker()
    eager.add("model-parallel-rng", 7)
    x = torch.ones(256, device="cuda")

    def run(tracker):
        with tracker.fork():
            return F.dropout(x, 0.5)

    run(tracker), run(eager)  # warm up; both draw once
    graph = torch.cuda.CUDAGraph()
    for generator in tracker.generators().values():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        y = run(tracker)
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, run(eager))
