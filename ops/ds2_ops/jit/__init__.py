"""From a translation unit to a launch, bottom to top.

build    NVRTC, and the cache of what it made; needs no GPU
source   a translation unit and its entry's parameters
runtime  what a device can hold; kernels loaded onto it; the launch itself
launch   a kernel and how it is launched: the one way for all; errors that name the GPU
"""
