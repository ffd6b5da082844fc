"""Many ranks as one.

communicator: the interface, and a single process. launch: which member runs, and how an error ends all ranks. mpi,
nccl, world: transports, and who is on which host. gradients: buckets on their way during back-propagation. agreement:
what all ranks must have in common. watchdog: who waits for whom, and since when.
"""
