"""The lowest layer, which knows nothing of speech.

errors: the base class of errors that a user can fix. files: atomic writes, temporary folders, the cache folder.
tensor_file: checkpoint files. machine: cores, memory, version and git commit. plain: JSON values to dataclasses, with
checks. messages: values between processes as data that runs no code. signals: stop signals and worker processes.
terminal: safe terminal output, progress.
"""
