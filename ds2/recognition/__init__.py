"""Model, features and decoder together.

recogniser: the public interface; batches, files. pipeline: model, features and decoder on a device. session: sources
that are recognised while they arrive. evaluate: WER reports. transcripts: word times of transcripts, and wrong
transcripts. settings, tuning: decoder settings of a model. captions: srt and vtt.
"""
