"""Features to log-probs: layers, the acoustic model, its files, its summary."""
