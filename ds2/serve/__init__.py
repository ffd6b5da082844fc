"""Live recognition for others: what comes from any number of sources in one batch, and the protocols they speak."""
