"""Packed frames: runs of blanks are joined, and neither chunks nor the order in which a GPU adds change their bits."""

from __future__ import annotations

import pytest
import torch

from ds2.config.schema import DecodeConfig
from ds2.decoding.frames import NONE, open_frames, pack, pack_next
from ds2.text.alphabet import BLANK

LABELS = 8


def log_probs_of_pauses(frames: int, batch: int, seed: int = 0) -> torch.Tensor:
    """(T, B, V) of speech with long pauses: runs of frames in which only the blank is likely."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(frames, batch, LABELS, generator=rng)
    in_pause = torch.rand(1 + frames // 20, batch, generator=rng).repeat_interleave(20, 0)[:frames] < 0.6
    logits[..., BLANK] += 30.0 * in_pause
    return logits.log_softmax(2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_chunks_of_any_length_give_the_bits_of_the_whole(device: str) -> None:
    options, whole = DecodeConfig(), log_probs_of_pauses(200, 16).to(device)
    lengths = torch.randint(1, 201, (16,), generator=torch.Generator().manual_seed(1))
    for _ in range(10):  # a GPU adds in another order each time
        packed, counts = pack(whole, lengths, options)
        runs = torch.full((16,), NONE, dtype=torch.float64, device=device)
        parts: list[list[torch.Tensor]] = [[] for _ in range(16)]
        for first in range(0, 200, 7):
            chunk = whole[first : first + 7]
            frames, complete, runs = pack_next(chunk, (lengths - first).clamp(0, len(chunk)), options, runs)
            for part, own, count in zip(parts, frames.unbind(1), complete.tolist(), strict=True):
                part.append(own[:count])
        last, exist = open_frames(runs, LABELS)
        for row, part in enumerate(parts):
            joined = torch.cat([*part, last[: int(exist[row]), row]])
            assert torch.equal(joined, packed[: int(counts[row]), row])
            assert len(joined) < int(lengths[row]) or int(lengths[row]) < 40


def test_a_run_of_blanks_is_one_frame_whose_blank_is_their_sum() -> None:
    whole = log_probs_of_pauses(60, 4)
    whole[:, 0] = torch.cat([torch.tensor([30.0]), torch.zeros(LABELS - 1)]).log_softmax(0)
    packed, counts = pack(whole, torch.tensor([60, 60, 60, 0]), DecodeConfig())
    assert counts.tolist()[0] == 1 and counts.tolist()[3] == 0
    assert packed[0, 0, BLANK] == whole[:, 0, BLANK].double().sum().float()
    assert (packed[0, 0, 1:] == NONE).all()
