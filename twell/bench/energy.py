"""Energy that a GPU has consumed, from NVML, the library behind nvidia-smi."""

import ctypes

import torch

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0


class EnergyMeter:
    """Reads the device's own counter, which the driver updates every 20 to 100 ms: measure over seconds."""

    def __init__(self, device: torch.device, library: ctypes.CDLL | None = None):
        """`library`: NVML, loaded from the driver unless given."""
        self._library, self._handle = library, None
        if device.type != "cuda":
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
            failed = self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
        except (OSError, AttributeError):  # no such library or function
            return
        if failed == SUCCESS:
            self._handle = handle

    def joules(self) -> float | None:
        """Joules since the driver was loaded; None where they cannot be read (no GPU, no permission, an old GPU)."""
        if self._handle is None:
            return None
        millijoules = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3
