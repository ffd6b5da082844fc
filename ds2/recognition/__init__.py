"""Model, decoder and audio together.

recogniser: the public interface, on parts. stream: a source heard chunk by chunk, by one of the ways
of hearing; graphed: the one for batches of any streams. transcribe: files of any length.
evaluate: manifests to reports. transcripts: word times of transcripts, and doubtful ones. tuning, settings: decoder
settings of a model. live: segments that become final at pauses. captions: srt and vtt. robustness: WER in noise.
"""
