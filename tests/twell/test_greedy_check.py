"""Greedy texts of two engines: equal, parting at a tie, or wrong."""

import pytest
import torch

from tests.twell.small import build
from twell.decoder import Decoder
from twell.greedy_check import Comparison, bf16_step, compare_greedy, logits_after
from twell.inference import Engine
from twell.model import Transformer

PROMPTS = [[3, 1, 4], [1]]


@pytest.mark.parametrize("value", [1.0, 1.99, 2.0, -3.5, 100.0, 0.011])
def test_bf16_step_is_that_of_torch(value: float):
    rounded = torch.tensor(value, dtype=torch.bfloat16)
    above = torch.nextafter(rounded, torch.tensor(4.0 * value, dtype=torch.bfloat16))
    assert bf16_step(rounded.item()) == abs(above - rounded).item()


def engines(model: Transformer, other: Transformer) -> tuple[Engine, Engine]:
    return Engine(model, 2, impl="torch"), Engine(other, 2, impl="triton")


def test_the_kernels_write_what_dense_products_write():
    comparisons = compare_greedy(*engines(build(), build()), PROMPTS, 6)
    assert comparisons == [Comparison(6, False)] * 2
    assert str(comparisons[0]) == "6 tokens, identical"


def test_texts_that_part_are_explained():
    comparison = compare_greedy(*engines(build(), build(seed=2)), PROMPTS, 6)[0]
    assert comparison.differs and not comparison.tie and comparison.chosen > comparison.other
    assert "then NOT A TIE: logits" in str(comparison)


def test_a_tie_is_one_step():
    assert Comparison(3, True, 12.0, 12.0 - 0.0625).tie and not Comparison(3, True, 12.0, 12.0 - 0.125).tie
    assert str(Comparison(3, True, 12.0, 11.9375)).startswith("3 tokens identical, then a tie: logits 12 and 11.9375")


def test_logits_after_an_answer_are_those_of_the_whole():
    model = build()
    logits = logits_after(Decoder(model, "torch", 1), [3, 1, 4], [1, 5])
    torch.testing.assert_close(logits, model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1], rtol=1e-4, atol=1e-5)
