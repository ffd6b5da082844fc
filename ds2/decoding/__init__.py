"""Log-probs to words.

hypothesis: what decoders return. decoder: what they all are. methods: one row a `decode.method`. greedy: the best
path. beam: our search. external: other people's. frames, lexicon, alignment: what searches look at, spell with and
are timed by. confidence: calibrated confidences of words. rescore: the N best ranked
anew. timeline: when words were said in sources of any length.
"""
