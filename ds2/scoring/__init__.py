"""Scores of recognised texts.

wer: alignment, error counts, the errors of a corpus. statistics: confidence intervals and tests. texts: files of
references and hypotheses. report: text, JSON and HTML.
"""
