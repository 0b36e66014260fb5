"""The sparse FFN: formats, reference, Triton stages; `kernels.ops` is the only module others import."""
