"""Forward and backward passes of a batch: kernels launched one by one, or a CUDA graph per shape.

With few utterances a GPU, the host's hundreds of launches a step would take longer than the kernels.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.audio.spec_augment import apply_masks, warp_frequency, warp_time
from ds2.config.schema import Config, ConfigError, TrainConfig
from ds2.distributed.communicator import Communicator
from ds2.distributed.gradients import GradientReducer
from ds2.model.acoustic import AcousticModel
from ds2.model.norm import SequenceBatchNorm
from ds2.model.pass_context import OWN_PARAMETERS, PassContext
from ds2.system.cuda_graph import GraphRecorder
from ds2.training.ctc import Crf, ctc_losses, divergence
from ds2.training.inputs import Inputs

log = logging.getLogger(__name__)
# train-clean-5 in batches of 16 at five speeds has 55 shapes; with 32 graphs, four shapes an epoch were recorded again.
MAX_GRAPHS = 64
_REMEMBERED_SHAPES = 1024


class Passes:
    """Runs from waveforms to losses and back to the gradients; the host reads nothing from the device.

    Args:
        model, features: on one device.
        train: the weights of further terms of the loss.
        autocast: whether to compute in bfloat16.
        crf: of `train.objective=ctc_crf`.
    """

    typical = True  # whether the last passes took about as long as later ones of this shape will

    def __init__(
        self,
        model: AcousticModel,
        features: Features,
        gradients: GradientReducer,
        train: TrainConfig,
        *,
        autocast: bool,
        crf: Crf | None = None,
    ) -> None:
        self.model, self.features, self.gradients, self.autocast = model, features, gradients, autocast
        self.crf, self.ctc_weight = crf, train.ctc_weight
        self.consistency, self.intermediate_weight = train.consistency, train.intermediate_weight
        self._centres_hz = features.centres_hz.to(features.mean.device)
        self._objective: Tensor | None = None

    def losses(self, inputs: Inputs, context: PassContext = OWN_PARAMETERS) -> tuple[Tensor, Tensor]:
        """Compute the losses of a batch.

        Returns:
            The losses (B,) of CTC, with its delay penalty, or CTC-CRF in nats, means over views, 0 where no alignment
            exists; and the objectives (B,), which training minimises. An objective is the loss, unless the config adds
            to it: with CTC-CRF, `ctc_weight` times the CTC loss; with intermediate classifiers, (1 - w) times that plus
            w times the mean of their CTC losses (Lee and Watanabe 2021, equation 8), of phones where there are some,
            with the same delay penalty; with two views of each utterance, c times `divergence` (CR-CTC, Yao et al.
            2025, equation 5).
        """
        features = self.features.padded(inputs.waveforms, inputs.frames)
        features = warp_time(features, inputs.frames, inputs.time_warps)
        if inputs.views > 1:
            features = features.repeat(inputs.views, 1, 1)
        features = warp_frequency(features, self._centres_hz, inputs.frequency_factors, self.features.sample_rate_hz)
        features = apply_masks(features, inputs.masks, inputs.frequency_masks)
        frames = inputs.frames.repeat(inputs.views)
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.autocast):
            *intermediate, logits = self.model.all_logits(features, frames, inputs.dropout_keys, context)

        def in_all_views(*targets: Tensor) -> list[Tensor]:
            repeated = (target.repeat(inputs.views, *[1] * (target.dim() - 1)) for target in targets)
            return [self.model.output_frames(frames), *repeated]

        def mean_over_views(losses: Tensor) -> Tensor:
            return losses.view(inputs.views, -1).mean(0)

        arguments = in_all_views(inputs.labels, inputs.label_lengths, inputs.feasible)
        ctc = ctc_losses(logits, *arguments, delay_penalty=inputs.delay_penalty)
        losses = objective = mean_over_views(ctc)
        if self.crf is not None:
            log_probs = inputs.label_log_probs.repeat(inputs.views)
            crf = self.crf.losses(ctc, logits, arguments[0], log_probs, arguments[3])
            losses, objective = mean_over_views(crf), mean_over_views(crf + self.ctc_weight * ctc)
        if intermediate:
            if (phone_targets := inputs.phone_targets) is not None:
                arguments = in_all_views(*phone_targets)
            of_heads = [ctc_losses(head, *arguments, delay_penalty=inputs.delay_penalty) for head in intermediate]
            ctc_of_heads = torch.stack([mean_over_views(losses_of_head) for losses_of_head in of_heads]).mean(0)
            objective = torch.lerp(objective, ctc_of_heads, self.intermediate_weight)
        if inputs.views > 1:
            objective = objective + self.consistency * divergence(logits)
        return losses, objective

    def forward(self, inputs: Inputs, utterances: int | Tensor, *, last: bool, idle: bool) -> Tensor:
        """Run the forward pass; return the losses (B,), see `losses`.

        Args:
            utterances: of the whole step, over all ranks and batches; a step minimises their mean objective.
            last: whether it is the last pass of its step.
            idle: whether this batch has weight 0: it repeats another rank's utterance.
        """
        losses, objective = self.losses(inputs, self.gradients.start_pass(last=last))
        self._objective = objective.sum() * 0.0 if idle else objective.sum() / utterances
        return losses.detach()

    def backward(self) -> None:
        """Run the backward pass of the last `forward`: its gradients are added to those of the step."""
        objective, self._objective = self._objective, None
        assert objective is not None
        torch.autograd.backward(objective)
        self.gradients.end_pass()


def build_gradients(config: Config, model: AcousticModel, comm: Communicator, *, autocast: bool) -> GradientReducer:
    return GradientReducer(
        model.parameters(),
        comm,
        int(config.comm.bucket_mib * 2**20),
        overlap=config.comm.overlap,
        low_precision=model.low_precision_parameters() if autocast else (),
    )


def why_sums_are_launched(config: Config, comm: Communicator) -> str:
    """Why sums over ranks cannot be parts of recorded passes; '' if they can. All ranks make this call together."""
    asked_for = config.train.graphs == "on"
    if comm.world == 1 and not (comm.elastic and asked_for):
        return ""
    if comm.name != "nccl":
        return f"the ranks' sums go over {comm.name}, which cannot be recorded"
    if comm.elastic:
        return "ranks come and go, and what NCCL recorded cannot be ended while a rank is lost"
    hosts = len(set(comm.allgather(comm.host)))
    if hosts > 1 and not asked_for:
        return f"the ranks are on {hosts} hosts, where no recorded sum was tried (train.graphs=on records there too)"
    return ""


def use_graphs(
    config: Config, comm: Communicator, why_launched: str, why_no_loss: str | None, why_torch: str | None = None
) -> bool:
    """Whether steps run as CUDA graphs (`train.graphs`).

    Args:
        why_launched: what `why_sums_are_launched` returned.
        why_no_loss: why the CTC loss cannot be recorded there; None if it can.
        why_torch: why recurrent layers run on torch's kernels; None if they do not.

    Raises:
        ConfigError: train.graphs=on where graphs cannot be recorded.
    """
    # Of passes whose gradients are summed meanwhile, "auto" launches those, and records all others.
    within = config.comm.batch_norm == "shared" or (config.comm.overlap and config.train.graphs == "on")
    way_out = "comm.batch_norm=local" + " comm.overlap=false" * (config.train.graphs == "on")
    reasons = (
        (comm.device.type != "cuda", f"the device is {comm.device}, they need a CUDA GPU"),
        (bool(why_launched) and within, f"{why_launched}; with {way_out} passes are recorded around the sums"),
        (
            why_torch is not None,
            f"torch's kernels of model.cell={config.model.cell} use streams of their own: {why_torch}",
        ),
        (why_no_loss is not None, f"the CTC loss: {why_no_loss}"),
    )
    reason = next((text for applies, text in reasons if applies), None)
    if config.train.graphs == "on" and reason:
        raise ConfigError(f"train.graphs=on cannot run: {reason}; set train.graphs=auto or off")
    if config.train.graphs == "auto" and reason and comm.device.type == "cuda" and comm.rank == 0:
        log.info("steps run without CUDA graphs: %s", reason)
    return config.train.graphs != "off" and reason is None


@dataclass
class RecordedPasses:
    """Both passes of a shape as graphs, and the tensors that they read and write."""

    inputs: Inputs
    losses: Tensor
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class GraphedPasses(Passes):
    """Passes that are recorded when a shape occurs for the second time, and then launched as two graphs.

    Passes run launch by launch, with the same kernels on the same shapes and so the same bits, when a shape comes
    for the first time; while running averages still weigh batches by their number; for batches that count nothing;
    and, where a shape is not recorded yet, once half of the memory that other processes leave is in use. Graphs
    share their working memory, whose size the largest shape decides: a larger one deletes all graphs. At most
    `MAX_GRAPHS` are kept, those used last.

    With several ranks, the sums of shared batch norm are part of a recording, and so are those of gradients where these
    overlap the backward pass: on a stream that forks from the pass whenever a bucket is complete. Where sums cannot be
    recorded, a pass that overlaps with them runs launch by launch; others are recorded, and sums come after them.

    Inputs must be padded, `InputMaker(padded=True)`, for shapes to repeat.

    Args:
        args, options: those of `Passes`.
        records_sums: whether sums over ranks can be parts of a recording.
    """

    def __init__(self, *args: Any, records_sums: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self._records_sums = records_sums
        # By shape and variant, in the order of their last use.
        self.recordings: OrderedDict[tuple[int, ...], RecordedPasses] = OrderedDict()
        self.replays = 0  # passes that ran as graphs
        self._norms = [part for part in self.model.modules() if isinstance(part, SequenceBatchNorm)]
        self._recorder = GraphRecorder()
        self._shapes: OrderedDict[tuple[int, ...], None] = OrderedDict()  # that have come, in the order of last use
        self._waveforms, self._numbers = torch.empty(0), torch.empty(0)
        self._utterances, self._utterances_on_device = 0, torch.zeros(())  # of a step, on the host and on the device
        self._running: RecordedPasses | None = None

    def forward(self, inputs: Inputs, utterances: int | Tensor, *, last: bool, idle: bool) -> Tensor:
        """As `Passes.forward`."""
        if utterances != self._utterances:
            self._utterances = int(utterances)
            self._utterances_on_device = self._utterances_on_device.to(inputs.waveforms.device).fill_(self._utterances)
        sums = last and self.gradients.overlaps
        shape = (*inputs.shape, *self.gradients.variant)
        key = (*shape, int(sums), int(self.gradients.copied))
        recorded = self.recordings.get(key)
        may_replay = self._has_come_before(shape) and not idle and all(norm.steady for norm in self._norms)
        launched = sums and not self._records_sums
        if launched or not may_replay or (recorded is None and not _fits_twice()):
            self._running, self.typical = None, launched and may_replay
            return super().forward(inputs, self._utterances_on_device, last=last, idle=idle)
        self.typical = recorded is not None
        if recorded is None:
            recorded = self.record(key, inputs, sums=sums)  # the host's counters advance as if the passes had run
        else:
            inputs.copy_to(self._waveforms, self._numbers)
            self.gradients.start_pass(last=sums)
            for norm in self._norms:  # no replay changes counts on the host
                norm.advance()
            self.gradients.advance()
        self.recordings.move_to_end(key)
        self._running = recorded
        self.replays += 1
        recorded.forward.replay()
        return recorded.losses.clone()  # the next replay overwrites them

    def backward(self) -> None:
        """As `Passes.backward`."""
        if self._running is None:
            super().backward()
        else:
            self._running.backward.replay()

    def record(self, key: tuple[int, ...], inputs: Inputs, *, sums: bool) -> RecordedPasses:
        """Record both passes of a shape, with the sums over ranks of the step's gradients if `sums`."""
        waveforms, numbers = inputs.waveforms.numel(), inputs.numbers.numel()
        if waveforms > len(self._waveforms) or numbers > len(self._numbers):
            self.recordings.clear()
            self._waveforms = inputs.waveforms.new_empty(max(waveforms, len(self._waveforms)))
            self._numbers = inputs.numbers.new_empty(max(numbers, len(self._numbers)))
            self._recorder.new_pool()
        static = inputs.copy_to(self._waveforms, self._numbers)
        with self._recorder.recording() as forward:
            losses = super().forward(static, self._utterances_on_device, last=sums, idle=False)
        with self._recorder.recording() as backward:
            super().backward()
            if sums:
                self.gradients.finish_step()
        self.recordings[key] = RecordedPasses(static, losses, forward, backward)
        if len(self.recordings) > MAX_GRAPHS:
            self.recordings.popitem(last=False)
        return self.recordings[key]

    def _has_come_before(self, shape: tuple[int, ...]) -> bool:
        """Return whether a shape has occurred before, and record it."""
        before = shape in self._shapes
        self._shapes[shape] = None
        self._shapes.move_to_end(shape)
        if len(self._shapes) > _REMEMBERED_SHAPES:
            self._shapes.popitem(last=False)
        return before


def _fits_twice() -> bool:
    """Return whether passes fit twice beside other processes: for single launches and for recordings."""
    free, _ = torch.cuda.mem_get_info()
    return 2 * torch.cuda.max_memory_allocated() <= torch.cuda.memory_reserved() + free
