"""Waveforms and what is heard in them: any file to samples, samples to features, augmentation of both."""
