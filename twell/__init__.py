"""twell: pretrain dense and sparse Transformers, and compute only the non-zeros of the FFN."""
