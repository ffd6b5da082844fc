"""From corpora on disk to batches.

manifest: utterances and their JSON lines, one list into several. corpora: importers of published corpora. splits:
utterances for training, dev and test of a run. check: problems of data, found before training. audio_cache: decoded
audio on disk. cache_file: the format of its files. batching: the batches of an epoch. loader: worker processes that
make batches. statistics: hours, speakers, durations of a list, and filters. shards: lists as tar files. corpus_changes:
what changed since a run last started.
"""
