import torch

from kernels.order import TILE, by_coactivation, by_frequency, make_order, natural, unpack_words


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


def test_coactivation_puts_neurons_of_the_same_tokens_in_one_tile():
    generator = torch.Generator().manual_seed(0)
    groups, h, m = 4, 256, 400
    group_of = torch.randperm(h, generator=generator) % groups
    topic = torch.randint(groups, (m,), generator=generator)
    pattern = (topic[:, None] == group_of) & (torch.rand(m, h, generator=generator) < 0.3)
    pattern[:, 0] = True  # hot
    order = by_coactivation(pattern, 1)
    assert order[0] == 0 and torch.equal(order.sort().values, torch.arange(h))

    def touched(order):
        return torch.nn.functional.pad(pattern[:, order[1:]], (0, 1)).view(m, -1, TILE).any(2).sum().item()

    assert touched(order) < 0.5 * touched(by_frequency(pattern.sum(0)))


def test_neurons_that_never_fired_come_last():
    pattern = torch.zeros(10, 100, dtype=torch.bool)
    pattern[:, 30:95] = torch.eye(10, dtype=torch.bool).repeat(1, 7)[:, :65]
    order = by_coactivation(pattern, 0)
    assert set(order[:65].tolist()) == set(range(30, 95))
    assert torch.equal(order.sort().values, torch.arange(100))


def test_words_unpack_to_bits():
    words = torch.tensor([[1, -(2**31)], [6, 0]], dtype=torch.int32)
    assert unpack_words(words, 64).nonzero().tolist() == [[0, 0], [0, 63], [1, 1], [1, 2]]
