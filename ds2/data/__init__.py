"""From corpora on disk to batches.

manifest: utterances and their JSON lines. corpora: importers of corpora as published. splits: what a run trains,
tunes and tests on. check, probe: what would spoil training. audio_cache: decoded audio on disk. cache_build: how it
comes there. cache_file: its files and their checksums. batching: the plan of an epoch. loader: batches on their way,
from worker processes. split: one list parted into several. statistics: hours, speakers, durations of a list.
shards: lists as tar files. corpus_changes: what differs from the last start of a run.
"""
