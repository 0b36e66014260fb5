"""Floating-point operations per token: what a dense model would need, and what is computed; and the peaks of GPUs.

A multiplication and an addition are two. Attention counts half of the square of scores, since it is causal; the head
counts, the lookup of the embedding does not.
"""

from collections.abc import Sequence

import torch

from twell.model import Transformer

# Dense bf16 tensor-core peak in FLOP/s, from the vendor's datasheets; matched against the device's name in this order.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "RTX 5090": 209e12,
}


def ffn_products(gated: bool) -> tuple[int, int]:
    """Products of width d that one neuron takes part in per token, (forward, backward), beyond those that find out
    whether it fires.

    forward: u (gated) and y. backward: da; dx and the weight gradients of each matrix before the activation, and that
    of w_down.
    """
    return (2, 6) if gated else (1, 4)


def dense_flops(model: Transformer, backward: bool) -> int:
    """Per token of a full sequence, if every neuron fired: what MFU is reckoned with."""
    per_token = model.flops_per_token()
    return per_token if backward else per_token // 3


def executed_flops(model: Transformer, neurons: Sequence[float], backward: bool) -> float:
    """Per token, when of layer i only `neurons[i]` neurons per token are computed.

    All neurons still take part in the product that decides which fire (the gate's, or the only one before the
    activation). Neurons that a layer runs as dense products count as computed on every token; what padding adds is not
    counted.
    """
    ffn = model.blocks[0].ffn
    h, d = ffn.w_up.shape
    forward, back = ffn_products(ffn.w_gate is not None)
    per_neuron = 2 * d * (forward + back * backward)
    return dense_flops(model, backward) - sum((h - n) * per_neuron for n in neurons)


def peak_flops(device: torch.device) -> float | None:
    """Peak dense bf16 FLOP/s of one device, None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
