"""CTC-CRF in training: what the loss is made of, who takes part, and what resumes."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import kernel_on_cpu

from ds2.config.schema import Config
from ds2.lm.files import load_ngram
from ds2.lm.label_graph import LabelScorer
from ds2.system.tensor_file import CheckpointError
from ds2.training.ctc import Crf, ctc_losses, feasible_rows
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]
CRF = "train.objective=ctc_crf"


@pytest.fixture
def trainer(tiny_config: MakeConfig) -> Trainer:
    config = tiny_config(CRF, "train.ctc_weight=0.25", "train.denominator_order=3")
    return Trainer(config, Path(config.run_dir))


def logits_of(crf: Crf, length: int, utterances: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, utterances, crf.denominator.vocabulary, generator=generator).requires_grad_()


def test_the_loss_is_the_posterior_of_the_transcript(trainer: Trainer) -> None:
    """Over all sequences of a frame or two, posteriors sum to one."""
    crf = trainer.crf
    assert crf is not None
    scorer = LabelScorer(crf.model, trainer.alphabet)
    logits, count = logits_of(crf, 2, 1), len(trainer.alphabet)
    sequences = [
        [],
        *([a] for a in range(1, count)),
        *([a, b] for a in range(1, count) for b in range(1, count) if a != b),
    ]
    total = 0.0
    for sequence in sequences:
        labels, sizes, frames = (
            torch.tensor([sequence + [0] * (2 - len(sequence))]),
            torch.tensor([len(sequence)]),
            torch.tensor([2]),
        )
        feasible = feasible_rows(frames, labels, sizes)
        ctc = ctc_losses(logits, frames, labels, sizes, feasible)
        log_probs = torch.tensor([scorer(sequence)], dtype=torch.float64)
        total += math.exp(-float(crf.losses(ctc, logits, frames, log_probs, feasible).detach()))
    assert total == pytest.approx(1, abs=1e-3)  # weights of the graph have 12 bits


def test_repeats_do_not_change_the_model_of_labels(trainer: Trainer) -> None:
    assert trainer.crf is not None
    utterances = [u for u in trainer.utterances for _ in range(3)]  # as `data.repeats` makes them
    repeated = Crf.of(trainer.config.train, trainer.alphabet, utterances)
    assert repeated.digest == trainer.crf.digest
    assert torch.equal(repeated.label_log_probs, trainer.crf.label_log_probs.repeat_interleave(3))


def test_what_cannot_be_aligned_has_no_loss_and_no_gradient(trainer: Trainer) -> None:
    crf = trainer.crf
    assert crf is not None
    logits = logits_of(crf, 3, 3)
    labels, sizes = torch.tensor([[1, 1, 1], [1, 2, 0], [0, 0, 0]]), torch.tensor([3, 2, 0])
    frames = torch.tensor([3, 3, 3])
    feasible = feasible_rows(frames, labels, sizes)
    ctc = ctc_losses(logits, frames, labels, sizes, feasible)
    losses = crf.losses(ctc, logits, frames, torch.zeros(3, dtype=torch.float64), feasible)
    losses.sum().backward()
    assert losses.dtype == torch.float32 and losses[0] == 0
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[:, 0].any()
    assert logits.grad[:, 1].any() and logits.grad[:, 2].any()


def test_an_objective_adds_a_share_of_ctc_and_leaves_heads_to_ctc(tiny_config: MakeConfig) -> None:
    extra = ("train.consistency=0.2", "augment.time_masks=1", "model.intermediate=[1]", "train.intermediate_weight=0.5")
    config = tiny_config(CRF, "train.ctc_weight=0.25", *extra)
    trainer = Trainer(config, Path(config.run_dir))
    trainer.model.train()
    inputs = trainer.inputs(next(iter(trainer.loader.epoch([[0, 3, 5]], 1))), 1)
    crf = trainer.crf
    assert crf is not None
    assert torch.equal(inputs.label_log_probs, crf.label_log_probs[[0, 3, 5]])
    losses, objective = trainer.passes.losses(inputs)
    trainer.passes.crf = None
    ctc, ctc_objective = trainer.passes.losses(inputs)
    # 0.5 CTC + 0.5 heads + c divergence there; here 0.5 (CRF + 0.25 CTC) + the same
    torch.testing.assert_close(objective - ctc_objective, 0.5 * (losses + 0.25 * ctc) - 0.5 * ctc, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(losses, ctc)


def test_the_model_of_labels_lies_in_the_run_folder_for_decoding(trainer: Trainer) -> None:
    crf = trainer.crf
    assert crf is not None
    saved = load_ngram(trainer.run_dir / "denominator.lm")
    assert saved.vocabulary == crf.model.vocabulary and torch.equal(saved.log_prob, crf.model.log_prob)


def test_a_refused_start_leaves_the_model_of_labels_of_the_run(trainer: Trainer, tiny_config: MakeConfig) -> None:
    file = trainer.run_dir / "denominator.lm"
    (trainer.run_dir / "best.safetensors").touch()
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match="without their trainer state"):
        Trainer(tiny_config(CRF, "train.denominator_order=1"), trainer.run_dir)
    assert file.read_bytes() == before


def test_kernels_train_as_products_do(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    crf = trainer.crf
    assert crf is not None
    frames, results = torch.tensor([9, 6]), []
    for patched in (False, True):
        if patched:
            kernel_on_cpu.patch(monkeypatch)
        logits = logits_of(crf, 9, 2)
        sums = crf.denominator(logits, frames)
        sums.sum().backward()
        assert logits.grad is not None
        results.append((sums.detach(), logits.grad))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
