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
def backward_thread(monkeypatch):
    """Replace autograd's thread for a GPU by a thread of the test; return its id."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(affinity, "_backward_thread", lambda process, device: thread.native_id)
    yield thread.native_id
    done.set()
    thread.join()


def core_sets(backward_thread):
    """The cores of the calling thread and of the backward thread."""
    return os.sched_getaffinity(0), os.sched_getaffinity(backward_thread)


def cores_of_threads():
    """The cores of every thread of the process, by thread id."""
    cores = {}
    for thread in os.listdir("/proc/self/task"):
        cores[int(thread)] = os.sched_getaffinity(int(thread))
    return cores


@linux
def test_caller_and_backward_thread_are_bound_to_one_core_and_released(backward_thread):
    before = cores_of_threads()
    with float8lab.backward_on_this_core():
        caller_cores, backward_cores = core_sets(backward_thread)
        assert caller_cores == backward_cores
        assert len(caller_cores) == 1
        assert caller_cores <= before[backward_thread]
        bound_state = cores_of_threads()
        bound = {threading.get_native_id(), backward_thread}
        assert all(bound_state[thread] == before[thread] for thread in before.keys() - bound)
    assert cores_of_threads() == before


@linux
def test_contexts_nest_and_an_exception_releases_the_threads(backward_thread):
    before = core_sets(backward_thread)
    with float8lab.backward_on_this_core():
        outer = core_sets(backward_thread)
        with pytest.raises(ZeroDivisionError), float8lab.backward_on_this_core():
            assert 1 / (core_sets(backward_thread) != outer)
        assert core_sets(backward_thread) == outer
    assert core_sets(backward_thread) == before
    decorated = float8lab.backward_on_this_core()(lambda: core_sets(backward_thread))
    assert len(decorated()[1]) == 1
    assert len(decorated()[0]) == 1
    assert core_sets(backward_thread) == before


@linux
def test_chosen_core_is_one_that_both_threads_may_use(backward_thread):
    before = core_sets(backward_thread)
    cores = sorted(before[0])
    try:
        os.sched_setaffinity(backward_thread, {cores[-1]})
        with float8lab.backward_on_this_core():
            assert core_sets(backward_thread) == ({cores[-1]}, {cores[-1]})
        assert core_sets(backward_thread) == (before[0], {cores[-1]})
        os.sched_setaffinity(0, {cores[0]})
        with float8lab.backward_on_this_core():  # has no effect, since they have no core in common
            assert core_sets(backward_thread) == ({cores[0]}, {cores[-1]})
    finally:
        os.sched_setaffinity(0, before[0])


@linux
def test_given_core_binds_both_threads_and_a_missing_core_raises(backward_thread):
    before = core_sets(backward_thread)
    for core in before[0]:
        with float8lab.backward_on_this_core(core):
            assert core_sets(backward_thread) == ({core}, {core})
    missing = max(before[0]) + 1
    with (
        pytest.raises(ValueError, match=f"core must be one that .*; got {missing}. Choose one of"),
        float8lab.backward_on_this_core(missing),
    ):
        pass
    assert core_sets(backward_thread) == before


@linux
def test_ranks_of_a_host_get_different_cores(backward_thread, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(2 * len(cores)):
        monkeypatch.setattr(affinity, "rank_and_size", lambda rank=rank: (rank, 64))
        with float8lab.backward_on_this_core():
            core = cores[rank % len(cores)]
            assert core_sets(backward_thread) == ({core}, {core})


@linux
def test_without_a_gpu_nothing_is_bound(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = cores_of_threads()
    with float8lab.backward_on_this_core():
        assert cores_of_threads() == before


def test_system_that_cannot_bind_threads_warns_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    affinity._warn_once.cache_clear()
    with (
        pytest.warns(UserWarning, match="has no effect: this system cannot"),
        float8lab.backward_on_this_core(),
    ):
        pass
    with float8lab.backward_on_this_core():
        pass


@pytest.mark.parametrize("core", [-1, 1.5, "x", True])
def test_core_that_is_no_index_raises(core):
    with (
        pytest.raises((TypeError, ValueError), match="core must be None or an integer"),
        float8lab.backward_on_this_core(core),
    ):
        pass


class RecordCores(torch.autograd.Function):
    """Records the thread of its backward, and the cores on which it may run."""

    @staticmethod
    def forward(ctx, x, calls):
        ctx.calls = calls
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.calls.append((threading.get_native_id(), os.sched_getaffinity(0)))
        return gradient, None


@pytest.mark.gpu
@linux
def test_autograd_thread_runs_on_the_core_of_the_caller():
    calls = []
    layer = nn.Linear(16, 16, device="cuda")

    def step():
        RecordCores.apply(layer(torch.ones(4, 16, device="cuda")), calls).sum().backward()

    step()
    before = cores_of_threads()
    with float8lab.backward_on_this_core():
        caller_cores = os.sched_getaffinity(0)
        step()
    step()
    assert len(caller_cores) == 1
    assert [thread for thread, _ in calls] == [calls[0][0]] * 3
    assert calls[0][0] != threading.get_native_id()
    assert calls[1][1] == caller_cores
    assert calls[2][1] == calls[0][1] == before[calls[0][0]]
    assert os.sched_getaffinity(0) == before[threading.get_native_id()]
