"""Many ranks as one.

communicator: the interface, and a single process. launcher: who started this process. launch: which member runs, and
how an error ends all ranks. world: who is on which host, and what carries messages, over MPI (mpi) or Gloo (gloo).
ranks: what the members over a world share: ordered (sums on CPUs) and nccl, with peers (small sums on one host).
gradients: in buckets, summed during back-propagation. agreement: what all ranks must have in common.
watchdog: who waits for whom, and since when.
"""
