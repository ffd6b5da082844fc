"""Characters and labels.

alphabet: transcripts to labels and back. normalise: punctuation and case of transcripts. numbers: numbers as words.
pieces: byte-pair pieces. unknown_characters: characters outside an alphabet and a proposal for an alphabet with them.
"""
