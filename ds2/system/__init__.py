"""The ground, which knows nothing of speech.

errors: the base of all errors that a user can mend. files: files written whole, the cache folder. tensor_file:
tensors with a JSON header in one file. machine: cores, the commit that runs.
"""
