"""From a translation unit to a launch, bottom to top.

build    NVRTC, and the cache of what it made; needs no GPU
runtime  what a device can hold; kernels loaded onto it; the launch itself
launch   a kernel of decoding and how it is launched; errors that name the GPU
"""
