"""Functions compiled by Numba as custom calls of XLA on CPU, through XLA's stable C interface.

XLA calls a handler with one pointer, to a call frame (`xla/ffi/api/c_api.h`, shipped with jaxlib).
All its fields are words of 8 bytes, so a handler reads it as arrays of int64:

    frame   [0] size  [1] extension  [2] api  [3] context  [4] stage
            [5..9] arguments: size, extension, count, types, pointers to buffers
            [10..14] results: the same
    buffer  [0] size  [1] extension  [2] dtype  [3] data  [4] rank  [5] dims

Before the first call XLA asks for the handler's version by an extension of type 1, whose word [3]
points to the answer; word [4] of both that answer and of `api` holds (major, minor). The layout has
been the same since interface 0.1; `answer_metadata` gives back the version of the running XLA.
"""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

FRAME_WORDS = 15
ARGUMENT_POINTERS, RESULT_POINTERS = 9, 14
HANDLER_SIGNATURE = types.int64(types.int64)
"""Takes the address of the call frame, returns 0 (no error)."""

_EXTENSION, _API = 1, 2
_BUFFER_WORDS, _BUFFER_DATA, _BUFFER_DIMS = 6, 3, 5
_METADATA_EXTENSION = 1


@intrinsic
def as_pointer(typing_context: Any, address: Any) -> Any:
    """An int64 address as a pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@numba.njit(inline="always")
def words(address: int, count: int) -> Any:
    """`count` words of 8 bytes at an address."""
    return numba.carray(as_pointer(address), (count,), np.int64)


@numba.njit(inline="always")
def answer_metadata(frame: Any) -> bool:
    """Answer XLA's question for the interface version. True if this call was that question."""
    if frame[_EXTENSION] == 0:
        return False
    extension = words(frame[_EXTENSION], 4)
    if extension[1] & 0xFFFFFFFF != _METADATA_EXTENSION:
        return False
    words(extension[3], 5)[3] = words(frame[_API], 5)[4]
    return True


@numba.njit(inline="always")
def data(pointers: int, index: int) -> int:
    """Address of the data of argument or result `index`."""
    return words(words(pointers, index + 1)[index], _BUFFER_WORDS)[_BUFFER_DATA]


@numba.njit(inline="always")
def dims(pointers: int, index: int, rank: int) -> Any:
    """Shape of argument or result `index`, which has `rank` axes."""
    return words(words(words(pointers, index + 1)[index], _BUFFER_WORDS)[_BUFFER_DIMS], rank)


_registered: dict[str, Any] = {}
"""XLA keeps addresses for the life of the process, so the code must live as long."""


def register(name: str, handler: Any) -> None:
    """Make a `numba.cfunc` of `HANDLER_SIGNATURE` callable as `jax.ffi.ffi_call(name, ...)`."""
    _registered[name] = handler
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new_capsule(handler.address, None, None), platform="cpu")
