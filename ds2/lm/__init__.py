"""Language models.

ngram: the automaton in tensors. levels: its construction from listed n-grams. files: the binary format. arpa,
arpa_cache: ARPA text. sentences, counts, kneser_ney: building a model of texts. perplexity: of a text.
recurrent, recurrent_training, recurrent_state: a model of layers of LSTM, its fitting, and what survives a restart.
"""
