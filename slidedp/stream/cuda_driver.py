"""The few calls of the CUDA driver that torch does not offer: memory of another process, counters in memory
that streams wait for, and copies between plain addresses.

Streams are torch's, None the default one; addresses are of device memory of this process or mapped by
`map_memory`.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch

_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WITH_FENCE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream did before is visible first


class MemoryHandle(NamedTuple):
    """What another process needs to map memory of this one."""

    allocation: bytes
    offset: int
    """Bytes from the beginning of the allocation."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _checked(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


def _handle(stream: torch.cuda.Stream | None) -> Any:
    return ctypes.c_void_p(0 if stream is None else stream.cuda_stream)


def export_memory(memory: torch.Tensor) -> MemoryHandle:
    """A handle of device memory that lives until every process that maps it has unmapped it."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    address = ctypes.c_uint64(memory.data_ptr())
    _checked(_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address))
    _checked(_driver().cuIpcGetMemHandle(ctypes.byref(handle), base))
    return MemoryHandle(bytes(handle), memory.data_ptr() - base.value)


def map_memory(handle: MemoryHandle) -> int:
    """Address of another process's memory. It may be another GPU's, reached over NVLink or PCIe."""
    base = ctypes.c_uint64()
    opened = _IpcHandle.from_buffer_copy(handle.allocation)
    _checked(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), opened, _PEER_ACCESS))
    return base.value + handle.offset


def unmap_memory(address: int, handle: MemoryHandle) -> None:
    """Gives up what `map_memory(handle)` returned."""
    _checked(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address - handle.offset)))


def copy(target: int, source: int, nbytes: int, stream: torch.cuda.Stream | None) -> None:
    """Enqueues a copy between addresses; copy engines carry it out, no SM."""
    _checked(
        _driver().cuMemcpyAsync(
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            _handle(stream),
        )
    )


def wait_at_least(address: int, value: int, stream: torch.cuda.Stream | None) -> None:
    """Lets the stream wait until the uint32 at `address` is at least `value`."""
    _checked(
        _driver().cuStreamWaitValue32_v2(
            _handle(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(value),
            ctypes.c_uint(_AT_LEAST),
        )
    )


def write(address: int, value: int, stream: torch.cuda.Stream | None) -> None:
    """Writes a uint32 once the stream's work so far has run."""
    _checked(
        _driver().cuStreamWriteValue32_v2(
            _handle(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(value),
            ctypes.c_uint(_WITH_FENCE),
        )
    )
