"""From a problem and machine facts to a kernel, or to the reason why no kernel can run it; needs no GPU. Bottom to top.

problem      what is asked, what the hardware gives, what the answer says
entry        the kernels' parameters, the same for every design
grid         what the two whole-chip designs share
cluster      design 1: the state goes through distributed shared memory
grid_narrow  design 2: through L2, groups of 8 utterances
grid_wide    design 3: through L2, groups of 32 utterances
choose       the cheapest of them all
"""
