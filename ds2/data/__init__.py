"""From corpora on disk to batches.

manifest: utterances and their JSON lines. corpora: importers of corpora as published. splits: what a run trains,
tunes and tests on. check, probe: what would spoil training. audio_cache: decoded audio, memory-mapped. batching: the
plan of an epoch. loader: batches on their way, from worker processes. cache_file: the file of the audio cache and its
checksums. split: one list parted into several. statistics: hours, speakers, durations of a list.
"""
