"""The exception that carries a message for the user."""


class DataError(ValueError):
    """A mistake in the user's data or flags, or a failure of the machine, in one message to act on.

    It takes the message alone, so that it crosses process borders unchanged. The tools print it and exit
    with 1.
    """
