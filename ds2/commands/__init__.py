"""One module per command, with `run(arguments) -> status`. Only these use argparse, Hydra and exit codes.

`make_parser()` of a command returns its parser, which `ds2 completion` reads too.
compose: overrides and folders of recipes to a checked configuration. common: the argument parser, arguments that
several commands have, errors as messages.
"""
