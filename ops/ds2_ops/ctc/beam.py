"""CTC prefix beam search with an n-gram model on the GPU: a batch in one launch, a block an utterance.

Shape letters: T frames, B utterances, V labels (0 is the blank), K beam, N trie nodes, A characters, L most characters
of a label, E n-grams, S states, R best hypotheses.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds2_ops.ctc.device import why_no_device
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, run
from ds2_ops.jit.source import names, parameters, translation_unit

MOST_BEAM = 512
SHAPES = (32, 64, 128, 256, 512)  # beams that kernels are built for; a smaller one takes the next
_PREFIX_BYTES = 2 * (11 * 8 + 8 * 4)  # struct Prefixes of csrc/ctc/beam.cuh, now and next
_FRAME_BYTES = 2 * 8 + 2 * 4 + 2  # what BeamMemory holds of a prefix beside it

# struct Search of csrc/ctc/beam.cuh
_SEARCH = parameters(
    """const float* log_probs, const long long* frames, const int* places, const int* roots, int2* grown,
    double* halves, long long* names, long long* integers, double* floats, double* table, int length, int batch,
    int rows, int labels, int beam, int start_state, int closed, double alpha, double beta, double unknown_score,
    double prune"""
)
# struct Lexicon of csrc/ctc/beam.cuh
_LEXICON = parameters(
    """const unsigned char* starts_word, const long long* characters, const long long* counts, const int* children,
    const long long* word, const unsigned char* is_word, const double* hot, const double* unfinished,
    const int* follow, int longest, int width, int space, int has_hot"""
)
# struct Grams of csrc/ctc/ngram.cuh
_GRAMS = parameters(
    """const long long* keys, const float* log_prob, const int* next_state, const float* backoff, const int* suffix,
    const int* first, const int* label_ids, int vocabulary, int order, int unknown"""
)


@dataclass(frozen=True)
class Lexicon:
    """How labels spell words, and a trie of known and hot words: node 0 is off it, 1 its root; tensors on one GPU."""

    starts_word: Tensor  # (V,) bool: the label ends the word before it
    characters: Tensor  # (V, L) int64 codes, 0 pads
    counts: Tensor  # (V,) int64 characters
    children: Tensor  # (N, A) int32
    word: Tensor  # (N,) int64 vocabulary id of the word that ends here, or -1
    is_word: Tensor  # (N,) bool
    hot: Tensor  # (N,) float64: bonus of the hot words that end here
    unfinished: Tensor  # (N,) float64: what a word is worth that is written as far as here
    follow: Tensor  # (N,) int32: where the next word starts after one that ends here; 0: at the utterance's root
    space: int  # the label that only separates words, or -1
    has_hot: bool


@dataclass(frozen=True)
class Grams:
    """A back-off n-gram model as an automaton, all tensors on one GPU; state 0 is the empty history."""

    keys: Tensor  # (E,) int64 ascending, state x vocabulary + word; the first are the unigrams
    log_prob: Tensor  # (E,) float32, natural
    next_state: Tensor  # (E,) int32
    backoff: Tensor  # (S,) float32
    suffix: Tensor  # (S,) int32
    first: Tensor  # (S + 1,) int32: the first entry of each state
    label_ids: Tensor | None  # (V,) int32 vocabulary ids of the labels, for a model of labels; None: of words
    vocabulary: int
    order: int
    unknown: int  # vocabulary id of unknown words
    start: int  # the state at the start of a sentence


@dataclass(frozen=True)
class Weights:
    """What scores are made of; natural logarithms."""

    alpha: float
    beta: float
    unknown_score: float
    prune: float  # above 0
    closed: bool  # only words of the lexicon


@dataclass(frozen=True)
class Found:
    """The prefixes left after the last frame; in tables that go on from chunk to chunk, a row is a place."""

    halves: Tensor  # (2, rows, K) float64 log-probs: alignments that end in a blank, in the last label
    names: Tensor  # (rows, K, 4) int64: hash, parent's hash, last label, entry
    integers: Tensor  # (rows, K, 4) int64: state, node, characters of the unfinished word, words
    floats: Tensor  # (rows, K, 2) float64: language model, hot words
    grown: Tensor  # (B, T, K, 2) int32: entry and label that entry t K + slot + 1 was made from; 0 or less before all


@dataclass(frozen=True)
class Choice:
    """The kernel of a search, a block an utterance.

    Attributes:
        launch: the kernel.
        table_columns: of the scores in global memory, float64 a prefix; 0: they are in shared memory.
    """

    launch: Launch
    table_columns: int


def plan(beam: int, labels: int, order: int, unit: str, smem_bytes_per_block: int, utterances: int = 1) -> Choice:
    """Choose the kernel for a search.

    Args:
        beam: K.
        labels: V.
        order: of the n-gram model, 0 without.
        unit: "none", "word" or "label", what the model reads.
        smem_bytes_per_block: what the device gives a block.
        utterances: B, each a block.

    Raises:
        ValueError: the search does not fit; says what would.
    """
    if not 1 <= beam <= MOST_BEAM:
        raise ValueError(f"beam {beam} is not within 1 .. {MOST_BEAM}, which the kernel keeps on chip")
    slots = next(shape for shape in SHAPES if shape >= beam)
    threads = 256 if slots <= 64 else 512
    warps = threads // 32
    fixed = slots * (_PREFIX_BYTES + _FRAME_BYTES) + warps * 16 + 256 * 4 + 16
    columns = max(labels + 2, order)
    smem_bytes = -(-fixed // 8) * 8 + 2 * labels * 4 + beam * -(-labels // 32) * 4 + 2 * labels * 2
    if smem_bytes > smem_bytes_per_block:
        raise ValueError(
            f"beam {beam} x {labels} labels need {smem_bytes} B of shared memory, a block has {smem_bytes_per_block}: "
            "a smaller beam or alphabet fits"
        )
    table_bytes = 8 * beam * columns
    outside = smem_bytes + table_bytes > smem_bytes_per_block
    source = translation_unit(
        "ctc/beam.cuh",
        (*_SEARCH, *_LEXICON, *_GRAMS),
        f"""    extern __shared__ __align__(16) unsigned char shared[];
    const ds2::Search search{{{names(_SEARCH)}}};
    const ds2::Lexicon lexicon{{{names(_LEXICON)}}};
    const ds2::Grams grams{{{names(_GRAMS)}}};
    ds2::BeamSearch<Shape, ds2::Unit::{unit.upper()}>(search, lexicon, grams, shared).run();
""",
        ahead=f"""using Shape = ds2::BeamShape<{slots}>;
static_assert(Shape::THREADS == {threads}, "beam.py and beam.cuh disagree on threads");
static_assert(sizeof(ds2::BeamMemory<Shape>) <= {fixed}, "beam.py and beam.cuh disagree on shared memory");
""",
        launch_bounds="Shape::THREADS, 1",
    )
    launch = Launch(source, threads, grid=utterances, smem_bytes=smem_bytes + (0 if outside else table_bytes))
    return Choice(launch, columns if outside else 0)


def why_not(beam: int, labels: int, frames: int, order: int, device: torch.device) -> str | None:
    """Say why the kernel cannot run a search; None if it can.

    Args:
        beam: K.
        labels: V.
        frames: T.
        order: of the n-gram model, 0 without.
        device: of the log-probs.
    """
    if reason := why_no_device(device):
        return reason
    if frames * beam >= 2**31:
        return f"{frames} frames x beam {beam} are beyond 2^31 prefixes: cut the recording"
    try:
        plan(beam, labels, order, "none", runtime.smem_bytes_per_block(device_index(device)))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def search(
    log_probs: Tensor,
    frames: Tensor,
    beam: int,
    weights: Weights,
    lexicon: Lexicon,
    grams: Grams | None,
    going_on: Found | None = None,
    places: Tensor | None = None,
    roots: Tensor | None = None,
) -> Found:
    """Search all utterances (Hannun et al. 2014, "First-pass large vocabulary continuous speech recognition using
    bi-directional recurrent DNNs", algorithm 1), on torch's current stream, without waiting for it.

    Args:
        log_probs: (T, B, V) float32 contiguous, on the GPU; labels at -inf are not followed.
        frames: (B,) int64 on the GPU, at most T each.
        beam: K, halves of prefixes that are kept at each frame.
        weights: of the scores.
        lexicon: of the labels.
        grams: the language model, or None.
        going_on: tables of prefixes after the frames before, that are written over (not ``grown``); None: utterances
            start.
        places: (B,) int32 on the GPU, the tables' row of each utterance, all different.
        roots: (rows,) int32 on the GPU, nodes of the trie at which an utterance's words start; None: 1.

    Raises:
        ValueError: as ``plan``.
        RuntimeError: the driver's or compiler's error, with shape and GPU.
    """
    length, batch, labels = log_probs.shape
    device = log_probs.device
    unit = "none" if grams is None else "word" if grams.label_ids is None else "label"
    index = device_index(device)
    choice = plan(beam, labels, grams.order if grams else 0, unit, runtime.smem_bytes_per_block(index), batch)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    grown = new(batch, length, beam, 2, dtype=torch.int32)
    if going_on is None:
        found = Found(
            halves=new(2, batch, beam, dtype=torch.float64),
            names=new(batch, beam, 4, dtype=torch.int64),
            integers=new(batch, beam, 4, dtype=torch.int64),
            floats=new(batch, beam, 2, dtype=torch.float64),
            grown=grown,
        )
    else:
        found = replace(going_on, grown=grown)
    table = new(batch, beam, choice.table_columns, dtype=torch.float64) if choice.table_columns else None
    arguments: list[Any] = [log_probs, frames, places, roots, found.grown]
    arguments += [found.halves, found.names, found.integers, found.floats, table]
    arguments += [length, batch, len(found.names), labels, beam, grams.start if grams else 0, int(weights.closed)]
    arguments += [weights.alpha, weights.beta, weights.unknown_score, weights.prune]
    arguments += lexicon_arguments(lexicon) + grams_arguments(grams)
    run(choice.launch, arguments, lambda: f"beam search, (T, B, V) = {tuple(log_probs.shape)}, beam {beam}", device)
    return found


def lexicon_arguments(lexicon: Lexicon) -> list[Any]:
    """Return struct Lexicon of csrc/ctc/beam.cuh in its order."""
    own = [lexicon.starts_word, lexicon.characters, lexicon.counts, lexicon.children, lexicon.word, lexicon.is_word]
    sizes = [lexicon.characters.shape[1], lexicon.children.shape[1], lexicon.space, int(lexicon.has_hot)]
    return [*own, lexicon.hot, lexicon.unfinished, lexicon.follow, *sizes]


def grams_arguments(grams: Grams | None) -> list[Any]:
    """Return struct Grams of csrc/ctc/ngram.cuh in its order."""
    if grams is None:
        return [None] * 7 + [0, 0, 0]
    own = [grams.keys, grams.log_prob, grams.next_state, grams.backoff, grams.suffix, grams.first, grams.label_ids]
    return [*own, grams.vocabulary, grams.order, grams.unknown]
