"""What a stage declares so that tests can compile its kernels for GPUs that are not there."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AotCase:
    """One kernel in a configuration that a launcher picks; each stage lists its own in `aot_cases(arch)`."""

    name: str
    kernel: Any  # the @triton.jit function
    signature: dict[str, str]  # every parameter: "*bf16", "i32", "fp32", "tensordesc<bf16[128, 64]>" or "constexpr"
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = ()  # pointers and integers divisible by 16
