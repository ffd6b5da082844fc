"""Model, decoder and audio together: hypotheses, transcripts, reports, tuned settings."""
