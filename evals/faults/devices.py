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
    """The first `devices` GPUs, taken together. Raises OSError where there is no NVML or fewer GPUs."""

    def __init__(self, devices: int = 1) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._devices = [ctypes.c_void_p() for _ in range(devices)]
        self._call("nvmlInit_v2")
        for index, device in enumerate(self._devices):
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")

    def used_bytes(self) -> int:
        """Memory in use on the devices, by anyone."""
        used = 0
        for device in self._devices:
            memory = _Memory()
            self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            used += memory.used
        return used

    def bytes_by_process(self) -> dict[int, int | None]:
        """Memory of each process that has a context, by pid; None where the driver does not tell."""
        held: dict[int, int | None] = {}
        for device in self._devices:
            count = ctypes.c_uint(512)
            found = (_Process * count.value)()
            self._call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), found)
            for process in found[: count.value]:
                before = held.get(process.pid, 0)
                known = before is not None and process.used != _NOT_AVAILABLE
                held[process.pid] = before + process.used if known else None
        return held

    def _text(self, name: str, *before) -> str:
        text = ctypes.create_string_buffer(96)
        self._call(name, *before, text, ctypes.c_uint(96))
        return text.value.decode()

    def describe(self) -> dict[str, str | int]:
        return {
            "gpu": self._text("nvmlDeviceGetName", self._devices[0]),
            "gpus": len(self._devices),
            "driver": self._text("nvmlSystemGetDriverVersion"),
        }


def open_devices(count: int) -> Nvml | None:
    """The first `count` GPUs, or None on a machine that has fewer."""
    try:
        return Nvml(count)
    except (OSError, AttributeError):
        return None
