"""The denominator of CTC-CRF state by state, differentiable by autograd: the reference of the tests."""

import torch
from torch import Tensor


def denominator_reference(
    logits: Tensor, frames: Tensor, weights: Tensor, following: Tensor, ends: Tensor, start: int
) -> Tensor:
    """Sum over all label sequences that a deterministic automaton weights, and over their paths of CTC.

    Nothing is scaled: for as many frames as float64 holds the product of.
    Shape letters: T frames, B utterances, V labels (0 is the blank), S states.

    Args:
        logits: (T, B, V) float64.
        frames: (B,) int64.
        weights: (S, V) float64 of a label after a state; column 0 is ignored.
        following: (S, V) int64 state after it.
        ends: (S,) float64 weight of ending in a state.
        start: a state.

    Returns:
        (B,) logarithms of the sums, float64.
    """
    probs, (states, labels) = logits.softmax(-1), weights.shape
    another = 1 - torch.eye(labels, dtype=logits.dtype)
    goes_to = torch.zeros(states, states, labels, dtype=logits.dtype)  # after, before, label
    for state in range(states):
        for label in range(1, labels):
            goes_to[following[state, label], state, label] = weights[state, label]
    sums = []
    for utterance, length in enumerate(frames.tolist()):
        scores = torch.zeros(states, labels, dtype=logits.dtype)  # of paths in a state, by their last frame
        scores[start, 0] = 1.0
        for frame in range(length):
            # A new label comes from every last frame but that of the same label, which is a repetition.
            arriving = torch.einsum("asl,sl->al", goes_to, scores @ another)
            labelled = (scores + arriving)[:, 1:]
            scores = torch.cat((scores.sum(1, keepdim=True), labelled), 1) * probs[frame, utterance]
        sums.append((scores.sum(1) * ends).sum().log())
    return torch.stack(sums)
