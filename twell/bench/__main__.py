"""Benchmarks: python -m twell.bench COMMAND [key=value ...]

    kernels    the sparse FFN against the dense one: time, error, memory, and each stage against its floor
    step       the whole training step, dense against sparse: tokens/s, MFU, parts, memory, energy
    prefill    the same for a forward pass over prompts
    scale      training on 1, 2, 4, ... GPUs of this host: tokens/s, memory, communication, checkpoints
    decode     the same for one token after another, at several batch sizes
    fit        the largest micro-batch that fits this GPU

`python -m twell.bench COMMAND --help` lists the command's keys and their defaults.
"""

import importlib
import sys

from omegaconf.errors import OmegaConfBaseException

from twell.arguments import parse_arguments
from twell.config import explain
from twell.errors import UserError

# name -> module with a dataclass `Options` and a function `run(options)`
COMMANDS = {
    "kernels": "twell.bench.kernels",
    "step": "twell.bench.step",
    "prefill": "twell.bench.prefill",
    "scale": "twell.bench.scale",
    "decode": "twell.bench.decode",
    "fit": "twell.bench.fit",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    command = importlib.import_module(COMMANDS[arguments[0]])
    try:
        command.run(parse_arguments(arguments[1:], command.Options, command.__doc__))
    except (UserError, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
