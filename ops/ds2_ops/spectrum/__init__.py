"""Log power spectra, for recognition.

op          windows of samples, wherever these lie, in one launch
"""
