"""The lowest layer, which knows nothing of speech.

UserError: the base class of errors that a user can fix. files: atomic writes, temporary folders, the cache folder,
lines of text files. tensor_file: checkpoint files. machine: cores, memory, version and git commit. plain: JSON values
to dataclasses, with checks. messages: values between processes as data that runs no code. signals: stop signals and
worker processes. terminal: safe terminal output, progress.
"""


class UserError(Exception):
    """An error that the user can fix: the message says what was given, what is allowed and what to do.

    Errors that some code catches by name have classes that derive from it. A command prints the message and exits with
    status 2. Any other exception is a bug of ds2 and keeps its traceback.
    """


USER_ERROR = 2  # the exit status of a command that ends with such an error
