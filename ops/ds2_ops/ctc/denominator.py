"""The denominator of CTC-CRF (lattice-free MMI with the topology of CTC): sums over all label sequences, and gradients.

Xiang and Ou 2019, "CRF-based single-stage acoustic modeling with CTC topology". The denominator of an utterance is

    sum over label sequences l of  w(l)  sum over paths of CTC that collapse to l of  prod_t y_t(path_t)

with weights w from a graph, such as an n-gram model. On a GPU two kernels compute it, elsewhere products with sparse
matrices. Both scale probabilities by a power of two a frame, which rounds nothing.

Shape letters: T frames, B utterances, V labels (0 is the blank), N nodes, E arcs, P nodes padded to whole warps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2_ops.checks import check_read, why_no_plan
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, Source, device_index, names, parameters, run, translation_unit

MOST_THREADS = 1024
_SHARES_THREADS = 256
_WARP = 32
_SHARED_FROM = 32  # arcs of a row from which on lanes share them
_BANKS = 32  # of shared memory, 4 bytes wide
_CANDIDATES = 8  # arcs of a lane that are compared for a step
_INDICES = 2**16  # of 16-bit indices in csrc/ctc/denominator.cuh
_ARCS = "const int* {0}_first, const unsigned* {0}_words"
# struct Graph of csrc/ctc/denominator.cuh
_GRAPH = parameters(
    f"""const int* labels, const float* ends, {_ARCS.format("arcs")}, {_ARCS.format("children")},
    const int* parent_rows, const int* parent_numbers, int start, int parents, const int* mirrored_labels,
    const float* mirrored_ends, {_ARCS.format("mirrored")}, const unsigned* same_words,
    const unsigned* parent_words"""
)
# struct Sums
_SUMS = parameters(
    """const float* log_probs, const long long* frames, float* alpha, float* beta, int* alpha_exponent,
    int* beta_exponent, float* mantissa, int* exponent, int length, int batch, int vocabulary, int rows,
    int smem_bytes"""
)
# struct Shares
_SHARES_OF = parameters(
    """const float* log_probs, const long long* frames, const float* alpha, const float* beta,
    const int* alpha_exponent, const int* beta_exponent, const float* mantissa, const int* exponent,
    const float* grad_log_sums, float* grad_logits, const int* of_label, const unsigned short* forward_row,
    const unsigned short* backward_row, int length, int batch, int vocabulary, int rows"""
)
SHARES = translation_unit(
    "ctc/denominator.cuh",
    _SHARES_OF,
    f"    ds2::shares_of_frame(ds2::Shares{{{names(_SHARES_OF)}}}, reinterpret_cast<float*>(shared));\n",
    alignment=16,
    threads=("SHARES_THREADS", _SHARES_THREADS),
)


@dataclass(frozen=True)
class LabelGraph:
    """Weighted label sequences: a label sequence is weighted by the sum over its ways from the start to an end.

    A way takes an arc for each label. From a node with a parent it may take an arc of the parent instead, times the
    share. All arrays are on the CPU.

    Attributes:
        labels: (N,) int64, the label of all arcs into each node; 0: no arc leads there.
        ends: (N,) float64 weight of ending in each node.
        sources, targets: (E,) int64, the nodes of each arc.
        weights: (E,) float64, as `round_weights` returns them; shares likewise.
        parents: (N,) int64; the node itself where there is none. A parent has none and has the same label.
        shares: (N,) float64, 0 where there is none.
        start: a node.
    """

    labels: NDArray[np.int64]
    ends: NDArray[np.float64]
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float64]
    parents: NDArray[np.int64]
    shares: NDArray[np.float64]
    start: int

    @property
    def parent_nodes(self) -> NDArray[np.int64]:
        """(M,) int64 ascending, the nodes that are parents."""
        return np.unique(self.parents[self.shares > 0])


def round_weights(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to 12 significant bits, from 2^-31 to 2: what a 16-bit word of the kernels holds."""
    mantissas, exponents = np.frexp(weights.clip(2.0**-31, 2.0 - 2.0**-11))
    rounded: NDArray[np.float64] = np.ldexp(np.round(mantissas * 4096) / 4096, exponents)
    return rounded


def _words(weights: NDArray[np.float64], index: NDArray[Any]) -> NDArray[np.int32]:
    """Five bits of exponent and eleven of mantissa of each weight, above 16 bits of index.

    Raises:
        ValueError: weights are not rounded.
    """
    if not np.array_equal(round_weights(weights), weights):
        raise ValueError("weights of a graph must be rounded with round_weights")
    mantissas, exponents = np.frexp(weights)
    bits = (exponents.astype(np.uint32) + 30 << 11) + np.round((2 * mantissas - 1) * 2048).astype(np.uint32)
    words: NDArray[np.int32] = (bits << 16 | index.astype(np.uint32)).view(np.int32)
    return words


def _sliced_arcs(
    rows: NDArray[Any], index: NDArray[Any], weights: NDArray[Any], count: int, nothing: int, warps: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Place arcs in slices of 32 rows: struct Arcs of csrc/ctc/denominator.cuh.

    Args:
        rows: (E,), each below `count`.
        index: (E,) places that the arcs read.
        weights: (E,).
        nothing: the place, which holds 0, that lanes without an arc read.
        warps: of a block. Lanes share the arcs of the first row of each warp where these are many; 0: never.

    Returns:
        (slices + 1,), then (warps + 1,) of rows whose arcs lanes share; and words, bits of the weight above what the
        arc reads.
    """
    order = np.lexsort((index, rows))
    rows, index, weights = rows[order], index[order], weights[order]
    degrees = np.bincount(rows, minlength=count)
    number = np.arange(len(rows)) - (np.cumsum(degrees) - degrees)[rows]  # of an arc in its row
    together = np.zeros(count, bool)
    together[: warps * _WARP : _WARP] = degrees[: warps * _WARP : _WARP] > _SHARED_FROM
    lengths = np.where(together, 0, degrees).reshape(-1, _WARP).max(1, initial=0)
    first = np.concatenate(([0], np.cumsum(lengths * _WARP)))
    of_warps = np.where(together, degrees, 0)[: warps * _WARP : _WARP]
    shared = first[-1] + np.concatenate(([0], np.cumsum(of_warps)))
    lanes_share = together[rows]
    step = _steps(rows[~lanes_share], index[~lanes_share], lengths)
    at = np.empty(len(rows), np.int64)
    at[~lanes_share] = (first[rows // _WARP] + rows % _WARP)[~lanes_share] + step * _WARP
    at[lanes_share] = shared[rows[lanes_share] // _WARP] + number[lanes_share]
    words = np.full(shared[-1], nothing, np.int32)
    words[at] = _words(weights, index)
    first = np.concatenate((first, shared)) if warps else first
    return first.astype(np.int32), words


def _steps(rows: NDArray[Any], index: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Choose when each lane takes each of its arcs, so that the lanes of a step read different banks of shared memory.

    Greedily, a step at a time, lanes with most arcs first; a lane that has time to spare waits rather than collides.

    Args:
        rows: (E,) ascending.
        index: (E,) 4-byte words that arcs read.
        lengths: (slices,) steps of each slice.

    Returns:
        (E,) steps; those of a row differ.
    """
    steps = np.zeros(len(rows), np.int64)
    numbers, reads = rows.tolist(), index.tolist()
    begins = np.searchsorted(rows, np.arange(len(lengths) + 1) * _WARP).tolist()
    for piece, length in enumerate(lengths.tolist()):
        remaining: dict[int, list[int]] = {}
        for arc in range(begins[piece], begins[piece + 1]):
            remaining.setdefault(numbers[arc], []).append(arc)
        for step in range(length):
            banks, seen, most = [0] * _BANKS, set[int](), 1
            for arcs in sorted(remaining.values(), key=len, reverse=True):
                costs = [0 if reads[arc] in seen else banks[reads[arc] % _BANKS] + 1 for arc in arcs[:_CANDIDATES]]
                least = min(costs, default=0)
                if not arcs or (least > most and len(arcs) < length - step):
                    continue
                arc = arcs.pop(costs.index(least))
                steps[arc] = step
                most = max(most, least)
                if reads[arc] not in seen:
                    seen.add(reads[arc])
                    banks[reads[arc] % _BANKS] += 1
    return steps


@dataclass(frozen=True)
class _GraphTables:
    """A graph as the kernels read it: struct Graph of csrc/ctc/denominator.cuh, and the labels' nodes of Shares."""

    rows: int  # P
    arguments: tuple[Any, ...]  # of `_GRAPH`
    by_label: tuple[Tensor, ...]  # of_label, forward_row and backward_row of `_SHARES_OF`

    @classmethod
    def of(cls, graph: LabelGraph, vocabulary: int, device: torch.device) -> _GraphTables:
        nodes, parents = len(graph.labels), graph.parent_nodes
        families = np.bincount(graph.parents[graph.shares > 0], minlength=nodes)
        parents = parents[np.argsort(-families[parents], kind="stable")]
        rows = _padded(nodes)
        parent_count = _padded(len(parents))
        padding = rows + parent_count
        same = graph.labels[graph.sources] == graph.labels[graph.targets]
        warps = min(rows, MOST_THREADS) // _WARP
        forward = _row_of(np.bincount(graph.targets, minlength=nodes), warps)
        backward = _row_of(np.bincount(graph.sources[~same], minlength=nodes), warps)
        column = np.full(nodes, -1)
        column[parents] = np.arange(len(parents))
        # A node that is a parent sends what its children give it too.
        sent = np.where(column >= 0, rows + column, forward)[graph.sources]
        arcs = _sliced_arcs(forward[graph.targets], sent + same * (padding + 1), graph.weights, rows, padding, warps)
        own, parent = np.flatnonzero(graph.shares > 0), column[graph.parents[graph.shares > 0]]
        children = _sliced_arcs(parent, forward[own], graph.shares[own], parent_count, padding)
        parent_rows = np.zeros(parent_count, np.int32)
        parent_rows[: len(parents)] = forward[parents]
        start, end = backward[graph.sources[~same]], backward[graph.targets[~same]]
        mirrored = _sliced_arcs(start, end, graph.weights[~same], rows, rows, warps)
        same_words = _words(graph.weights[same], backward[graph.targets[same]])
        parent_words = _words(graph.shares[own], parent)

        def by_row(row_of: NDArray[np.int64], values: NDArray[Any], dtype: Any, padding: int = 0) -> Tensor:
            placed = np.full(rows, padding, dtype)
            placed[row_of] = values
            return _on(device, placed)

        arguments = (
            by_row(forward, graph.labels, np.int32),
            by_row(forward, graph.ends, np.float32),
            *(_on(device, values) for values in (*arcs, *children, parent_rows)),
            by_row(backward, column, np.int32, -1),
            int(forward[graph.start]),
            parent_count,
            by_row(backward, graph.labels, np.int32),
            by_row(backward, graph.ends, np.float32),
            *(_on(device, values) for values in mirrored),
            by_row(backward[graph.sources[same]], same_words, np.int32, rows),
            by_row(backward[own], parent_words, np.int32, parent_count),
        )
        by_label = np.argsort(graph.labels, kind="stable")
        by_label = by_label[graph.labels[by_label] > 0]
        of_label = np.searchsorted(graph.labels[by_label], np.arange(vocabulary + 1)).astype(np.int32)
        rows_of: list[NDArray[Any]] = [row_of[by_label].astype(np.uint16) for row_of in (forward, backward)]
        return cls(rows, arguments, tuple(_on(device, values) for values in [of_label, *rows_of]))


def _row_of(degrees: NDArray[Any], warps: int) -> NDArray[np.int64]:
    """(N,) rows of nodes: those of the highest degrees, whose arcs lanes share, a warp each; then the others in order.

    Warps take their slices forwards and backwards in turns, so that each has as many arcs.
    """
    nodes = len(degrees)
    wide = min(warps, int((degrees > _SHARED_FROM).sum()), -(-nodes // _WARP))
    firsts = np.arange(wide) * _WARP
    slices = np.arange(-(-nodes // _WARP))
    for begin in range(warps, len(slices), 2 * warps):
        slices[begin : begin + warps] = slices[begin : begin + warps][::-1].copy()
    in_order = (slices[:, None] * _WARP + np.arange(_WARP)).ravel()
    others = in_order[~np.isin(in_order, firsts)]
    rows = np.empty(nodes, np.int64)
    rows[np.argsort(-degrees, kind="stable")] = np.concatenate((firsts, others))[:nodes]
    return rows


def _padded(count: int) -> int:
    return -(-count // _WARP) * _WARP


def _on(device: torch.device, values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(device)


def plan(
    nodes: int, parents: int, arcs: int, vocabulary: int, smem_bytes_per_block: int, utterances: int = 1
) -> Launch:
    """Choose the launch that sums over a graph of `nodes`, of which `parents` are parents, with `arcs` in slices.

    Raises:
        ValueError: the graph is too large; the message names sizes that do.
    """
    rows, parents = _padded(nodes), _padded(parents)
    offsets = rows // _WARP + MOST_THREADS // _WARP + 2
    smem_bytes = 4 * (2 * vocabulary + _WARP + 2 + max(2 * (rows + parents + 1), rows + 2 * (parents + 2)) + offsets)
    if smem_bytes > smem_bytes_per_block or 2 * (rows + parents + 1) > _INDICES or vocabulary > _INDICES // 2:
        most = min((smem_bytes_per_block // 4 - 2 * vocabulary - _WARP) // 2, _INDICES // 2) - parents - offsets
        raise ValueError(
            f"a graph of {nodes} nodes over {vocabulary} labels needs {smem_bytes} B of shared memory, a block has "
            f"{smem_bytes_per_block}, and 16-bit numbers: at most about {most} nodes fit"
        )
    threads = min(rows, MOST_THREADS)
    smem_bytes = min(smem_bytes + 4 * arcs, smem_bytes_per_block)  # arcs that do not fit are read from global memory
    return Launch(_sums_source(threads, -(-rows // threads)), threads, grid=2 * utterances, smem_bytes=smem_bytes)


@cache
def _sums_source(threads: int, rows: int) -> Source:
    arguments = names(_GRAPH).split(", ")
    for kind in ("arcs", "children", "mirrored"):  # struct Arcs
        at = arguments.index(f"{kind}_first")
        arguments[at : at + 2] = [f"{{{', '.join(arguments[at : at + 2])}}}"]
    return translation_unit(
        "ctc/denominator.cuh",
        (*_GRAPH, *_SUMS),
        f"""    const ds2::Graph graph{{{", ".join(arguments)}}};
    const ds2::Sums sums{{{names(_SUMS)}}};
    ds2::DenominatorSums<{threads}, {rows}>(graph, sums, reinterpret_cast<float*>(shared)).run();
""",
        launch_bounds=f"{threads}, 1",
        alignment=16,
    )


class Denominator:
    """The denominators of utterances, differentiable in the logits.

    Args:
        graph: of label sequences.
        vocabulary: V, labels of the network with the blank.
    """

    def __init__(self, graph: LabelGraph, vocabulary: int) -> None:
        self.graph, self.vocabulary = graph, vocabulary
        nodes = len(graph.labels)
        arcs = 2 * (len(graph.weights) + nodes)  # padded to slices, and other words
        self._plan = partial(plan, nodes, len(graph.parent_nodes), arcs, vocabulary)
        self.tables = cache(partial(_GraphTables.of, graph, vocabulary))  # made once a device
        self.matrices = cache(partial(_Matrices.of, graph, vocabulary))  # and dtype

    def why_not(self, device: torch.device) -> str | None:
        """Say why the kernels cannot sum over the graph on a device; None if they can."""
        return why_no_plan(device, self._plan)

    def __call__(self, logits: Tensor, frames: Tensor) -> Tensor:
        """The logarithm of the denominator of each utterance.

        The kernels run on torch's current stream without host synchronisation, and can be captured in a CUDA graph
        once they have run. Every run gives the same bits.

        Args:
            logits: (T, B, V) of any float dtype; sums are float32, or float64 by products where the logits are.
            frames: (B,) int64, 0 to T, on the same device.

        Returns:
            (B,) float32 or float64 in nats.

        Raises:
            TypeError, ValueError: the dtype or device of frames is another.
            RuntimeError: the driver's or compiler's error, with shape and GPU.
        """
        check_read("frames", frames, torch.int64, logits)
        kernels = logits.dtype != torch.float64 and self.why_not(logits.device) is None
        function = _ByKernels if kernels else _ByProducts
        log_sums: Tensor = function.apply(logits, frames, self)  # type: ignore[no-untyped-call]
        return log_sums


class _ByKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, frames: Tensor, denominator: Denominator) -> Tensor:
        log_probs = logits.detach().float().log_softmax(-1).contiguous()
        length, batch, _ = log_probs.shape
        device, tables = log_probs.device, denominator.tables(log_probs.device)
        alpha, beta = torch.empty(2, batch, length, tables.rows, dtype=torch.float32, device=device)
        exponents = torch.empty(2, batch, length, dtype=torch.int32, device=device)
        mantissa = torch.empty(batch, dtype=torch.float32, device=device)
        exponent = torch.empty(batch, dtype=torch.int32, device=device)
        results = [alpha, beta, *exponents, mantissa, exponent]
        frames = frames.contiguous()
        launch = denominator._plan(runtime.smem_bytes_per_block(device_index(device)), batch)
        arguments = [*tables.arguments, log_probs, frames, *results, length, batch, log_probs.shape[2]]
        _run(launch, [*arguments, tables.rows, launch.smem_bytes], log_probs, tables.rows)
        ctx.save_for_backward(log_probs, frames, *results)
        ctx.tables, ctx.dtype = tables, logits.dtype
        return mantissa.log() + exponent.float() * float(np.log(2))

    @staticmethod
    def backward(ctx: Any, grad_log_sums: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, tables = ctx.saved_tensors[0], ctx.tables
        grad = torch.empty_like(log_probs)
        blocks = log_probs.shape[0] * log_probs.shape[1]
        launch = Launch(SHARES, _SHARES_THREADS, grid=blocks, smem_bytes=4 * (log_probs.shape[2] + 2 * tables.rows))
        arguments = [*ctx.saved_tensors, grad_log_sums.float().contiguous(), grad, *tables.by_label]
        arguments += [*log_probs.shape, tables.rows]
        _run(launch, arguments, log_probs, tables.rows)
        return grad.to(ctx.dtype), None, None


def _run(launch: Launch, arguments: Sequence[Any], log_probs: Tensor, rows: int) -> None:
    shape = tuple(log_probs.shape)
    run(launch, arguments, lambda: f"denominator of CTC-CRF, (T, B, V) = {shape}, {rows} nodes", log_probs.device)


@dataclass(frozen=True)
class _Matrices:
    """A graph as sparse matrices.

    A vector of nodes is (N,). A vector of sources (2 N + 2 M,) has the sum of each node, then that of its paths that
    end in a blank; then both again for the M parents, with what their children give them.
    """

    labels: Tensor  # (N,) int64
    ends: Tensor  # (N, 1)
    arcs: Tensor  # (N, 2 N + 2 M) of each target, sparse
    children: Tensor  # (2 M, 2 N): what parents have, sparse
    others: Tensor  # (N, N) of each source, arcs to other labels and the parent's, sparse
    all: Tensor  # (N, N) likewise, arcs to all labels
    by_label: Tensor  # (V, N): one where the node has the label, none for the blank, sparse

    @classmethod
    def of(cls, graph: LabelGraph, vocabulary: int, device: torch.device, dtype: torch.dtype) -> _Matrices:
        nodes, parents = len(graph.labels), graph.parent_nodes
        count = len(parents)
        column = np.full(nodes, -1)
        column[parents] = np.arange(count)
        same = graph.labels[graph.sources] == graph.labels[graph.targets]
        is_parent = column >= 0
        sent = np.where(is_parent, 2 * nodes + column, np.arange(nodes))[graph.sources]
        sent = sent + np.where(same, np.where(is_parent[graph.sources], count, nodes), 0)
        own = np.flatnonzero(graph.shares > 0)
        to = np.concatenate((np.arange(count), column[graph.parents[own]]))
        come = np.concatenate((parents, own))
        shares = np.concatenate((np.ones(count), graph.shares[own]))
        identity = np.arange(nodes)
        back_off = (np.concatenate((identity, own)), np.concatenate((identity, graph.parents[own])))
        back_off_weights = np.concatenate((np.ones(nodes), graph.shares[own]))

        def sparse(rows: NDArray[Any], columns: NDArray[Any], weights: NDArray[Any], *shape: int) -> Tensor:
            indices, values = torch.from_numpy(np.stack((rows, columns))), torch.from_numpy(weights.astype(np.float64))
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()

        def by_rows(matrix: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
                return matrix.coalesce().to(device, dtype).to_sparse_csr()

        also = sparse(*back_off, back_off_weights, nodes, nodes)

        def mirrored(chosen: NDArray[np.bool_]) -> Tensor:
            own_arcs = sparse(graph.sources[chosen], graph.targets[chosen], graph.weights[chosen], nodes, nodes)
            return by_rows(torch.sparse.mm(also, own_arcs))

        labelled = np.flatnonzero(graph.labels > 0)
        return cls(
            torch.from_numpy(graph.labels).to(device),
            torch.from_numpy(graph.ends).to(device, dtype)[:, None],
            by_rows(sparse(graph.targets, sent, graph.weights, nodes, 2 * nodes + 2 * count)),
            by_rows(sparse(
                np.concatenate((to, count + to)), np.concatenate((come, nodes + come)), np.tile(shares, 2),
                2 * count, 2 * nodes,
            )),
            mirrored(~same),
            mirrored(np.ones_like(same)),
            by_rows(sparse(graph.labels[labelled], labelled, np.ones(len(labelled)), vocabulary, nodes)),
        )  # fmt: skip


class _ByProducts(torch.autograd.Function):
    """As the kernels, by a few products with sparse matrices a frame; (N, B) instead of (B, P)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, frames: Tensor, denominator: Denominator) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probs = logits.detach().to(dtype).log_softmax(-1)
        probs = log_probs.exp().transpose(1, 2).contiguous()  # (T, V, B)
        matrices = denominator.matrices(logits.device, dtype)
        length, _, batch = probs.shape
        nodes = len(matrices.labels)
        label_part = probs.new_zeros(nodes, batch)
        blank_part = probs.new_zeros(nodes, batch)
        blank_part[denominator.graph.start] = 1
        exponent = torch.zeros(batch, dtype=torch.int32, device=probs.device)
        alpha, exponents = probs.new_empty(length, nodes, batch), exponent.new_empty(length, batch)
        for frame in range(length):
            own = torch.cat((label_part + blank_part, blank_part))
            came = matrices.arcs @ torch.cat((own, matrices.children @ own))
            label = (label_part + came) * probs[frame].index_select(0, matrices.labels)
            blank = own[:nodes] * probs[frame, :1]
            runs = frame < frames
            down = torch.where(runs, torch.frexp((label + blank).sum(0)).exponent, 0)
            label_part = torch.where(runs, torch.ldexp(label, -down), label_part)
            blank_part = torch.where(runs, torch.ldexp(blank, -down), blank_part)
            exponent = exponent + down
            alpha[frame], exponents[frame] = label_part, exponent
        total = ((label_part + blank_part) * matrices.ends).sum(0)
        ctx.save_for_backward(probs, frames, alpha, exponents, total, exponent)
        ctx.matrices, ctx.dtype = matrices, logits.dtype
        return total.log() + exponent.to(dtype) * float(np.log(2))

    @staticmethod
    def backward(ctx: Any, grad_log_sums: Tensor) -> tuple[Tensor | None, ...]:
        probs, frames, alpha, exponents, total, all_exponent = ctx.saved_tensors
        matrices = ctx.matrices
        length, _, batch = probs.shape
        grad = torch.zeros_like(probs)
        ends = matrices.ends.expand(-1, batch)
        label_part, blank_part = torch.zeros_like(ends), torch.zeros_like(ends)
        exponent = torch.zeros_like(all_exponent)
        for frame in range(length - 1, -1, -1):
            runs, at_end = frame < frames, frame == frames - 1
            label_part = torch.where(at_end, ends, label_part)
            blank_part = torch.where(at_end, ends, blank_part)
            up = exponents[frame] + exponent - all_exponent
            scaled = torch.ldexp(alpha[frame], up // 2) * torch.ldexp(label_part / total, up - up // 2)
            shares = matrices.by_label @ scaled
            shares[0] = 1 - shares.sum(0)
            grad[frame] = torch.where(runs, (shares - probs[frame]) * grad_log_sums, 0)
            sent = label_part * probs[frame].index_select(0, matrices.labels)
            blank_sent = blank_part * probs[frame, :1]
            label = sent + blank_sent + matrices.others @ sent
            blank = blank_sent + matrices.all @ sent
            down = torch.where(runs, torch.frexp((label + blank).sum(0)).exponent, 0)
            label_part = torch.where(runs, torch.ldexp(label, -down), label_part)
            blank_part = torch.where(runs, torch.ldexp(blank, -down), blank_part)
            exponent = exponent + down
        return grad.transpose(1, 2).to(ctx.dtype), None, None


def denominator_reference(
    logits: Tensor, frames: Tensor, weights: Tensor, following: Tensor, ends: Tensor, start: int
) -> Tensor:
    """Sum over all label sequences that a deterministic automaton weights, differentiable by autograd, for tests.

    Nothing is scaled: for as many frames as float64 holds the product of. S states.

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
