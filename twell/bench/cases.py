"""What `python -m twell.bench kernels` measures, and the speed that each case must reach."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kernels.synthetic import FiringLaw, MaskProblem, Problem

N = 16384  # tokens of a batch


@dataclass(frozen=True)
class Bar:
    """Speed-up over the dense ReLU FFN: what must be reached, what is aimed at."""

    must: float | None = None  # None: only measured
    aim: float | None = None

    def verdict(self, ratio: float) -> str:
        if self.must is None:
            return "measured"
        if ratio < self.must:
            return "MISS"
        return "aim" if self.aim is None or ratio >= self.aim else "must"


NEVER_SLOWER = Bar(0.98)


@dataclass(frozen=True)
class Case:
    """One shape and firing pattern."""

    table: str  # uniform | spread | masks | tokens
    label: str  # what tells it from the others of its shape
    d: int
    h: int
    problem: Callable[[torch.dtype, torch.device], Problem | MaskProblem]
    step: Bar = NEVER_SLOWER  # forward + backward + L1
    forward: Bar = NEVER_SLOWER  # forward without gradients
    n: int = N
    gated: bool = True
    twell: bool = False  # time the TwELL packing beside the default one

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        return self.n, self.d, self.h, self.gated

    @property
    def name(self) -> str:
        return f"{self.table} {self.d}x{self.h}{'' if self.gated else ' non-gated'} {self.label}"


def synthetic(
    table: str, d: int, h: int, nnz: float, *bars: Bar, n: int = N, gated: bool = True, spread: float = 0.0,
    twell: bool = False,
):  # fmt: skip
    """A case whose neurons fire by the firing law; `spread`: log-normal sigma over tokens."""

    def problem(dtype: torch.dtype, device: torch.device) -> Problem:
        return Problem(FiringLaw(nnz, token_sigma=spread), d, h, gated=gated, dtype=dtype, device=device, seed=d + h)

    label = f"nnz {nnz:g}" + ("" if n == N else f" n {n}")
    return Case(table, label, d, h, problem, *bars, n=n, gated=gated, twell=twell)


def standard_cases() -> Iterator[Case]:
    """The cases with a bar, ordered by shape: compiled functions are kept from one case to the next."""
    for nnz, step, forward in (
        (15, Bar(2.9, 3.0), Bar(1.95, 2.1)),
        (30, Bar(2.15, 2.3), Bar(1.55, 1.65)),
        (60, Bar(1.35, 1.6), Bar(1.05, 1.25)),
        (120, Bar(0.98, 1.1), NEVER_SLOWER),
        (250, Bar(0.98, 1.1), NEVER_SLOWER),
        (1000, NEVER_SLOWER, NEVER_SLOWER),
        (5632, NEVER_SLOWER, NEVER_SLOWER),
    ):
        yield synthetic("uniform", 2048, 5632, nnz, step, forward, twell=nnz <= 60)
    for nnz in (15, 30, 60, 120):
        yield synthetic("spread", 2048, 5632, nnz, spread=0.6)
    for nnz, step, forward in (
        (30, Bar(3.1, 3.3), Bar(2.0, 2.2)),
        (60, Bar(2.1, 2.4), Bar(1.6, 1.8)),
        (120, Bar(1.3, 1.5), Bar(1.15, 1.3)),
    ):
        yield synthetic("uniform", 4096, 14336, nnz, step, forward)
    for nnz in (30, 60):
        yield synthetic("spread", 4096, 14336, nnz, spread=0.6)
    yield synthetic("uniform", 768, 2048, 20, Bar(1.0), Bar())
    yield synthetic("uniform", 2048, 8192, 20, Bar(1.0), Bar(), gated=False)
    yield synthetic("uniform", 1024, 2816, 15, Bar(1.5, 1.7), Bar(1.45, 1.6))
    yield synthetic("uniform", 1024, 2816, 30, Bar(1.15, 1.3), Bar(1.05, 1.2))
    yield synthetic("spread", 1024, 2816, 30, spread=0.6)


def token_cases() -> Iterator[Case]:
    """Other numbers of tokens: few, many, and one that divides by nothing."""
    for n in (2048, 65536, 16001):
        yield synthetic("tokens", 2048, 5632, 30, n=n)


def quick_cases() -> Iterator[Case]:
    """Every kind of case in a size that a CPU computes in a moment; no bar applies to it."""
    none = Bar()
    yield synthetic("uniform", 48, 160, 6, none, none, n=256)
    yield synthetic("uniform", 48, 160, 160, none, none, n=256)
    yield synthetic("spread", 48, 160, 6, none, none, n=256, spread=0.6)
    yield synthetic("uniform", 40, 100, 5, none, none, n=255, gated=False)


def mask_cases(path: Path, d: int, n: int = N) -> Iterator[Case]:
    """Real firing patterns: every array l0, l1, ... of the file, bits packed along the neurons, [tokens, h / 8]."""
    with np.load(path) as file:
        layers = {key: file[key] for key in sorted(file.files, key=_natural) if re.fullmatch(r"l\d+", key)}
    if not layers:
        raise ValueError(f"masks={path}: the file holds no arrays named l0, l1, ...")
    for layer, bits in layers.items():

        def problem(dtype: torch.dtype, device: torch.device, bits: np.ndarray = bits) -> MaskProblem:
            mask = torch.from_numpy(np.unpackbits(bits, axis=1)).bool()
            return MaskProblem(mask, d, dtype=dtype, device=device)

        yield Case("masks", f"{path.stem} {layer}", d, 8 * bits.shape[1], problem, n=n)


def _natural(key: str) -> tuple[str, int]:
    return key.rstrip("0123456789"), int("0" + "".join(filter(str.isdigit, key)))
