"""Waveforms and what is heard in them.

read: any file, any part, any rate to float32 mono. features: log spectrograms and their statistics. filters: on mel
scales. kaldi: what filter banks of Kaldi and NeMo have of their own. stream: features of a source that comes piece by
piece. augment: speed, tempo, rooms, noise, codecs, gain. tempo: faster or slower at its own pitch. degrade: how rooms,
noise and codecs are made. vocal_tract: frequencies of another throat. spec_augment: masks on spectrograms. container:
the lengths that files promise. ffmpeg: formats that libsndfile does not read. shard: members of tar files.
"""
