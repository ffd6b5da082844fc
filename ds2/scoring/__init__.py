"""Scores of recognised texts.

wer: alignment, error counts, the errors of a corpus. statistics: confidence intervals and tests. report: text, JSON and
HTML, whose page is errors.html.
"""
