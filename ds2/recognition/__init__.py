"""Model, features and decoder together.

recogniser: the public interface; batches, files. pipeline: model, features and decoder on a device. session: sources
that are recognised while they arrive. evaluate: WER reports. latency: word times of transcripts, wrong transcripts, and
when a stream shows each word. settings, tuning: decoder settings of a model. captions: srt and vtt.
"""
