"""What a tile does in a step, from which its cost is estimated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What one multiprocessor does in one time step of a tile: the facts from which the cost is estimated.

    Attributes:
        layout: which constants: design, and what else makes its steps another kind.
        backward: the pass.
        tiles: that run one after the other, so that the batch takes as many times as long.
        m_tiles, k_tiles: matrix instructions of a multiplying warp: rows, and along K.
        words: 32-bit words of one utterance's state that a block makes.
        head_words: of these, in the first of two parts; all where there is one.
        samples, groups: utterances of a group, and groups that take turns.
        cluster: blocks a cluster.
        blocks: at work together on the chip.
        rounds: in which the threads that finish a step get through a group's utterances.
        state_words: of one utterance's state that a block reads.
        smem_k_tiles: of `k_tiles`, with weights in shared memory.
        split_words: whether rows of arrays start between words, which costs loads that nothing hides.
        phases: rounds in which blocks exchange something in a step.
        sums, sent: numbers of a unit that are added up, and that travel, in a step: 1 but for cells with gates.
    """

    layout: str
    backward: bool
    tiles: int
    m_tiles: int
    k_tiles: int
    words: int
    head_words: int
    samples: int
    groups: int
    cluster: int
    blocks: int
    rounds: int
    state_words: int
    smem_k_tiles: int = 0
    split_words: bool = False
    sums: int = 1
    sent: int = 1
    phases: int = 1
