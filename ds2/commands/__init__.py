"""One module per command, with `run(arguments) -> status`. Only these use argparse, Hydra and exit codes.

compose, decode_options: overrides to a checked configuration. common: the argument parser and error messages.
sweep belongs to `ds2 train`, lm_train and lm_tune to `ds2 lm`.
"""
