"""From corpora on disk to batches.

manifest: utterances and their JSON lines; lists split, filtered, counted. corpora: importers of published corpora.
splits: utterances for training, dev and test of a run, and what changed since it last started. check: problems of data,
found before training. audio_cache: decoded audio on disk. loader: the batches of an epoch, and worker processes that
make them. shards: lists as tar files. splice: speech that says a text, of pieces of recordings.
"""
