"""Training of models.

loop: epochs, steps, evaluations and saves. trainer: how a run is built from its parts; a step, an evaluation. start:
fresh weights or those of another model. state: all that survives a restart. inputs: batches on their way to the device,
made ahead. passes: forward and backward, launch by launch or as CUDA graphs. ctc, crf: the losses. optim: schedules,
the optimizer's step, averages of weights. reductions: sums over ranks beside those of gradients. dev_set: evaluation.
metrics: what is logged. run_folder: its files, and one job at a time. stopping: signals and lost devices.
device_tuning: the audio of a batch and the tiles of kernels, measured before the first step.
"""
