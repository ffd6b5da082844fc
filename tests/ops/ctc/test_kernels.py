"""Decoding kernels without a GPU: they compile without spills, and what does not fit is named."""

import itertools

import pytest
import torch
from ds2_ops.ctc import align, beam, loss, paths
from ds2_ops.jit import runtime
from support.compiled import report
from support.kernel_on_cpu import H200_SMEM_BYTES

QUICK = [(32, "word"), (128, "label"), (512, "word")]
ALL = [(slots, unit) for slots in beam.SHAPES for unit in ("none", "word", "label")]


@pytest.mark.parametrize(
    ("slots", "unit"), [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow) for each in ALL]
)
def test_every_shape_compiles_without_spills(slots: int, unit: str) -> None:
    launch, _ = beam.plan(slots, 29, 4, unit, H200_SMEM_BYTES)
    compiled = report(launch.source.text)
    assert compiled.local_bytes == 0
    assert compiled.registers * launch.threads <= 65536


@pytest.mark.parametrize("beams", [1, 32, 33, 128, 512])
@pytest.mark.parametrize("labels", [2, 29, 64, 1000])
def test_scores_stay_on_chip_where_they_fit(beams: int, labels: int) -> None:
    launch, columns = beam.plan(beams, labels, 4, "word", H200_SMEM_BYTES)
    assert launch.smem_bytes <= H200_SMEM_BYTES
    assert columns in (0, max(labels + 2, 4))
    if columns:
        assert launch.smem_bytes + 8 * beams * columns > H200_SMEM_BYTES
    if beams <= 128 and labels <= 64:
        assert columns == 0


def test_a_label_takes_a_score_and_a_bit_a_prefix_and_its_place_in_two_rows() -> None:
    smem_bytes = [beam.plan(64, labels, 4, "word", H200_SMEM_BYTES)[0].smem_bytes for labels in (32, 33, 34)]
    of_label, new_word_of_bits = 64 * 8 + 2 * (4 + 2), 64 * 4
    assert [b - a for a, b in itertools.pairwise(smem_bytes)] == [of_label + new_word_of_bits, of_label]


@pytest.mark.parametrize(
    ("beams", "labels", "message"),
    [(0, 29, "beam 0 is not within 1 .. 512"), (513, 29, "beam 513"), (512, 3000, "3000 labels need .* shared memory")],
)
def test_searches_that_do_not_fit_are_named(beams: int, labels: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam.plan(beams, labels, 4, "word", H200_SMEM_BYTES)


def test_targets_that_do_not_fit_are_named() -> None:
    largest = (H200_SMEM_BYTES // 8 - 1) // 2
    assert align.plan(largest, H200_SMEM_BYTES).smem_bytes <= H200_SMEM_BYTES
    with pytest.raises(ValueError, match=f"{largest + 1} labels need"):
        align.plan(largest + 1, H200_SMEM_BYTES)
    assert paths.plan(9000, 29, H200_SMEM_BYTES).smem_bytes <= H200_SMEM_BYTES
    with pytest.raises(ValueError, match="9700 labels of 29 need"):
        paths.plan(9700, 29, H200_SMEM_BYTES)


def test_devices_that_cannot_run_them_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert "need a CUDA GPU" in str(beam.why_not(32, 29, 100, 4, torch.device("cpu")))
    assert "need a CUDA GPU" in str(align.why_not(10, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 7.5" in str(beam.why_not(32, 29, 100, 4, cuda))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(runtime, "smem_bytes_per_block", lambda index: H200_SMEM_BYTES)
    monkeypatch.setattr(runtime, "why_no_kernel", lambda index: "the driver is too old")
    assert beam.why_not(32, 29, 100, 4, cuda) == align.why_not(10, cuda) == "the driver is too old"
    monkeypatch.setattr(runtime, "why_no_kernel", lambda index: None)
    assert beam.why_not(32, 29, 100, 4, cuda) is None
    assert "beam 600" in str(beam.why_not(600, 29, 100, 4, cuda))
    assert "cut the recording" in str(beam.why_not(512, 29, 2**22, 4, cuda))
    assert align.why_not(300, cuda) is None
    assert "100000 labels" in str(align.why_not(100_000, cuda))
    assert "need a CUDA GPU" in str(loss.why_not(10, 29, torch.device("cpu")))
    assert loss.why_not(300, 29, cuda) is None
    assert "100000 labels of 29" in str(loss.why_not(100_000, 29, cuda))


def test_tensors_that_kernels_would_read_as_another_type_are_refused() -> None:
    log_probs, lengths, labels = torch.zeros(5, 2, 4), torch.tensor([5, 3]), torch.tensor([[1, 2], [3, 0]])
    sizes = torch.tensor([2, 1])
    with pytest.raises(TypeError, match=r"frames is torch\.int32, expected torch\.int64: convert it with \.to\("):
        loss.ctc_loss(log_probs, lengths.int(), labels, sizes)
    with pytest.raises(TypeError, match=r"labels is torch\.int32, expected torch\.int64"):
        loss.ctc_loss(log_probs, lengths, labels.int(), sizes)
    with pytest.raises(ValueError, match=r"sizes has shape \(1,\), expected \(B,\) = \(2,\)"):
        loss.ctc_loss(log_probs, lengths, labels, sizes[:1])
    with pytest.raises(ValueError, match="frames is on meta but the data is on cpu"):
        loss.ctc_loss(log_probs, lengths.to("meta"), labels, sizes)
    with pytest.raises(TypeError, match=r"labels is torch\.int64, expected torch\.int32"):
        align.align(log_probs, lengths, labels, sizes.int())
    with pytest.raises(TypeError, match=r"log_probs is torch\.bfloat16, expected torch\.float32"):
        align.align(log_probs.bfloat16(), lengths, labels.int(), sizes.int())
