"""Training of models.

loop: epochs, steps, evaluations and saves. trainer: the parts of a run; a step, an evaluation. start:
fresh weights or those of another model. state: all that a restart needs. inputs: batches as the device gets them, made
ahead. passes: forward and backward, launch by launch or as CUDA graphs. ctc, crf: the losses. optim: schedules,
the optimizer's step, averages of weights. reductions: sums over ranks other than gradients. dev_set: evaluation.
metrics: what is logged. run_folder: its files, and its lock. stopping: signals and lost devices.
device_tuning: batch size and kernel tiles, measured before the first step.
"""
