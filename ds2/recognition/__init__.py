"""Model, features and decoder together.

recogniser: the public interface; batches, files. pipeline: what it is made of. session: sources that arrive while they
are recognised. evaluate: WER reports. transcripts: word times of transcripts, and doubtful transcripts. settings,
tuning: decoder settings of a model. captions: srt and vtt.
"""
