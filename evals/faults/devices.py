# SPDX-License-Identifier: Apache-2.0
"""What NVML says about the GPUs, without a CUDA context in this process. Names: NVIDIA NVML API reference, nvml.h."""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t, which nvmlDeviceGetComputeRunningProcesses_v3 fills."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


class Nvml:
    """One device. Raises OSError where there is no NVML or no such device."""

    def __init__(self, index: int = 0) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._device))

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")

    def used_bytes(self) -> int:
        """Memory in use on the device, by anyone."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(memory))
        return memory.used

    def bytes_by_process(self) -> dict[int, int | None]:
        """Memory of each process that has a context, by pid; None where the driver does not tell."""
        count = ctypes.c_uint(512)
        found = (_Process * count.value)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", self._device, ctypes.byref(count), found)
        return {p.pid: None if p.used == _NOT_AVAILABLE else p.used for p in found[: count.value]}

    def _text(self, name: str, *before) -> str:
        text = ctypes.create_string_buffer(96)
        self._call(name, *before, text, ctypes.c_uint(96))
        return text.value.decode()

    def describe(self) -> dict[str, str]:
        return {
            "gpu": self._text("nvmlDeviceGetName", self._device),
            "driver": self._text("nvmlSystemGetDriverVersion"),
        }


def open_device() -> Nvml | None:
    """The first GPU, or None on a machine without one."""
    try:
        return Nvml()
    except (OSError, AttributeError):
        return None
