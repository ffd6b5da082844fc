"""Log-probs to words: the decoder's interface, one row a method, greedy, alignment, confidence."""
