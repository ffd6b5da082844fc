"""Model, features and decoder together.

recogniser: the public interface; batches, files. pipeline: model, features and decoder on a device. session: sources
that are recognised while they arrive. evaluate: WER reports. transcripts: their word times, and wrong ones. latency:
when a stream shows each word. settings, tuning: decoder settings of a model. captions: srt, vtt and TextGrid.
"""
