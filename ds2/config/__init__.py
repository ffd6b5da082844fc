"""The configuration as typed dataclasses, without Hydra.

schema: all settings. allowed: declarations of ranges and choices. check: values and combinations that cannot work.
convert: from Hydra, YAML and JSON to dataclasses and back, inheritance from a model, the texts of --help. device: names
of devices and precisions.
"""
