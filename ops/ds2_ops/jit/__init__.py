"""From a translation unit to a launch, bottom to top.

build    NVRTC and its cache on disk; needs no GPU
runtime  the driver: properties of a device, loading of kernels, launching
launch   translation units, their parameters and their launches: the one way for all kernels
"""
