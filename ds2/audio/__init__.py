"""Audio: reading files, features, augmentation.

read: files of any format, part and rate to float32 mono. ffmpeg: formats that libsndfile does not read. shard: members
of tar files. container: lengths stated in headers. stream: samples of a stream to blocks of frames. features: log
spectrograms, mel filter banks, their statistics. augment: augmentation of waveforms by effects. spec_augment: of
features.
"""
