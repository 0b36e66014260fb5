import ctypes
from types import SimpleNamespace

import pytest
import torch

from twell.bench.energy import EnergyMeter

GPU = torch.device("cuda", 0)


class FakeNVML:
    """Answers as NVML does: results through pointers, and an error code."""

    def __init__(self, init=0, handle=0, energy=0):
        self.codes = {"init": init, "handle": handle, "energy": energy}
        self.millijoules = 5_000

    def nvmlInit_v2(self):
        return self.codes["init"]

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        assert uuid == b"GPU-0123-abcd"
        handle._obj.value = 77
        return self.codes["handle"]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, energy):
        assert handle.value == 77 and isinstance(energy._obj, ctypes.c_ulonglong)
        energy._obj.value = self.millijoules
        self.millijoules += 2_500
        return self.codes["energy"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0123-abcd"))


def test_joules_are_read():
    meter = EnergyMeter(GPU, FakeNVML())
    first, second = meter.joules(), meter.joules()
    assert (first, second - first) == (5.0, 2.5)


@pytest.mark.parametrize("failure", ["init", "handle", "energy"])
def test_an_error_code_means_unknown(failure):
    assert EnergyMeter(GPU, FakeNVML(**{failure: 3})).joules() is None


def test_without_gpu_library_or_function_it_is_unknown(monkeypatch):
    assert EnergyMeter(torch.device("cpu")).joules() is None
    assert EnergyMeter(GPU, SimpleNamespace(nvmlInit_v2=lambda: 0)).joules() is None
    monkeypatch.setattr("twell.bench.energy.LIBRARY", "libno-such-library.so")
    assert EnergyMeter(GPU).joules() is None
