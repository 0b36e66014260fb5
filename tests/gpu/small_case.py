"""Forward and backward of a few small problems, for compute-sanitizer to watch: python -m tests.gpu.small_case"""

import torch

from tests.kernels.ffn_cases import assert_accurate, make_case, run

for gated in (True, False):
    for pattern in ("1 %", "one token", "50 %"):  # the second has rows that are cut in pieces
        case = make_case(70, 72, 200, pattern, gated=gated, dtype=torch.bfloat16, device="cuda", masked=True)
        assert_accurate(case, *run(case, impl="triton"))
torch.cuda.synchronize()
print("accurate")
