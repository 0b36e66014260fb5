"""The one exception that stands for a mistake of the user's, and how to quote other errors and many names in a line."""

from collections.abc import Sequence


class UserError(Exception):
    """Something the user can mend; commands print the message alone, without a traceback, and exit with code 2."""


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, or its type if it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


def first_few(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
