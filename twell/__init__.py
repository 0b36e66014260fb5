"""twell: pretrain dense and sparse Transformers, and compute only the non-zeros of the FFN."""

__all__ = ["sparsify"]


def __getattr__(name: str):
    """`twell.sparsify`, found when it is first used: importing twell costs nothing."""
    if name == "sparsify":
        from twell.hf.sparse_mlp import sparsify

        return sparsify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
