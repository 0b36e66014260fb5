import torch

from twell.hostread import HostRead

CPU = torch.device("cpu")


def test_the_word_says_what_happened():
    read = HostRead(CPU)
    assert read.read(torch.tensor(True), False) == (False, False)
    assert read.read(torch.tensor(False), False) == (True, False)
    assert read.read(torch.tensor(True), True) == (False, True)


def test_its_cost_is_reported_once():
    read = HostRead(CPU)
    read.read(torch.tensor(True), False)
    assert read.take_seconds() > 0 and read.take_seconds() == 0
