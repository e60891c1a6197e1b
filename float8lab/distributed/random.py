"""CudaRNGStatesTracker: named streams of random numbers besides the default stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from float8lab.arguments import check_device, check_instance, check_size, check_state, shown

__all__ = ["CudaRNGStatesTracker"]


class CudaRNGStatesTracker:
    """Named states of torch's default generator, each used only inside ``fork``.

    Dropout inside ``fork(name)`` draws from the stream of that name and leaves the default stream:
    tensor-parallel ranks can share a seed for replicated computations and have a seed each for
    sharded ones. ``checkpoint(get_rng_state_tracker=...)`` repeats the streams when it recomputes.

    On CUDA a stream is a ``torch.Generator`` that replaces the default generator, without copies
    and without waiting for the GPU. To draw from it inside a CUDA graph, register it before the
    capture: ``graph.register_generator_state(g)`` for each ``g`` in ``generators()``. States cannot
    be read or set during a capture.

    Args:
        device: the device of the random numbers; None is the current CUDA device at the first
            ``add``, or the CPU without CUDA.

    >>> tracker = float8lab.CudaRNGStatesTracker(device="cpu")
    >>> tracker.add("model-parallel-rng", 7)
    >>> with tracker.fork():
    ...     first = torch.rand(3)
    >>> bool((first == torch.rand(3, generator=torch.Generator().manual_seed(7))).all())
    True
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = check_device("device", device)
        self._generators: dict[str, Generator] = {}
        self._seeds: set[int] = set()
        self._forked: list[Generator] = []  # streams of active forks on a CPU, the innermost last

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Args:
            seed: the seed of a torch generator; each stream needs a different seed.

        Raises:
            TypeError: the name is not a string, or the seed not an integer.
            ValueError: the name or the seed is in use.
        """
        check_instance("name", name, str, "a string")
        seed = check_size("seed", seed, minimum=-(2**63))
        if seed >= 2**64:
            raise ValueError(f"seed must be less than 2**64; got {seed}. Pass a smaller one.")
        if name in self._generators:
            raise ValueError(
                f"name must be new to this tracker; got {name!r}. Choose another, or reset()."
            )
        if seed in self._seeds:
            raise ValueError(
                f"seed must be new to this tracker; got {seed}. Two streams of one seed draw the "
                "same numbers: choose another."
            )
        self._generators[name] = torch.Generator(self._where()).manual_seed(seed)
        self._seeds.add(seed)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from a stream inside the ``with`` block.

        Raises:
            TypeError: the name is not a string.
            ValueError: there is no stream with that name.
        """
        check_instance("name", name, str, "a string")
        if name not in self._generators:
            names = ", ".join(map(repr, self._generators)) or "none"
            raise ValueError(
                f"name must be one given to add(); got {name!r}, and there are: {names}. "
                f"Call add({name!r}, seed) first."
            )
        stream, default = self._generators[name], self._default()
        if default.device.type == "cuda":
            outer_generator = default.graphsafe_get_state()
            default.graphsafe_set_state(stream)
            try:
                yield
            finally:
                default.graphsafe_set_state(outer_generator)
            return
        # The CPU's default generator cannot be replaced, so states are copied in and out.
        self._save_forked()
        outer_state = default.get_state()
        default.set_state(stream.get_state())
        self._forked.append(stream)
        try:
            yield
        finally:
            self._save_forked()
            self._forked.pop()
            # A nested fork of the same stream may have advanced it.
            default.set_state(self._forked[-1].get_state() if self._forked else outer_state)

    def get_states(self) -> dict[str, Tensor]:
        """Copy the state of each stream to a byte tensor on the CPU."""
        self._save_forked()
        return {name: g.get_state() for name, g in self._generators.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all streams by those whose states ``get_states`` returned.

        Raises:
            TypeError: ``states`` is not a dict of tensors.
            ValueError: a tensor is not the state of a generator; nothing has changed.
        """
        check_state("states", states)
        generators = {}
        for name, state in states.items():
            generators[name] = torch.Generator(self._where())
            try:
                generators[name].set_state(state)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"states must be of generators on {self._where()}; got {shown(state)} for "
                    f"{name!r}. Pass what get_states() returned."
                ) from error
        self._save_forked()
        self._generators = {name: self._generators.get(name, g) for name, g in generators.items()}
        for name, state in states.items():
            self._generators[name].set_state(state)
        if self._forked:
            self._default().set_state(self._forked[-1].get_state())

    def reset(self) -> None:
        """Remove all streams."""
        self._generators, self._seeds = {}, set()

    def generators(self) -> dict[str, Generator]:
        """Return the generator of each stream, to register with CUDA graphs."""
        return dict(self._generators)

    def _save_forked(self) -> None:
        """Save the state of the stream that is in use."""
        if self._forked:
            self._forked[-1].set_state(self._default().get_state())

    def _default(self) -> Generator:
        device = self._where()
        if device.type == "cpu":
            return torch.default_generator
        torch.cuda.init()  # default_generators is empty before initialization
        return torch.cuda.default_generators[device.index]

    def _where(self) -> torch.device:
        if self._device is None:
            self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        return self._device
