"""Characters and labels.

alphabet: transcripts to labels and back, the blank. pieces: byte-pair pieces. lines: numbered lines of text files.
"""
