"""Characters and labels: the alphabet, byte-pair pieces, numbered lines of text files."""
