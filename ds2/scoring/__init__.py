"""Hypotheses against references: WER and its alignment, intervals, reports as text, JSON and a page."""
