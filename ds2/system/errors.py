"""The base class of all errors that a user can fix."""


class UserError(Exception):
    """An error that the user can fix: the message says what was given, what is allowed and what to do.

    Every error class of ds2 derives from it. A command prints the message and exits with status 2. Any other exception
    is a bug of ds2 and keeps its traceback.
    """
