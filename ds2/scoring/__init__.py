"""Hypotheses against references.

wer: alignment and counts. statistics: intervals and paired tests. report, html: a report as text, JSON and a page.
texts: files to score, and which hypothesis belongs to which reference.
"""
