"""The one base of all errors that a user can mend."""


class UserError(Exception):
    """A mistake that the user can mend: the message says what was given, what is allowed and the way out.

    Every error class of ds2 derives from it. A command prints its message and exits with status 2; whatever else is
    raised is a fault of ds2 and keeps its traceback.
    """
