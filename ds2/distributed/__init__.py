"""Training on several ranks.

communicator: the interface, for a single process and for groups. launcher: the launcher of this process. launch: joins
the ranks, and ends them on an error. process_group: transfers on the CPU, over MPI (mpi) or Gloo (gloo). ordered: sums
over a process group. nccl: sums between GPUs. gradients: sums of gradients during back-propagation, in buckets.
elastic: ranks that come and go, over connections of our own (tcp). agreement: the facts that all ranks must share.
watchdog: finds a rank that hangs.
"""
