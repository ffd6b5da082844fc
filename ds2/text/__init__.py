"""Characters and labels.

alphabet: transcripts to labels and back, the blank. pieces: byte-pair pieces. lines: numbered lines of text files.
normalise: transcripts in the form an alphabet writes. unfit: characters it cannot write, and the way out.
"""
