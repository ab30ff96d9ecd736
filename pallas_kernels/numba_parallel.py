"""Sharing the items of a custom call among the threads of the XLA that makes it.

A handler makes a *job*, asks XLA's thread pool (through the foreign-function interface) to run a
task for each other thread, and works itself. Handler and tasks take items one by one from the job's
counter, so a slow thread takes fewer. The handler returns when all items are done.

A task may start long after that, when the call's arguments are gone. So a task takes an item before
it looks at anything else: there is one to take only while the handler still waits. And a job is
freed by whoever lets go of it last.

A job is five words of 8 bytes:

    [0] next item   [1] items done   [2] items   [3] the call frame   [4] holders
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
from numba import types
from numba.extending import intrinsic

from pallas_kernels import numba_ffi, numba_math, numba_vectors
from pallas_kernels.numba_ffi import (
    FRAME_WORDS,
    HANDLER_SIGNATURE,
    RESULT_POINTERS,
    answer_metadata,
    dims,
    register,
    words,
)

_TASK_SIGNATURE = types.void(types.int64)
"""Takes the address of a job."""
_NEXT, _DONE, _ITEMS, _FRAME, _HOLDERS = range(5)
_JOB_WORDS = 5
_CALL_WORDS = 5
_FRAME_API, _FRAME_CONTEXT = 2, 3
# Words of `XLA_FFI_Api` (`xla/ffi/api/c_api.h`): five of its own and its version's, one internal,
# then functions in an order that only grows at the end.
_SCHEDULE, _NUM_THREADS = 17, 18
_SPINS = 1000


def _c_function(name: str) -> Any:
    """A function of libc, for Numba code: a word in (which it may ignore), a word out."""

    def call(typing_context: Any, argument: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            word = ir.IntType(64)
            function = builder.module.globals.get(name) or ir.Function(
                builder.module, ir.FunctionType(word, [word]), name
            )
            return builder.call(function, values)

        return types.int64(types.int64), generate

    return intrinsic(call)


_malloc, _free, _sched_yield = map(_c_function, ("malloc", "free", "sched_yield"))


@intrinsic
def _call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a C function that takes and returns a word, by address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(values[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(pointer, [values[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to a word of memory that threads share; gives what it was."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def _symbol_address(typing_context: Any, symbol: Any) -> Any:
    """Address of a function that is known to LLVM by a (literal) name."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        name, word = symbol.literal_value, ir.IntType(64)
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [word]), name
        )
        return builder.ptrtoint(function, word)

    return types.int64(symbol), generate


@numba.njit(inline="always")
def take(job: int) -> int:
    """The next item to do; done when it is not below `num_items`."""
    return _add(job + 8 * _NEXT, 1)


@numba.njit(inline="always")
def finish(job: int) -> None:
    """An item is done."""
    _add(job + 8 * _DONE, 1)


@numba.njit(inline="always")
def num_items(job: int) -> int:
    return words(job, _JOB_WORDS)[_ITEMS]


@numba.njit(inline="always")
def call_frame(job: int) -> int:
    """Address of the call frame; good while an item that was taken is not finished."""
    return words(job, _JOB_WORDS)[_FRAME]


@numba.njit(inline="always")
def release(job: int) -> None:
    """Let go of a job."""
    if _add(job + 8 * _HOLDERS, -1) == 1:
        _free(job)


@numba.njit
def _begin(frame_address: int, items: int, task: int) -> int:
    """A job, its task given to as many other threads as could find an item. Has two holders more
    than those: who works on it here, and who waits for it."""
    frame = words(frame_address, _FRAME_CONTEXT + 1)
    api = words(frame[_FRAME_API], _NUM_THREADS + 1)
    memory = _malloc(8 * _CALL_WORDS)
    call = words(memory, _CALL_WORDS)
    # XLA_FFI_ThreadPool_NumThreads_Args: size, extension, context, where to put the number.
    threads = memory + 8 * 4
    call[0], call[1], call[2], call[3], call[4] = 8 * 4, 0, frame[_FRAME_CONTEXT], threads, 1
    if _call(api[_NUM_THREADS], memory) != 0:
        call[4] = 1  # an error: there is no pool
    helpers = max(0, min(call[4], items) - 1)
    job = _malloc(8 * _JOB_WORDS)
    fields = words(job, _JOB_WORDS)
    fields[_NEXT], fields[_DONE], fields[_ITEMS], fields[_FRAME] = 0, 0, items, frame_address
    fields[_HOLDERS] = helpers + 2
    for _ in range(helpers):
        # XLA_FFI_ThreadPool_Schedule_Args: size, extension, context, task, data.
        call[0], call[1], call[2], call[3], call[4] = 8 * 5, 0, frame[_FRAME_CONTEXT], task, job
        if _call(api[_SCHEDULE], memory) != 0:
            release(job)
    _free(memory)
    return job


@numba.njit
def _wait(job: int) -> None:
    """Until all items are done."""
    spins = 0
    while _add(job + 8 * _DONE, 0) < num_items(job):
        spins += 1
        if spins % _SPINS == 0:
            _sched_yield(0)
    release(job)


def sources_digest(*modules: ModuleType) -> int:
    """A positive number that changes with the code of the modules and of those all kernels use.

    For a task to close over: Numba looks at its closure, and at the age of its own file only.
    """
    digest = hashlib.sha256()
    for module in (numba_ffi, numba_math, numba_vectors, sys.modules[__name__], *modules):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return int.from_bytes(digest.digest()[:7], "big") + 1


def register_shared(
    name: str,
    task: Callable[[int], None],
    *,
    result_rank: int,
    axis: int = 0,
    grain: int = 1,
) -> None:
    """Make a custom call of a task: it takes the address of a job, does items, and lets go of it.

    Once for a name; later calls change nothing.

    Args:
        name: of the custom call.
        task: a plain function, for `numba.cfunc` to compile, and to keep between processes: it
            closes over plain values only.
        result_rank: axes of the call's result.
        axis, grain: an item is `grain` indices of this axis of the result.
    """
    symbol = f"{name}_task"

    def handle(frame_address: int) -> int:
        frame = words(frame_address, FRAME_WORDS)
        if not answer_metadata(frame):
            extent = dims(frame[RESULT_POINTERS], 0, result_rank)[axis]
            items = (extent + grain - 1) // grain
            address = _symbol_address(symbol)
            job = _begin(frame_address, items, address)
            _call(address, job)
            _wait(job)
        return 0

    with _registering:
        if name in _tasks:
            return
        compiled = numba.cfunc(_TASK_SIGNATURE, cache=True)(task)
        llvm.add_symbol(symbol, compiled.address)
        register(name, numba.cfunc(HANDLER_SIGNATURE, cache=True)(handle))
        _tasks[name] = compiled


_registering = threading.Lock()
"""Two engines may trace the same sizes at once; the second must not replace code the first runs."""
_tasks: dict[str, Any] = {}
"""They live as long as the handlers that start them."""
