"""The typed settings: their schema, what they must hold beyond types, and their way to and from trees; no Hydra."""
