import torch

from kernels.order import by_frequency, make_order, natural


def test_an_order_and_its_inverse(device):
    permutation = torch.randperm(100).to(device)
    order = make_order(permutation, 64)
    assert torch.equal(order.order[order.rank_of.long()], torch.arange(100, dtype=torch.int32, device=device))
    hot = (order.hot_words.unsqueeze(1) >> torch.arange(32, device=device) & 1).flatten()[:100].bool()
    assert torch.equal(hot.nonzero().squeeze(1), permutation[:64].sort().values)
    assert torch.equal(order.cold.long(), permutation[64:])


def test_natural_order_has_no_hot_neurons(device):
    order = natural(40, device)
    assert order.n_hot == 0 and not order.hot_words.any()


def test_frequency_order_is_stable():
    assert by_frequency(torch.tensor([1, 5, 0, 5, 1])).tolist() == [1, 3, 0, 4, 2]
