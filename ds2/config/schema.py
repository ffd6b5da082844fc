"""Every configuration of ds2 as typed dataclasses: the only schema."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ds2.config.allowed import COUNT, SEED, UNLIMITED, choice, number, numbers, numbers_by_name
from ds2.system.errors import UserError

CODECS = ("mulaw", "alaw", "gsm", "adpcm", "mp3")


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
    sample_rate_hz: int = number(16000, 1000, 768_000)
    min_duration_s: float = number(0.1, 0, 604_800)
    max_duration_s: float = number(40.0, 0, UNLIMITED, above=True)
    on_bad_utterance: str = choice("stop", "skip")  # what training does with utterances that `ds2 data check` refuses
    # decoded audio kept as 16-bit samples with checksums; auto: but for what is cheap to read, lossless at this rate
    cache: str = choice("auto", "disk", "none")
    cache_gb: float = number(50.0, 0, UNLIMITED)  # the most that work_dir/audio_cache may hold; 0: no limit
    workers: int = number(
        -1, -1, 256
    )  # loader processes, of train and dev each; -1: on a GPU one a core, at most 8; on a CPU 0: none


@dataclass
class AlphabetConfig:
    """The labels of the network and how a transcript becomes labels."""

    symbols: str = " 'abcdefghijklmnopqrstuvwxyz"  # label 0 is the CTC blank, these follow
    case: str = choice("lower", "upper", "keep")
    replace: dict[str, str] = field(default_factory=dict)  # applied first, longest key first
    unknown: str = choice("stop", "drop")  # a character outside the alphabet; drop is counted and logged
    pieces: list[str] = field(default_factory=list)  # byte-pair pieces of the symbols, as merged: then the labels
    pieces_file: str = ""  # where `pieces` are read from, unless given: what `ds2 data pieces` wrote
    locale: str = ""  # code of a language: tr and az have dotted and dotless i; others: case as everywhere
    unicode: str = choice("NFC", "NFKC")  # the latter makes full-width letters, ligatures and the like plain ones
    numbers: str = ""  # a language (en, de, tr, pt_BR): digits become its words, by num2words; empty: digits stay
    punctuation: str = choice("keep", "drop")  # drop: what is neither letter nor digit and no symbol becomes a space


@dataclass
class FeaturesConfig:
    """Waveform to normalised log spectrogram."""

    kind: str = choice("log_spectrogram", "log_mel", "kaldi_fbank", "nemo_fbank")  # the last two: see `ds2 export`
    window_s: float = number(0.02, 0, 1, above=True)
    step_s: float = number(0.01, 0, 1, above=True)
    mels: int = number(80, 1, 10_000)  # of all but log_spectrogram
    normalise: str = choice("corpus", "none")  # per-bin mean and deviation of the training set, stored with the model
    statistics_utterances: int = number(1000, 1, COUNT)  # utterances drawn by seed to estimate them


@dataclass
class AugmentConfig:
    """Seeded augmentation of training utterances; every draw depends on (seed, epoch, utterance) only."""

    speed: list[float] = numbers([], 0.25, 4)  # factors drawn evenly, e.g. [0.9, 1.0, 1.1]
    tempo: list[float] = numbers([], 0.5, 2)  # the same at the pitch of the speaker, besides `speed`
    gain_db: list[float] = numbers([], -100, 100, lengths=(0, 2))  # [low, high]
    noise_probability: float = number(0.0, 0, 1)  # the papers add noise to 40 % of utterances
    noise_snr_db: list[float] = numbers([10.0, 30.0], -100, 200, lengths=(0, 2))  # [low, high]
    noise: list[str] = field(default_factory=list)  # manifests of noise recordings; empty: generated noise
    noise_colours: list[float] = numbers([1.0], -2, 4)  # of generated noise, drawn evenly: 0 white, 1 pink, 2 brown
    babble_share: float = number(0.0, 0, 1)  # how often noise is that of other utterances' voices instead
    babble_voices: int = number(4, 1, 100)
    room_probability: float = number(0.0, 0, 1)  # generated rooms
    room_rt60_s: list[float] = numbers([0.1, 0.6], 0.01, 10, lengths=(2,))  # [low, high], until echoes fell by 60 dB
    codec_probability: float = number(0.0, 0, 1)
    codecs: list[str] = field(default_factory=lambda: list(CODECS))  # drawn evenly
    noisy_epochs: int = number(0, 0, COUNT)  # noise, rooms and codecs in so many epochs, then none; 0: in all
    vtlp: list[float] = numbers([], 0.5, 2, lengths=(0, 2))  # [low, high], factors of frequencies, drawn evenly
    frequency_masks: int = number(0, 0, 1000)  # SpecAugment
    frequency_width: int = number(27, 0, 100_000)  # bins
    time_masks: int = number(0, 0, 1000)
    time_width_s: float = number(0.4, 0, 3600)
    time_fraction: float = number(0.2, 0, 1)  # of the utterance, most that one mask may cover


@dataclass
class BatchingConfig:
    """How utterances become batches."""

    utterances: int = number(32, 0, COUNT)  # a fixed count, over all ranks together; 0: use audio_s
    audio_s: float = number(0.0, 0, COUNT)  # budget of padded audio a batch, over all ranks together; 0: use utterances
    auto: bool = False  # `batching=auto`: the largest audio_s that fits the GPU, by trial; the two above rest then
    sortagrad: bool = True  # epoch one in order of duration
    buckets: int = number(10, 1, COUNT)  # duration buckets shuffled from epoch two on
    longest_first: bool = False  # the longest batch opens every epoch, so that out-of-memory shows at once


@dataclass
class ConvConfig:
    """One 2-D convolution; kernel and stride are [frequency, time]."""

    kernel: list[int] = numbers([41, 11], 1, 10_001, lengths=(2,))
    stride: list[int] = numbers([2, 2], 1, 10_001, lengths=(2,))
    channels: int = number(32, 1, 65_536)


@dataclass
class ModelConfig:
    """The paper's Figure 7 and its relatives."""

    convs: list[ConvConfig] = field(
        default_factory=lambda: [ConvConfig(), ConvConfig(kernel=[21, 11], stride=[2, 1], channels=32)]
    )
    cell: str = choice("rnn", "lstm", "gru")
    nonlinearity: str = choice("clipped_relu", "relu", "tanh")  # rnn only
    clip: float = number(20.0, 0, 1e9, above=True)  # of clipped ReLU, in the convolutions too
    hidden: int = number(1152, 1, 1_000_000)
    depth: int = number(8, 1, 1000)  # recurrent layers
    skip: int = number(4, 0, 1000)  # recurrent layers a residual skip spans; 0: no residuals
    skip_first: str = choice("none", "projection")  # skip over the first module, whose input has another width
    row_convs: int = number(10, 0, 10_000)  # row convolutions in the whole stack, spread evenly over the modules
    row_conv_context: int = number(3, 0, 10_000)  # future frames each of them sees (tau)
    bidirectional: bool = False
    batch_norm: bool = True  # of the input projections and convolutions
    batch_norm_momentum: float = number(0.1, 0, 1)
    dropout: float = number(0.0, 0, 1, below=True)  # on the input of each recurrent layer
    # how recurrent layers and residual branches start; plain: as torch.nn and at 1, damped: 0.5 I and at 1 / sqrt(M),
    # even: as torch.nn and at 1 / sqrt(M)
    start: str = choice("damped", "even", "plain")  # of the cell rnn
    stochastic_depth: float = number(0.0, 0, 1, below=True)  # how often training leaves the last residual branch out
    intermediate: list[int] = numbers([], 1, 1000)  # modules behind which training has a classifier of its own
    max_lookahead_ms: float = number(800.0, 0, UNLIMITED)  # a config above it is refused; 0: unlimited (bidirectional)
    backend: str = choice("auto", "persistent", "gemm", "cpu", "reference")  # of ds2_ops


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: str = choice("sgd", "adamw")  # sgd: Nesterov's
    learning_rate: float = number(3e-4, 0, 1e6, above=True)
    momentum: float = number(0.99, 0, 1, below=True)  # sgd
    betas: list[float] = numbers([0.9, 0.98], 0, 1, below=True, lengths=(2,))  # adamw
    weight_decay: float = number(0.0, 0, 1e6)
    # anneal: divided by `anneal` each epoch; cosine: to zero at the last epoch; timed_cosine: also when
    # train.max_minutes are up, whichever comes first, by the clock: no two runs are the same
    schedule: str = choice("anneal", "cosine", "timed_cosine", "constant")
    anneal: float = number(1.2, 0, 1e6, above=True)
    warmup_steps: int = number(0, 0, COUNT)
    clip_norm: float = number(400.0, 0, UNLIMITED)  # 0: off
    layer_rates: dict[str, float] = numbers_by_name(  # factors by start of a weight's name: {convs: 0.1}
        0, 1e6, above=True, way_out="train.freeze=[NAME] lets weights stay as they are"
    )


@dataclass
class TrainConfig:
    """The loop."""

    epochs: int = number(20, 1, COUNT)
    max_minutes: float = number(0.0, 0, UNLIMITED)  # of steps; preparation and evaluations do not count; 0: no limit
    max_steps: int = number(0, 0, COUNT)  # stop cleanly after this many optimizer steps; 0: no limit
    precision: str = choice("auto", "fp32", "bf16")  # auto: bf16 on CUDA, else fp32
    graphs: str = choice("auto", "on", "off")  # steps as CUDA graphs; auto: on the GPUs of one host
    calibrate: int = number(0, 0, 1000)  # recurrent kernels' tiles to time before the first step; 0: the planner's word
    consistency: float = number(0.0, 0, 1e6)  # weight of the divergence of two augmented views (CR-CTC); 0: one view
    intermediate_weight: float = number(0.3, 0, 1)  # of the loss at model.intermediate, the last one's is 1 less it
    noise_scale: bool = False  # log the gradient noise scale: about the largest batch that pays, in utterances
    accumulate: int = number(1, 1, COUNT)  # batches a step
    average_decay: float = number(0.0, 0, 1, below=True)  # of a moving average of the weights, kept as best; 0: off
    dropout_rise_epochs: int = number(0, 0, COUNT)  # model.dropout rises from 0 in so many; 0: whole at once
    early_stop_epochs: int = number(0, 0, COUNT)  # stop after this many epochs without a better dev WER; 0: off
    max_skipped_steps: int = number(20, 0, COUNT)  # non-finite losses or gradients before training stops
    evaluate_every_epochs: int = number(1, 1, COUNT)
    evaluate_from_epoch: int = number(1, 1, COUNT)
    log_every_steps: int = number(10, 1, COUNT)
    metric: str = choice("wer", "cer")  # which of them, on the dev set, makes a model the best one
    freeze: list[str] = field(default_factory=list)  # weights that stay, by the start of their names: [convs]
    seed: int = number(1, 0, SEED)


@dataclass
class CheckpointConfig:
    """What is kept in the run folder."""

    every_minutes: float = number(10.0, 0, UNLIMITED)  # timed trainer states between epochs; 0: only at epochs
    every_steps: int = number(0, 0, COUNT)  # 0: off
    every_epochs: int = number(1, 1, COUNT)  # states and last models; epochs of seconds are longer with their saves
    keep_last: int = number(1, 1, COUNT)
    init_from: str = ""  # a model file or run folder: its architecture, features, alphabet and weights start this run
    resume: bool = True  # continue the run folder's last trainer state where there is one


@dataclass
class CommConfig:
    """How ranks that train together exchange gradients."""

    backend: str = choice("auto", "single", "mpi", "gloo", "nccl")
    batch_norm: str = choice(
        "shared", "local"
    )  # shared: statistics over the batch of all ranks; local: over each rank's part
    overlap: bool = True  # send gradients while back-propagation goes on; on GPUs where steps are faster so
    bucket_mib: float = number(25.0, 0, 1_000_000, above=True)  # gradients that travel together
    timeout_s: float = number(600.0, 0, UNLIMITED, above=True)  # a rank without progress for so long ends the job


@dataclass
class DecodeConfig:
    """From log-probs to words: Q(y) = log p_ctc(y|x) + alpha log p_lm(y) + beta words(y); scores in natural log."""

    method: str = choice("greedy", "beam", "native", "ctcdecode")  # beam: on the model's device; native: C++ on the CPU
    beam: int = number(
        64, 1, 1_000_000
    )  # hypotheses kept at each frame; one that ends in a blank and one that does not count apart
    lm: str = ""  # n-gram model (binary or ARPA) of words, characters or pieces; empty: none, alpha and beta rest
    alpha: float = number(0.5, -1e6, 1e6)
    beta: float = number(1.5, -1e6, 1e6)
    unknown_score: float = number(-23.0, -1e9, 1e9)  # added to log p_lm of a word that the model of words does not know
    lexicon: bool = False  # only words of the model's vocabulary and hot words (native: flashlight-text does it)
    hot_words: list[str] = field(default_factory=list)  # single words, as the network writes them
    hot_word_bonus: float = number(10.0, -1e6, 1e6)
    label_min_log_prob: float = number(
        -5.0, -UNLIMITED, 0, below=True
    )  # a frame's less likely labels are not followed, but for its best
    prune: float = number(10.0, 0, 1e12, above=True)  # hypotheses this far below the best are dropped at each frame
    nbest: int = number(1, 1, 1_000_000)
    rescore: str = ""  # recurrent model (`ds2 lm train`) that ranks what the search found anew; empty: none
    rescore_weight: float = number(0.5, 0, 1)  # its share of log p_lm; the n-gram model has the rest
    rescore_hypotheses: int = number(32, 1, 1_000_000)  # that are ranked
    rescore_in_search: bool = False  # removed; read for one more version, with a warning
    threads: int = number(0, 0, 1024)  # of native and ctcdecode; 0: one a core
    times: bool = True  # word times and confidences, by aligning what was recognised
    confidence: list[float] = numbers([1.0, 0.0], -1e9, 1e9, lengths=(2,))  # calibration: slope, offset of the logit


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
