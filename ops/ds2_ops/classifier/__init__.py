"""The classifier of few labels, for inference.

op          one launch for few labels, else a library's product
"""
