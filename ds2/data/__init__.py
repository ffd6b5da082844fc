"""From corpora on disk to batches: manifests, checks, audio cache, epoch plans, the loader."""
