"""Programs over the devices of two processes of one `jax.distributed` world.

Whatever one of the two processes calls here, the other must call, too, in the same order.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from transfer.errors import BackendError

Arrays = Any
"""A NumPy or JAX array."""

_MODULUS = 1 << 31
_KEPT_BYTES = 256 << 20


class OutOfStep(BackendError):
    """A program failed, or met another one: the two processes cannot work together any more."""


class Vote(NamedTuple):
    """Where a side is, and whether it goes on."""

    leg: int
    batch: int
    goes_on: bool


class World:
    """The processes, each with the first of its devices.

    Attributes:
        index, count: of this process, and of all.

    Raises:
        BackendError: `jax.distributed` is not initialized.
    """

    def __init__(self) -> None:
        import jax

        if not jax.distributed.is_initialized() or jax.process_count() < 2:
            raise BackendError(
                "the collective backend works between processes of one world: call "
                "jax.distributed.initialize(...) in each of them first"
            )
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._first: dict[int, Any] = {}
        for device in jax.devices():
            self._first.setdefault(device.process_index, device)

    def device(self, index: int) -> Any:
        """First device of a process. Raises `BackendError` if there is no such process."""
        if index not in self._first:
            raise BackendError(f"process {index} is not one of the {self.count} of this world")
        return self._first[index]


class Pair:
    """This process and another one.

    Args:
        there: index of the other one.
    """

    def __init__(self, world: World, there: int) -> None:
        import jax.sharding

        both = sorted((world.index, there))
        self.device = world.device(world.index)
        self._here = both.index(world.index)
        devices = np.array([world.device(index) for index in both])
        self._mesh = jax.sharding.Mesh(devices, "side")
        make_spec: Any = jax.sharding.PartitionSpec
        self._sharding = jax.sharding.NamedSharding(self._mesh, make_spec("side"))
        self._programs: dict[tuple[tuple[int, int], ...], Any] = {}
        self._nothing: dict[tuple[tuple[int, ...], str], Any] = {}

    def vote(self, mine: Vote) -> Vote:
        """Show the other side where this one is, and see where it is. Waits for it."""
        shown = np.array([mine.leg % _MODULUS, mine.batch, mine.goes_on], np.int32)
        leg, batch, goes_on = np.asarray(self._run(shown, ((0, 1), (1, 0)))).tolist()
        return Vote(leg + mine.leg - mine.leg % _MODULUS, batch, bool(goes_on))

    def nothing(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Zeros on this process's device, for the side that has nothing to send. Kept."""
        import jax

        key = (shape, dtype.str)
        if key not in self._nothing:
            size = math.prod(shape) * dtype.itemsize
            if sum(array.nbytes for array in self._nothing.values()) + size > _KEPT_BYTES:
                self._nothing.clear()
            self._nothing[key] = jax.device_put(np.zeros(shape, dtype), self.device)
        return self._nothing[key]

    def move(self, array: Arrays, *, from_here: bool) -> Any:
        """One array across. Waits for it.

        Args:
            array: what to send; at the other side, anything of that shape and type.

        Returns:
            What arrived, on this process's device; zeros where `from_here`.
        """
        there = 1 - self._here
        return self._run(array, ((self._here, there) if from_here else (there, self._here),))

    def _run(self, array: Arrays, perm: tuple[tuple[int, int], ...]) -> Any:
        import jax

        try:
            local = jax.device_put(array, self.device)
            shape = (2 * array.shape[0], *array.shape[1:])
            both = jax.make_array_from_single_device_arrays(shape, self._sharding, [local])
            arrived = self._program(perm)(both).addressable_shards[0].data
            arrived.block_until_ready()
        except (RuntimeError, ValueError) as error:
            raise OutOfStep(f"a program over two processes failed: {error}") from None
        return arrived

    def _program(self, perm: tuple[tuple[int, int], ...]) -> Any:
        import jax

        if perm not in self._programs:
            permute = partial(jax.lax.ppermute, axis_name="side", perm=perm)
            spec = self._sharding.spec
            mapped = jax.shard_map(permute, mesh=self._mesh, in_specs=spec, out_specs=spec)
            self._programs[perm] = jax.jit(mapped)
        return self._programs[perm]
