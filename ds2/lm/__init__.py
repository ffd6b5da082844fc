"""N-gram language models: the automaton, its files, building one from text, perplexity."""
