"""Every configuration of ds2 as typed dataclasses: the only schema."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ds2.system.errors import UserError


class ConfigError(UserError):
    """A configuration that composes but cannot work; the message names the key, what is allowed and the way out."""


@dataclass
class DataConfig:
    """Where utterances come from and how they are read."""

    train: list[str] = field(default_factory=list)  # manifests (JSON lines)
    dev: list[str] = field(default_factory=list)
    test: list[str] = field(default_factory=list)
    corpus: str = ""  # folder of the corpus as published; a recipe's prepare step reads it
    prepare: str = ""  # importer run by `ds2 data prepare` and, where manifests are missing, by `ds2 train`
    work_dir: str = "corpora"  # prepared manifests and audio caches are written here
    sample_rate_hz: int = 16000
    min_duration_s: float = 0.1
    max_duration_s: float = 40.0
    on_bad_utterance: str = "stop"  # stop | skip: what training does with utterances that `ds2 data check` refuses
    cache: str = "disk"  # none | disk: decoded audio kept as 16-bit samples with checksums
    workers: int = -1  # loader processes, of train and dev each; -1: on a GPU one a core, at most 8; on a CPU 0: none


@dataclass
class AlphabetConfig:
    """The labels of the network and how a transcript becomes labels."""

    symbols: str = " 'abcdefghijklmnopqrstuvwxyz"  # label 0 is the CTC blank, these follow
    case: str = "lower"  # lower | upper | keep
    replace: dict[str, str] = field(default_factory=dict)  # applied first, longest key first
    unknown: str = "stop"  # stop | drop: a character outside the alphabet; drop is counted and logged
    pieces: list[str] = field(default_factory=list)  # byte-pair pieces of the symbols, as merged: then the labels
    pieces_file: str = ""  # where `pieces` are read from, unless given: what `ds2 data pieces` wrote


@dataclass
class FeaturesConfig:
    """Waveform to normalised log spectrogram."""

    kind: str = "log_spectrogram"  # log_spectrogram | log_mel
    window_s: float = 0.02
    step_s: float = 0.01
    mels: int = 80  # log_mel only
    normalise: str = "corpus"  # corpus | none: per-bin mean and deviation of the training set, stored with the model
    statistics_utterances: int = 1000  # utterances drawn by seed to estimate them


@dataclass
class AugmentConfig:
    """Seeded augmentation of training utterances; every draw depends on (seed, epoch, utterance) only."""

    speed: list[float] = field(default_factory=list)  # factors drawn evenly, e.g. [0.9, 1.0, 1.1]
    gain_db: list[float] = field(default_factory=list)  # [low, high]
    noise_probability: float = 0.0  # the papers add noise to 40 % of utterances
    noise_snr_db: list[float] = field(default_factory=lambda: [10.0, 30.0])
    noise: list[str] = field(default_factory=list)  # manifests of noise recordings; empty: generated pink noise
    frequency_masks: int = 0  # SpecAugment
    frequency_width: int = 27  # bins
    time_masks: int = 0
    time_width_s: float = 0.4
    time_fraction: float = 0.2  # of the utterance, most that one mask may cover


@dataclass
class BatchingConfig:
    """How utterances become batches."""

    utterances: int = 32  # a fixed count, over all ranks together; 0: use audio_s
    audio_s: float = 0.0  # budget of padded audio a batch, over all ranks together; 0: use utterances
    sortagrad: bool = True  # epoch one in order of duration
    buckets: int = 10  # duration buckets shuffled from epoch two on
    longest_first: bool = False  # the longest batch opens every epoch, so that out-of-memory shows at once


@dataclass
class ConvConfig:
    """One 2-D convolution; kernel and stride are [frequency, time]."""

    kernel: list[int] = field(default_factory=lambda: [41, 11])
    stride: list[int] = field(default_factory=lambda: [2, 2])
    channels: int = 32


@dataclass
class ModelConfig:
    """The paper's Figure 7 and its relatives."""

    convs: list[ConvConfig] = field(
        default_factory=lambda: [ConvConfig(), ConvConfig(kernel=[21, 11], stride=[2, 1], channels=32)]
    )
    cell: str = "rnn"  # rnn | lstm | gru
    nonlinearity: str = "clipped_relu"  # rnn only: relu | clipped_relu | tanh
    clip: float = 20.0  # of clipped ReLU, in the convolutions too
    hidden: int = 1152
    depth: int = 8  # recurrent layers
    skip: int = 4  # recurrent layers a residual skip spans; 0: no residuals
    skip_first: str = "none"  # none | projection: skip over the first module, whose input has another width
    row_convs: int = 10  # row convolutions in the whole stack, spread evenly over the modules
    row_conv_context: int = 3  # future frames each of them sees (tau)
    bidirectional: bool = False
    batch_norm: bool = True  # of the input projections and convolutions
    batch_norm_momentum: float = 0.1
    dropout: float = 0.0  # on the input of each recurrent layer
    max_lookahead_ms: float = 800.0  # a config above it is refused; 0: unlimited (bidirectional)
    backend: str = "auto"  # of ds2_ops: auto | persistent | gemm | cpu | reference


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: str = "sgd"  # sgd (Nesterov) | adamw
    learning_rate: float = 3e-4
    momentum: float = 0.99  # sgd
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])  # adamw
    weight_decay: float = 0.0
    schedule: str = "anneal"  # anneal (divide by `anneal` each epoch) | cosine (to zero at the last epoch) | constant
    anneal: float = 1.2
    warmup_steps: int = 0
    clip_norm: float = 400.0  # 0: off


@dataclass
class TrainConfig:
    """The loop."""

    epochs: int = 20
    max_minutes: float = 0.0  # stop cleanly after this long; 0: no limit
    max_steps: int = 0  # stop cleanly after this many optimizer steps; 0: no limit
    precision: str = "auto"  # fp32 | bf16 | auto (bf16 on CUDA, else fp32)
    graphs: str = "auto"  # auto | on | off: launch steps as CUDA graphs; auto where they can be: one rank, on a GPU
    accumulate: int = 1  # batches a step
    average_decay: float = 0.0  # exponential moving average of the weights, evaluated and kept as best; 0: off
    early_stop_epochs: int = 0  # stop after this many epochs without a better dev WER; 0: off
    max_skipped_steps: int = 20  # non-finite losses or gradients before training stops
    evaluate_every_epochs: int = 1
    evaluate_from_epoch: int = 1
    log_every_steps: int = 10
    seed: int = 1


@dataclass
class CheckpointConfig:
    """What is kept in the run folder."""

    every_minutes: float = 10.0  # timed trainer states between epochs; 0: only at epochs
    every_steps: int = 0  # 0: off
    keep_last: int = 1
    init_from: str = ""  # a model file whose weights start this run
    resume: bool = True  # continue the run folder's last trainer state where there is one


@dataclass
class CommConfig:
    """How ranks that train together exchange gradients."""

    backend: str = "auto"  # auto | single | mpi | nccl
    batch_norm: str = "shared"  # shared: statistics over the batch of all ranks | local: over each rank's part
    overlap: bool = True  # send gradients while back-propagation goes on
    bucket_mib: float = 25.0  # gradients that travel together
    timeout_s: float = 600.0  # a rank without progress for so long ends the job


@dataclass
class DecodeConfig:
    """From log-probs to words: Q(y) = log p_ctc(y|x) + alpha log p_lm(y) + beta words(y); scores in natural log."""

    method: str = "greedy"  # greedy | beam (batched, on the model's device) | native (C++ on the CPU) | ctcdecode
    beam: int = 64  # hypotheses kept at each frame; one that ends in a blank and one that does not count apart
    lm: str = ""  # n-gram model (binary or ARPA) of words, characters or pieces; empty: none, alpha and beta rest
    alpha: float = 0.5
    beta: float = 1.5
    unknown_score: float = -23.0  # added to log p_lm of a word that the model of words does not know
    lexicon: bool = False  # only words of the model's vocabulary and hot words (native: flashlight-text does it)
    hot_words: list[str] = field(default_factory=list)  # single words, as the network writes them
    hot_word_bonus: float = 10.0
    label_min_log_prob: float = -5.0  # a frame's less likely labels are not followed, but for its best
    prune: float = 10.0  # hypotheses this far below the best are dropped at each frame
    nbest: int = 1
    threads: int = 0  # of native and ctcdecode; 0: one a core
    times: bool = True  # word times and confidences, by aligning what was recognised
    confidence: list[float] = field(default_factory=lambda: [1.0, 0.0])  # calibration: slope, offset of the logit


@dataclass
class Config:
    """A whole training run."""

    data: DataConfig = field(default_factory=DataConfig)
    alphabet: AlphabetConfig = field(default_factory=AlphabetConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    run_dir: str = MISSING
    device: str = "auto"  # auto | cpu | cuda | cuda:N
