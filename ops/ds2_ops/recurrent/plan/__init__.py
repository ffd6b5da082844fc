"""From a problem and a device to a kernel, or to the reason why none can run it; needs no GPU. Bottom to top.

model    microseconds of a time step of a tile
problem  the question, the hardware, the answer, and the kernels' parameters, the same for every design
units, cluster, narrow, wide    the tiles of each design
choose   the fastest of them all
"""
