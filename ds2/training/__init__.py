"""Fitting a model.

loop: epochs, steps, when to evaluate and save. trainer: one step, one evaluation. start, state: what a run begins
from, and all that survives a restart. run_files: the models and the state that a run leaves. ctc, optim, averaging,
batch_norm: parts of a step. metrics: times, logs. run_dir, interrupts: one user of a folder; signals. passes, graphs:
forward and backward, launch by launch or as CUDA graphs. report: what ranks tell each other of a step. overlap: when
their sums of gradients go. update: norm of the gradients, clipping, optimizer. coming: batches on their way, into the
next epoch too. inputs: a batch as the device takes it. position: what a stored place in an epoch means. dev_set,
dev_watch: how a model does on the dev set, and what a run shows of it. noise_scale: how large a batch pays.
lost_device: a GPU that fails every call is told as lost. budget, trial: how much audio a batch may hold, by trying.
tiles: which kernels the recurrent layers use, where they are calibrated.
"""
