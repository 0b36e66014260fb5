"""Text to tokens to shards (`python -m data.prepare`), and shards to batches (`data.loader`)."""

from twell.errors import UserError


class DataError(UserError):
    """Input that cannot be used; the message is one line that says what is wrong and where."""
