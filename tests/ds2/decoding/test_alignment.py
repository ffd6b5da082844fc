"""Forced alignment on a GPU against torchaudio's."""

from __future__ import annotations

import pytest
import torch
from support.oracles import torchaudio

from ds2.decoding.alignment import force_align

FRAMES, LABELS = 120, 29


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 30, 80])
def test_equals_torchaudio(length: int) -> None:
    oracle = torchaudio(compiled=True).functional.forced_align
    generator = torch.Generator().manual_seed(length)
    logits = 3 * torch.randn(FRAMES, 4, LABELS, generator=generator)
    log_probs = logits.log_softmax(-1)
    # Some labels twice in a row: a blank must part them.
    targets = torch.randint(1, LABELS, (4, length), generator=generator)
    targets[:, 1::7] = targets[:, :-1:7]
    lengths = torch.tensor([FRAMES, FRAMES, FRAMES - 3, FRAMES - 19])
    found = force_align(log_probs.cuda(), lengths, targets.tolist())
    for row, alignment in enumerate(found):
        frames = int(lengths[row])
        path, scores = oracle(log_probs[:frames, row][None].contiguous(), targets[row : row + 1])
        score = float(scores.double().sum())
        assert alignment is not None
        # All terms are negative, so no partial sum exceeds the whole, and each addition rounds by half an eps of it.
        assert abs(alignment.log_prob - score) <= frames * torch.finfo(torch.float32).eps * abs(score)
        heard = torch.zeros(frames, dtype=path.dtype)
        for label, start, end in zip(alignment.labels, alignment.starts, alignment.ends, strict=True):
            heard[start:end] = label
        assert torch.equal(heard, path[0].cpu())
