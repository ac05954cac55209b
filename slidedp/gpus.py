"""What the launcher asks about the visible GPUs, without a CUDA context: it would stay on every GPU."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import torch


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_gpu_bytes(count: int) -> list[int]:
    """Free bytes of the first `count` GPUs that this process sees.

    They are numbered as NVML does, by PCI bus. CUDA numbers GPUs of one model alike; among different
    ones the fastest is first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    with _nvml() as nvml:
        if nvml is None:
            return [torch.cuda.mem_get_info(index)[0] for index in range(count)]
        return [_free(nvml, _device(nvml, name)) for name in _visible(count)]


def reach_one_another(count: int) -> bool:
    """Whether each of the first `count` GPUs can read the memory of all others."""
    with _nvml() as nvml:
        if nvml is None:
            return all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(count), 2))
        return all(
            _reads(nvml, *pair) for pair in permutations([_device(nvml, n) for n in _visible(count)], 2)
        )


@contextmanager
def _nvml() -> Iterator[Any]:
    """The management library; None in a container without the driver's utilities."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        _checked(nvml.nvmlInit_v2())
    except OSError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _visible(count: int) -> list[str]:
    """Index, or beginning of the UUID, of each GPU that CUDA_VISIBLE_DEVICES leaves."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in names.split(",")][:count]


def _device(nvml: Any, name: str) -> ctypes.c_void_p:
    device = ctypes.c_void_p()
    if name.isdecimal():
        _checked(nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device)))
    else:
        _checked(nvml.nvmlDeviceGetHandleByUUID(_whole_uuid(nvml, name).encode(), ctypes.byref(device)))
    return device


def _reads(nvml: Any, reader: ctypes.c_void_p, owner: ctypes.c_void_p) -> bool:
    read, status = 0, ctypes.c_uint()  # NVML_P2P_CAPS_INDEX_READ
    _checked(nvml.nvmlDeviceGetP2PStatus(reader, owner, read, ctypes.byref(status)))
    return status.value == 0  # NVML_P2P_STATUS_OK


def _free(nvml: Any, device: ctypes.c_void_p) -> int:
    memory = _Memory()
    _checked(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
    return memory.free


def _whole_uuid(nvml: Any, prefix: str) -> str:
    """CUDA takes any unique beginning of a GPU's UUID; NVML wants all of it, as of a MIG device's."""
    count, device, text = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(96)
    _checked(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    for index in range(count.value):
        _checked(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
        _checked(nvml.nvmlDeviceGetUUID(device, text, len(text)))
        if text.value.decode().startswith(prefix):
            return text.value.decode()
    return prefix


def _checked(status: int) -> None:
    if status:
        raise OSError(f"NVML status {status}")
