"""Characters and labels.

alphabet: normalisation of transcripts, transcripts to labels and back. numbers: numbers as words. pieces: byte-pair
pieces. pronunciations: words as phones. unknown_characters: characters outside an alphabet and a proposal for an
alphabet with them.
"""
