"""Audio: reading files, features, augmentation.

read: files of any format, part and rate to float32 mono. ffmpeg: formats that libsndfile does not read. shard: members
of tar files. container: lengths stated in headers. stream: samples of a stream to blocks of frames. features: log
spectrograms and their statistics. filter_banks: mel filters, Kaldi's and NeMo's styles. augment: augmentation of
waveforms, by the effects of effects. spec_augment: augmentation of features.
"""
