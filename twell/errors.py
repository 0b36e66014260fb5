"""The one exception that stands for a mistake of the user's."""


class UserError(Exception):
    """Something the user can mend; commands print the message alone, without a traceback, and exit with code 2."""
