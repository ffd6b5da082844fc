"""Fitting a model: the loop, a step, what survives a restart."""
