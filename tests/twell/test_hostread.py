import torch

from twell.hostread import HostRead

CPU = torch.device("cpu")


def test_the_word_says_what_happened():
    read = HostRead(CPU)
    yes, no = torch.tensor(True), torch.tensor(False)
    assert read.read(yes, no, False) == (False, False, False)
    assert read.read(no, no, False) == (True, False, False)
    assert read.read(yes, yes, False) == (False, True, False)
    assert read.read(yes, no, True) == (False, False, True)


def test_its_cost_is_reported_once():
    read = HostRead(CPU)
    read.read(torch.tensor(True), torch.tensor(False), False)
    assert read.take_seconds() > 0 and read.take_seconds() == 0
