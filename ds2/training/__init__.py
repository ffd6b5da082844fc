"""Training of models.

loop: epochs, steps, evaluations and saves. trainer: the parts of a run; a step, an evaluation. state: all that a
restart needs, and what a run starts with: fresh weights or those of another model. inputs: batches as the device gets
them, made ahead. passes: forward and backward, launch by launch or as CUDA graphs. ctc: the losses, of CTC-CRF too.
optim: schedules, the optimizer's step, averages of weights. reductions: sums over ranks other than gradients. dev_set:
evaluation. metrics: what is logged. run_folder: its files, and its lock. stopping: signals and lost devices.
device_tuning: batch size and kernel tiles, measured before the first step.
"""
