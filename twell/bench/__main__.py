"""Benchmarks: python -m twell.bench COMMAND [key=value ...]

    kernels    the sparse FFN against the dense one: time, error, memory, and each stage against its floor
    step       the whole training step, dense against sparse: tokens/s, MFU, parts, memory, energy
    prefill    the same for a forward pass over prompts
    scale      training on 1, 2, 4, ... GPUs of this host: tokens/s, memory, communication, checkpoints
    decode     the same for one token after another, at several batch sizes
    fit        the largest micro-batch that fits this GPU

`python -m twell.bench COMMAND help=true` lists the command's keys and their defaults.
"""

import importlib
import sys

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

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
    defaults = OmegaConf.structured(command.Options)
    overrides = OmegaConf.from_dotlist(arguments[1:])
    if overrides.pop("help", False):
        print(command.__doc__.strip(), "", OmegaConf.to_yaml(defaults), sep="\n")
        return 0
    try:
        options = OmegaConf.to_object(OmegaConf.merge(defaults, overrides))
    except OmegaConfBaseException as e:
        print(f"{str(e).splitlines()[0]} (help=true lists the keys of {arguments[0]})", file=sys.stderr)
        return 2
    try:
        command.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
