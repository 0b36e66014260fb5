"""The command lines of `python -m twell.<name> key=value ...`: a dataclass is the schema, as in twell/config.py."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from twell.config import ConfigError, explain
from twell.errors import UserError

Schema = TypeVar("Schema")


def parse_arguments(arguments: Sequence[str], schema: type[Schema], doc: str) -> Schema:
    """`arguments`, each key=value, as an instance of `schema`; `null` is None, and lists are written [a,b].

    `-h` or `--help` prints `doc` and the defaults, and exits. Raises ConfigError (or OmegaConf's own error) for the
    first argument that does not fit.
    """
    fields = dataclasses.fields(schema)
    names = [field.name for field in fields]
    if {"-h", "--help"} & set(arguments):
        defaults = "\n".join(f"    {field.name}={_default(field)}" for field in fields)
        print(f"{doc}\nDefaults:\n\n{defaults}")
        sys.exit(0)
    values = OmegaConf.structured(schema)  # converts, and refuses what does not convert
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in names:
            raise ConfigError(f"{argument}: expected KEY=VALUE with KEY one of {', '.join(names)}")
        if OmegaConf.is_list(values[key]):
            values.merge_with_dotlist([argument])
        else:  # as it stands: YAML would read a run called 1e5 as a number
            values[key] = None if value == "null" else value
    return OmegaConf.to_object(values)


def check_values(options: object, rules: Iterable[tuple[bool, str, str]]) -> None:
    """ConfigError for the first of the rules (does it hold?, name of the option, what it must be) that is broken."""
    for holds, key, rule in rules:
        if not holds:
            raise ConfigError(f"{key}={getattr(options, key)}: {rule}")


def whole_numbers(options: object, key: str) -> list[int]:
    """The numbers of a text option such as "1,8,64", in its order; ConfigError unless all are whole and at least 1."""
    parts = getattr(options, key).split(",")
    fits = all(part.strip().isdecimal() and int(part) >= 1 for part in parts)
    check_values(options, [(fits, key, "must be numbers of at least 1 with commas between them")])
    return [int(part) for part in parts]


def run_command(main: Callable[[Sequence[str]], None]) -> None:
    """Call `main` with the command line; a user's mistake ends the process with one line and exit code 2."""
    try:
        main(sys.argv[1:])
    except (UserError, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(2)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()
