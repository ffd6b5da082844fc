"""Log power spectra, for hearing.

op          windows of samples, wherever these lie, in one launch
"""
