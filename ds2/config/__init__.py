"""The typed settings; no Hydra.

schema: the dataclasses. check: values that cannot work, or not together. convert: trees to dataclasses and back,
unknown keys with the nearest right one. device: names of devices and precisions. allowed: what a setting may be, said
where it is declared. document: the settings with their comments, for help. inherit: settings taken from a model to
start from.
"""
