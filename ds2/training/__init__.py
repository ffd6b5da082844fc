"""Fitting a model.

loop: epochs, steps, when to evaluate and save. trainer: one step, one evaluation. start, state: what a run begins
from, and all that survives a restart. ctc, optim, averaging, batch_norm: parts of a step. metrics: times, logs.
run_dir, interrupts: one user of a folder; signals.
"""
