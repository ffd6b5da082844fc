"""Language models.

ngram: back-off n-gram models as an automaton in tensors. files: their binary format and ARPA, their text format.
sentences: texts to tokens, perplexity. kneser_ney: estimation from texts. label_graph: label sequences as CTC-CRF
weights them. letters_to_phones: pronunciations of words that no dictionary has. recurrent: a model of LSTM layers and
its file. recurrent_training: its training.
"""
