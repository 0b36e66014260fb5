"""The one exception that stands for a mistake of the user's, and how others are quoted in one line."""


class UserError(Exception):
    """Something the user can mend; commands print the message alone, without a traceback, and exit with code 2."""


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, or its type if it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]
