"""One file a command: arguments to one call to print. The only place that knows argparse, Hydra and exit codes.

compose, decode_options: overrides to a checked configuration. common: what commands share. The others are called as
their command is; data_tools, train_help and sweep belong to `ds2 data` and `ds2 train`.
"""
