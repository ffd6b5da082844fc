"""Launches of the CTC loss and its gradient. Needs no framework.

Shape letters: T frames, B utterances, V labels (0 is the blank), L labels of the longest target.
"""

from ds2_ops.jit.launch import Launch, Parameters, Source, names, parameters, translation_unit

THREADS = 256
_TARGETS = "const float* log_probs, const long long* frames, const long long* labels, const long long* sizes"
_SHAPE = "int length, int batch, int vocabulary, int longest, float delay_penalty"
# structs Paths and Slopes of csrc/ctc/loss.cuh
_PATHS_OF = parameters(f"{_TARGETS}, float* alpha, float* beta, float* losses, {_SHAPE}")
_SLOPES_OF = parameters(
    f"""{_TARGETS}, const float* alpha, const float* beta, const float* losses, const float* grad_losses,
    float* grad_logits, {_SHAPE}"""
)


def _source(function: str, struct: str, members: Parameters) -> Source:
    return translation_unit(
        "ctc/loss.cuh",
        members,
        f"    ds2::{function}(ds2::{struct}{{{names(members)}}}, reinterpret_cast<float*>(shared));\n",
        alignment=16,
        threads=("LOSS_THREADS", THREADS),
    )


_PATHS = _source("sum_paths", "Paths", _PATHS_OF)
SLOPES = _source("slope_of_frame", "Slopes", _SLOPES_OF)


def plan(longest: int, vocabulary: int, smem_bytes_per_block: int, utterances: int = 1) -> Launch:
    """Choose the launch that sums over paths, for targets of up to `longest` of `vocabulary` labels.

    Raises:
        ValueError: the scores of a frame do not fit into a block's shared memory.
    """
    smem_bytes = (2 * vocabulary + 3 * (2 * longest + 1)) * 4
    if smem_bytes > smem_bytes_per_block:
        raise ValueError(
            f"{longest} labels of {vocabulary} need {smem_bytes} B of shared memory, a block has {smem_bytes_per_block}"
        )
    return Launch(_PATHS, THREADS, grid=2 * utterances, smem_bytes=smem_bytes)


def slopes(length: int, utterances: int, longest: int) -> Launch:
    """Make the launch of the gradient, a block a frame of an utterance."""
    return Launch(SLOPES, THREADS, grid=length * utterances, smem_bytes=(3 * longest + 1) * 4)
