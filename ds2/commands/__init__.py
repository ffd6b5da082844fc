"""One file a command: arguments to one call to print. The only place that knows argparse, Hydra and exit codes.

compose, decode_options: overrides to a checked configuration. common: what commands share.
"""
