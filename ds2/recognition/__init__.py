"""Model, features and decoder together.

recogniser: the public interface; batches, files. session: model, features and decoder on a device, and sources that are
recognised while they arrive. open_segments: where their segments end. evaluate: WER reports. transcripts: their word
times, and wrong ones. latency: when a stream shows each word. settings, tuning: decoder settings of a model. captions:
srt, vtt and TextGrid.
"""
