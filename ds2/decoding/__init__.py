"""From log-probs to words.

hypothesis: the results of decoders. decoder: their interface. methods: the table of decode methods. greedy: the best
path. beam: our beam search. external: beam searches of other packages. frames: packed frames for a search. lexicon:
words as tries. alignment: times of labels and words, for utterances and streams. phrases: hot words and typed phrases.
phrase_search: typed phrases and nothing else. keywords: typed phrases among all words. postprocess: the second pass
with a recurrent language model, and calibration of word confidences.
"""
