"""What the two whole-chip designs share, for hidden sizes that one cluster cannot hold."""

from ds2_ops.recurrent.plan.problem import NUMBERS, Problem

SLOTS = 16  # of the exchange
GATED_SLOTS = 64  # of the narrow design with gates
INPUTS_AHEAD = 8  # turns


def state_words(problem: Problem) -> int:
    """Words of one utterance's state, in whole units of 16 bytes."""
    return -(-problem.hidden // (4 * NUMBERS[problem.dtype][1])) * 4


def turns(batch: int, most_samples: int, most_groups: int) -> tuple[int, int, int]:
    """Utterances of a group, groups of a tile, tiles: as few groups as can be, all of one size but the last."""
    all_groups = -(-batch // most_samples)
    tiles = -(-all_groups // most_groups)
    return -(-batch // all_groups), -(-all_groups // tiles), tiles
