"""Training on several ranks.

communicator: the interface, for a single process and for groups, whose sums are in order of rank, and the facts that
all ranks must share. launcher: how this process was launched. launch: joins the ranks, and ends them on an error.
process_group: transfers on the CPU, over MPI (mpi) or Gloo (gloo). nccl: sums between GPUs. gradients: sums of
gradients during back-propagation, in buckets. elastic: ranks that come and go, over connections of our own (tcp).
watchdog: finds a rank that hangs.
"""
