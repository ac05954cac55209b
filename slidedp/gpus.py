"""Free memory of the visible GPUs, without a CUDA context: the launcher's would stay on every GPU."""

import ctypes
import os
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
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        _checked(nvml.nvmlInit_v2())
    except OSError:  # a container without the driver's utilities
        return [torch.cuda.mem_get_info(index)[0] for index in range(count)]
    try:
        return [_free(nvml, name) for name in _visible(count)]
    finally:
        nvml.nvmlShutdown()


def _visible(count: int) -> list[str]:
    """Index, or beginning of the UUID, of each GPU that CUDA_VISIBLE_DEVICES leaves."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in names.split(",")][:count]


def _free(nvml: Any, name: str) -> int:
    device, memory = ctypes.c_void_p(), _Memory()
    if name.isdecimal():
        _checked(nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device)))
    else:
        _checked(nvml.nvmlDeviceGetHandleByUUID(_whole_uuid(nvml, name).encode(), ctypes.byref(device)))
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
