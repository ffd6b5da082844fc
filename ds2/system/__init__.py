"""The ground, which knows nothing of speech.

errors: the base of all errors that a user can mend. files: files written whole, the cache folder. tensor_file:
tensors with a JSON header in one file. optimizer_state: an optimizer as such tensors. machine: cores, the commit that
runs. plain: plain containers to dataclasses, the check at the door of every format. messages: values between processes
as data that runs no code. stops: signals that end a process.
terminal: what files say, without commands to a terminal.
"""
