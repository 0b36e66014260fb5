"""Compile every kernel for GPUs that are not there, and say what each compiled kernel uses.

    python -m tests.kernels.aot STAGE... [--arch 80 90]        one JSON line per kernel

A process of its own, because kernels defined for the interpreter cannot be compiled: TRITON_INTERPRET must be unset.
"""

import argparse
import importlib
import json
import multiprocessing
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHS = (80, 86, 89, 90, 100, 120)  # compute capabilities: A100, A40/30x0, L40/40x0, H100/H200, B200, 50x0
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes a block
TENSOR_MEMORY_LIMIT = 512  # columns, on 100
SPILL_LIMIT = 16  # bytes a thread: versions of triton differ by a register or four


def compile_case(case, arch: int) -> dict:
    """What `case` (a kernels.aot.AotCase) uses on `arch`; key "error" if it does not compile or does not fit."""
    kernel = case.kernel
    result = {"name": case.name, "kernel": kernel.__name__, "arch": arch}
    try:
        compiled = triton.compile(
            ASTSource(
                fn=kernel,
                signature=case.signature,
                constexprs={(kernel.arg_names.index(name),): value for name, value in case.constexprs.items()},
                attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
            ),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    except Exception as e:  # reported per kernel: one failure must not hide the others
        return result | {"error": f"{type(e).__name__}: {e}"[:2000]}
    result |= {"shared": compiled.metadata.shared} | resource_usage(compiled.asm["cubin"])
    if compiled.metadata.shared > SHARED_LIMIT[arch]:
        result["error"] = f"{compiled.metadata.shared} bytes of shared memory exceed {SHARED_LIMIT[arch]}"
    elif (getattr(compiled.metadata, "tmem_size", None) or 0) > TENSOR_MEMORY_LIMIT:
        result["error"] = f"{compiled.metadata.tmem_size} columns of tensor memory exceed {TENSOR_MEMORY_LIMIT}"
    elif arch in (80, 90) and result["stack"] + result["local"] > SPILL_LIMIT:
        result["error"] = f"spills: {result['stack']} bytes of stack, {result['local']} of local memory"
    return result


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack and local memory a thread (non-zero = registers are spilled)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(used["REG"]), "stack": int(used["STACK"]), "local": int(used["LOCAL"])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="+", help="modules with an aot_cases(arch) function")
    parser.add_argument("--arch", nargs="+", type=int, default=ARCHS)
    arguments = parser.parse_args()
    modules = [importlib.import_module(name) for name in arguments.stages]

    global jobs  # inherited by the forked workers: kernels cannot be pickled
    jobs = [(case, arch) for arch in arguments.arch for module in modules for case in module.aot_cases(arch)]
    with multiprocessing.get_context("fork").Pool() as pool:
        for result in pool.imap(compile_job, range(len(jobs))):
            print(json.dumps(result), flush=True)


def compile_job(index: int) -> dict:
    return compile_case(*jobs[index])


if __name__ == "__main__":
    main()
