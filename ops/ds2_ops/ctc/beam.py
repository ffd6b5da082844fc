"""CTC prefix beam search with an n-gram model on the GPU: a batch in one launch, one block for each utterance.

Shape letters: T frames, B utterances, V labels (0 is the blank), K beam, N trie nodes, A characters, L characters of a
label at most, E n-grams, S states, R best hypotheses, P labels of a prefix at most, M labels that one call removes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_read, why_no_plan
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, names, parameters, run, translation_unit

MAX_BEAM = 512
SHAPES = (32, 64, 128, 256, 512)  # beams for which kernels are built; others use the next larger one
_PREFIX_BYTES = 2 * (11 * 8 + 8 * 4)  # struct Prefixes of csrc/ctc/beam.cuh, of this frame and of the next
_FRAME_BYTES = 2 * 8 + 2 * 4 + 2  # of a prefix in struct BeamMemory, without struct Prefixes
_TRACE_THREADS = 64
_APPEND_THREADS = 128

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
    const int* sounds, const int* follow, int longest, int width, int space, int has_hot"""
)
# struct Grams of csrc/ctc/ngram.cuh
_GRAMS = parameters(
    """const long long* keys, const float* log_prob, const int* next_state, const float* backoff, const int* suffix,
    const int* first, const int* label_ids, int vocabulary, int order, int unknown"""
)
_NO_GRAMS = {name: None if "*" in kind else 0 for kind, name in _GRAMS}  # its members without a language model
# struct Spelled of csrc/ctc/labels.cuh
_SPELLED = parameters(
    """const long long* frames, const int* places, const int2* grown, const double* halves, const long long* names,
    const short* before, const int* had, short* labels, int* counts, short* certain, int length, int rows, int beam,
    int room, int most"""
)
# of trace_entries in csrc/ctc/labels.cuh
_TRACE = parameters(
    """const long long* entries, const int2* grown, short* labels, int count, int utterances, int slots, int width"""
)
TRACE = translation_unit("ctc/labels.cuh", _TRACE, f"    ds2::trace_entries({names(_TRACE)});\n")
APPEND = translation_unit(
    "ctc/labels.cuh",
    _SPELLED,
    f"""    const ds2::Spelled spelled{{{names(_SPELLED)}}};
    ds2::Speller<{_APPEND_THREADS}>(spelled, shared).run();
""",
    alignment=16,
)


@dataclass(frozen=True)
class LexiconTables:
    """The spelling of labels, and a trie of known and hot words; all tensors on one GPU.

    Node 1 of the trie is the root. Node 0 stands for prefixes that are not in the trie.
    """

    starts_word: Tensor  # (V,) bool: the label ends the previous word
    characters: Tensor  # (V, L) int64 codes, 0 pads
    counts: Tensor  # (V,) int64 characters
    children: Tensor  # (N, A) int32
    word: Tensor  # (N,) int64 vocabulary id of the word that ends at the node, or -1
    is_word: Tensor  # (N,) bool
    hot: Tensor  # (N,) float64: bonus of the hot words that end at the node
    unfinished: Tensor  # (N,) float64: score of an unfinished word that has reached the node
    follow: Tensor  # (N,) int32: root of the next word after one that ends at the node; 0: the utterance's root
    space: int  # the label that only separates words, or -1
    has_hot: bool
    sounds: Tensor | None = None  # (V,) int32: labels of one sound need a blank between them; None: all sounds differ


@dataclass(frozen=True)
class NGramTables:
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
class SearchWeights:
    """Weights of the scores of a search; natural logarithms."""

    alpha: float
    beta: float
    unknown_score: float
    prune: float  # above 0
    closed: bool  # only words of the lexicon are allowed


@dataclass(frozen=True)
class PrefixTables:
    """The best prefixes after the last frame. In tables that live from chunk to chunk, a row is a slot of a stream."""

    halves: Tensor  # (2, rows, K) float64 log-probs: alignments that end in a blank, in the last label
    names: Tensor  # (rows, K, 4) int64: hash, parent's hash, last label, entry
    integers: Tensor  # (rows, K, 4) int64: state, node, characters of the unfinished word, words
    floats: Tensor  # (rows, K, 2) float64: language model, hot words
    grown: Tensor  # (B, T, K, 2) int32: parent and label of entry t K + k + 1; 0 or less: no parent


def plan(
    beam: int, labels: int, order: int, unit: str, smem_bytes_per_block: int, utterances: int = 1
) -> tuple[Launch, int]:
    """Choose the launch for a search, one block for each utterance.

    Args:
        beam: K.
        labels: V.
        order: of the n-gram model, 0 without.
        unit: "none", "word" or "label": the unit of the n-gram model.
        smem_bytes_per_block: the largest shared memory of a block of the device.
        utterances: B.

    Returns:
        The launch, and float64 scores of each prefix in global memory; 0: they are in shared memory.

    Raises:
        ValueError: the search does not fit; the message names sizes that do.
    """
    if not 1 <= beam <= MAX_BEAM:
        raise ValueError(f"beam {beam} is not within 1 .. {MAX_BEAM}, the beams that fit on chip")
    slots = next(shape for shape in SHAPES if shape >= beam)
    threads = 256 if slots <= 64 else 512
    warps = threads // 32
    fixed = slots * (_PREFIX_BYTES + _FRAME_BYTES) + warps * 16 + 256 * 4 + 16
    columns = max(labels + 2, order)
    smem_bytes = -(-fixed // 8) * 8 + 2 * labels * 4 + beam * -(-labels // 32) * 4 + 2 * labels * 2
    if smem_bytes > smem_bytes_per_block:
        raise ValueError(
            f"beam {beam} x {labels} labels need {smem_bytes} B of shared memory, a block has {smem_bytes_per_block}: "
            "reduce the beam or the alphabet"
        )
    table_bytes = 8 * beam * columns
    outside = smem_bytes + table_bytes > smem_bytes_per_block
    source = translation_unit(
        "ctc/beam.cuh",
        (*_SEARCH, *_LEXICON, *_GRAMS),
        f"""    const ds2::Search search{{{names(_SEARCH)}}};
    const ds2::Lexicon lexicon{{{names(_LEXICON)}}};
    const ds2::Grams grams{{{names(_GRAMS)}}};
    ds2::BeamSearch<Shape, ds2::Unit::{unit.upper()}>(search, lexicon, grams, shared).run();
""",
        ahead=f"""using Shape = ds2::BeamShape<{slots}>;
static_assert(Shape::THREADS == {threads}, "beam.py and beam.cuh disagree on threads");
static_assert(sizeof(ds2::BeamMemory<Shape>) <= {fixed}, "beam.py and beam.cuh disagree on shared memory");
""",
        launch_bounds="Shape::THREADS, 1",
        alignment=16,
    )
    launch = Launch(source, threads, grid=utterances, smem_bytes=smem_bytes + (0 if outside else table_bytes))
    return launch, columns if outside else 0


def why_not(beam: int, labels: int, frames: int, order: int, device: torch.device) -> str | None:
    """Say why the kernel cannot run a search over T frames on a device; None if it can. Arguments as of `plan`."""
    if reason := why_no_plan(device, lambda smem_bytes: plan(beam, labels, order, "none", smem_bytes)):
        return reason
    if frames * beam >= 2**31:
        return f"{frames} frames x beam {beam} are more than 2^31 prefixes: cut the recording"
    return None


def search(
    log_probs: Tensor,
    frames: Tensor,
    beam: int,
    weights: SearchWeights,
    lexicon: LexiconTables,
    grams: NGramTables | None,
    previous: PrefixTables | None = None,
    slots: Tensor | None = None,
    roots: Tensor | None = None,
) -> PrefixTables:
    """Search all utterances (Hannun et al. 2014, "First-pass large vocabulary continuous speech recognition using
    bi-directional recurrent DNNs", algorithm 1), on torch's current stream, without waiting for it.

    Args:
        log_probs: (T, B, V) float32 contiguous, on the GPU; labels at -inf are not followed.
        frames: (B,) int64 on the GPU, at most T each.
        beam: K, prefixes that survive each frame.
        weights: of the scores.
        lexicon: of the labels.
        grams: the language model, or None.
        previous: tables after the previous frames, which are updated in place (but ``grown``); None: utterances start.
        slots: (B,) int32 on the GPU, the tables' row of each utterance, all different; None: in order.
        roots: (rows,) int32 on the GPU, nodes of the trie at which an utterance's words start; None: 1.

    Returns:
        The tables after the last frame.

    Raises:
        ValueError: as ``plan``, or a device that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: the driver's or compiler's error, with shape and GPU.
    """
    check_read("log_probs", log_probs, torch.float32, log_probs)
    check_read("frames", frames, torch.int64, log_probs)
    length, batch, labels = log_probs.shape
    device = log_probs.device
    unit = "none" if grams is None else "word" if grams.label_ids is None else "label"
    index = device_index(device)
    launch, columns = plan(beam, labels, grams.order if grams else 0, unit, runtime.smem_bytes_per_block(index), batch)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    grown = new(batch, length, beam, 2, dtype=torch.int32)
    if previous is None:
        prefixes = PrefixTables(
            halves=new(2, batch, beam, dtype=torch.float64),
            names=new(batch, beam, 4, dtype=torch.int64),
            integers=new(batch, beam, 4, dtype=torch.int64),
            floats=new(batch, beam, 2, dtype=torch.float64),
            grown=grown,
        )
    else:
        prefixes = replace(previous, grown=grown)
    table = new(batch, beam, columns, dtype=torch.float64) if columns else None
    arguments: list[Any] = [log_probs, frames, slots, roots, prefixes.grown]
    arguments += [prefixes.halves, prefixes.names, prefixes.integers, prefixes.floats, table]
    arguments += [length, batch, len(prefixes.names), labels, beam, grams.start if grams else 0, int(weights.closed)]
    arguments += [weights.alpha, weights.beta, weights.unknown_score, weights.prune]
    sizes = {"longest": lexicon.characters.shape[1], "width": lexicon.children.shape[1]}
    arguments += [sizes[name] if name in sizes else getattr(lexicon, name) for _, name in _LEXICON]
    arguments += [*_NO_GRAMS.values()] if grams is None else [getattr(grams, name) for name in _NO_GRAMS]
    run(launch, arguments, lambda: f"beam search, (T, B, V) = {tuple(log_probs.shape)}, beam {beam}", device)
    return prefixes


def trace_labels(entries: Tensor, grown: Tensor) -> Tensor:
    """Follow entries to the root, and return the labels on the way.

    Args:
        entries: (B, R) int64 contiguous, on the GPU: the last column of `PrefixTables.names`.
        grown: of the same tables.

    Returns:
        (B, R, T) int16 labels, the last label first, and -1 after the first label; the rest is not defined.

    Raises:
        RuntimeError: as ``search``.
    """
    batch, count = entries.shape
    length, beam = grown.shape[1:3]
    labels = torch.empty(batch, count, length, dtype=torch.int16, device=entries.device)
    arguments: list[Any] = [entries, grown, labels, count, batch, length * beam, length]
    launch = Launch(TRACE, _TRACE_THREADS, grid=-(-batch * count // _TRACE_THREADS))
    run(launch, arguments, lambda: f"trace of {batch} x {count} hypotheses", entries.device)
    return labels


def append_labels(
    frames: Tensor, slots: Tensor, prefixes: PrefixTables, labels: Tensor, counts: Tensor, max_removed: int
) -> Tensor:
    """Append the labels of a chunk to the labels of each prefix, and remove the first labels that all prefixes share.

    Args:
        frames: (B,) int64 on the GPU, of the chunk.
        slots: (B,) int32 on the GPU, rows of the tables.
        prefixes: the tables after the chunk, and its `grown`.
        labels: (rows, K, P) int16, updated; P must have space for the labels of the chunk.
        counts: (rows, K) int32, updated.
        max_removed: M, the most labels to remove.

    Returns:
        (B, M + 2) int16: the number of removed labels, the longest remaining prefix, the removed labels.

    Raises:
        RuntimeError: as ``search``.
    """
    (batch, length, beam, _), (rows, _, capacity) = prefixes.grown.shape, labels.shape
    at = slots.long()
    removed = torch.empty(batch, max_removed + 2, dtype=torch.int16, device=labels.device)
    arguments: list[Any] = [frames, slots, prefixes.grown, prefixes.halves, prefixes.names]
    arguments += [labels.index_select(0, at), counts.index_select(0, at), labels, counts, removed]
    arguments += [length, rows, beam, capacity, max_removed]
    launch = Launch(APPEND, _APPEND_THREADS, grid=batch, smem_bytes=4 * (beam + max_removed))
    run(launch, arguments, lambda: f"labels of {batch} x {beam} prefixes", labels.device)
    return removed
