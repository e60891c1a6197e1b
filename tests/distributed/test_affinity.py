"""``backward_on_this_core``: which threads are bound, to which core, and until when."""

import os
import threading

import pytest
import torch
from torch import nn

import float8lab
from float8lab.distributed import affinity

linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind threads to cores"
)


@pytest.fixture
def other(monkeypatch):
    """A thread in the place of autograd's for a GPU; its number."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(affinity, "_backward_thread", lambda process, device: thread.native_id)
    yield thread.native_id
    done.set()
    thread.join()


def masks(other):
    return os.sched_getaffinity(0), os.sched_getaffinity(other)


def everybody():
    """The cores of the process's other threads, too."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        found[int(thread)] = os.sched_getaffinity(int(thread))
    return found


@linux
def test_both_threads_are_bound_and_released(other):
    before = everybody()
    with float8lab.backward_on_this_core():
        here, there = masks(other)
        assert here == there
        assert len(here) == 1
        assert here <= before[other]
        rest = everybody()
        bound = {threading.get_native_id(), other}
        assert all(rest[thread] == before[thread] for thread in before.keys() - bound)
    assert everybody() == before


@linux
def test_contexts_nest_and_exceptions_release(other):
    before = masks(other)
    with float8lab.backward_on_this_core():
        outer = masks(other)
        with pytest.raises(ZeroDivisionError), float8lab.backward_on_this_core():
            assert 1 / (masks(other) != outer)
        assert masks(other) == outer
    assert masks(other) == before
    decorated = float8lab.backward_on_this_core()(lambda: masks(other))
    assert len(decorated()[1]) == 1
    assert len(decorated()[0]) == 1
    assert masks(other) == before


@linux
def test_the_core_is_one_of_those_that_both_threads_may_use(other):
    before = masks(other)
    cores = sorted(before[0])
    try:
        os.sched_setaffinity(other, {cores[-1]})
        with float8lab.backward_on_this_core():
            assert masks(other) == ({cores[-1]}, {cores[-1]})
        assert masks(other) == (before[0], {cores[-1]})
        os.sched_setaffinity(0, {cores[0]})
        with float8lab.backward_on_this_core():  # nothing, if they have no core in common
            assert masks(other) == ({cores[0]}, {cores[-1]})
    finally:
        os.sched_setaffinity(0, before[0])


@linux
def test_a_core_of_choice(other):
    before = masks(other)
    for core in before[0]:
        with float8lab.backward_on_this_core(core):
            assert masks(other) == ({core}, {core})
    missing = max(before[0]) + 1
    with (
        pytest.raises(ValueError, match=f"core must be one that .*; got {missing}. Choose one of"),
        float8lab.backward_on_this_core(missing),
    ):
        pass
    assert masks(other) == before


@linux
def test_ranks_of_a_host_have_different_cores(other, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(2 * len(cores)):
        monkeypatch.setattr(affinity, "rank_and_size", lambda rank=rank: (rank, 64))
        with float8lab.backward_on_this_core():
            core = cores[rank % len(cores)]
            assert masks(other) == ({core}, {core})


@linux
def test_without_a_gpu_nothing_is_bound(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = everybody()
    with float8lab.backward_on_this_core():
        assert everybody() == before


def test_a_system_that_cannot_bind_threads_says_so_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    affinity._say_that_there_is_no_affinity.cache_clear()
    with (
        pytest.warns(UserWarning, match="has no effect: this system cannot"),
        float8lab.backward_on_this_core(),
    ):
        pass
    with float8lab.backward_on_this_core():
        pass


@pytest.mark.parametrize("core", [-1, 1.5, "x", True])
def test_wrong_cores(core):
    with (
        pytest.raises((TypeError, ValueError), match="core must be None or an integer"),
        float8lab.backward_on_this_core(core),
    ):
        pass


class Ask(torch.autograd.Function):
    """Notes the cores that its backward may run on."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.found.append((threading.get_native_id(), os.sched_getaffinity(0)))
        return gradient, None


@pytest.mark.gpu
@linux
def test_autograds_thread_is_on_the_core_of_the_caller():
    found = []
    layer = nn.Linear(16, 16, device="cuda")

    def step():
        Ask.apply(layer(torch.ones(4, 16, device="cuda")), found).sum().backward()

    step()
    before = everybody()
    with float8lab.backward_on_this_core():
        here = os.sched_getaffinity(0)
        step()
    step()
    assert len(here) == 1
    assert [thread for thread, _ in found] == [found[0][0]] * 3
    assert found[0][0] != threading.get_native_id()
    assert found[1][1] == here
    assert found[2][1] == found[0][1] == before[found[0][0]]
    assert os.sched_getaffinity(0) == before[threading.get_native_id()]
