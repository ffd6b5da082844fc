"""All settings as typed dataclasses. `ds2 train --help` shows the comment of each setting."""

from dataclasses import dataclass, field

from ds2_ops.recurrent.cells import GATED, PLAIN
from omegaconf import MISSING

from ds2.config.allowed import COUNT, SEED, UNLIMITED, choice, number, numbers, removed
from ds2.system import UserError

CODECS = ("mulaw", "alaw", "gsm", "adpcm", "mp3")


class ConfigError(UserError):
    """A configuration that cannot work; the message names the setting, what is allowed and what to do."""


@dataclass
class DataConfig:
    """Sources of utterances, and how they are read."""

    train: list[str] = field(default_factory=list)  # manifests (JSON lines) of the training set
    # How many times an epoch has the utterances of each manifest of data.train, in their order; empty: once. With
    # augmentation they differ each time.
    repeats: list[int] = numbers([], 1, 1000)
    dev: list[str] = field(default_factory=list)  # manifests of the development set, which selects the best model
    test: list[str] = field(default_factory=list)  # manifests that `ds2 evaluate` scores if none are named
    corpus: str = ""  # folder of the corpus as published, read by data.prepare
    prepare: str = ""  # importer that `ds2 data prepare` runs, and `ds2 train` where manifests are missing
    work_dir: str = "corpora"  # folder for prepared manifests and audio caches
    sample_rate_hz: int = number(16000, 1000, 768_000)  # audio of other rates is resampled to it
    channel: int = number(0, 0, 64)  # of files with several, from 1; 0: their average
    min_duration_s: float = number(0.1, 0, 604_800)  # shorter utterances are bad utterances
    max_duration_s: float = number(40.0, 0, UNLIMITED, above=True)  # longer utterances are bad utterances
    # What training does with utterances of unusable length or transcript; audio that cannot be read always stops it.
    on_bad_utterance: str = choice("stop", "skip")
    # Decoded audio in 16 bits with checksums. auto: only of files that are slow to decode or must be resampled.
    cache: str = choice("auto", "disk", "none")
    cache_gb: float = number(50.0, 0, UNLIMITED)  # size limit of work_dir/audio_cache; 0: no limit
    # Loader processes, for train and dev each. -1: on a GPU one a core, at most 8, on a CPU none.
    workers: int = number(-1, -1, 256)


@dataclass
class AlphabetConfig:
    """The labels of the network and how a transcript becomes labels."""

    symbols: str = " 'abcdefghijklmnopqrstuvwxyz"  # characters that the network writes; label 0 is the CTC blank
    case: str = choice("lower", "upper", "keep")  # case of transcripts
    replace: dict[str, str] = field(default_factory=dict)  # replacements in transcripts, longest key first: {&: and}
    unknown: str = choice("stop", "drop")  # what to do with characters outside the alphabet; drop counts and logs them
    pieces: list[str] = field(default_factory=list)  # byte-pair pieces in merge order, labels instead of the symbols
    pieces_file: str = ""  # file that `ds2 data pieces` wrote; its content becomes alphabet.pieces
    lexicon: str = ""  # pronunciations (`ds2 data lexicon`), or a model's: phones are the labels instead of the symbols
    locale: str = ""  # language code for upper and lower case: tr and az have a dotted and a dotless i
    unicode: str = choice("NFC", "NFKC")  # NFKC also replaces full-width letters, ligatures and the like
    numbers: str = ""  # language code (en, de, tr, pt_PT) in which numbers become words; empty: unchanged
    punctuation: str = choice("keep", "drop")  # drop: characters that are no letter, digit or symbol become spaces


@dataclass
class FeaturesConfig:
    """Waveform to normalised log spectrogram."""

    kind: str = choice("log_spectrogram", "log_mel", "kaldi_fbank", "nemo_fbank")  # kaldi, nemo: as those toolkits do
    window_s: float = number(0.02, 0, 1, above=True)  # length of a window
    step_s: float = number(0.01, 0, 1, above=True)  # from one window to the next
    mels: int = number(80, 1, 10_000)  # mel bands, of every kind but log_spectrogram
    normalise: str = choice("corpus", "none")  # corpus: mean and deviation of each bin over the training set
    statistics_utterances: int = removed(1000, "1000 utterances are drawn for the feature statistics")
    prior_s: float = removed(10.0, "features are normalised by the training set alone")


@dataclass
class AugmentConfig:
    """Random changes of training utterances. Every draw depends on (train.seed, epoch, utterance) only."""

    speed: list[float] = numbers([], 0.25, 4)  # factors, one is drawn: [0.9, 1.0, 1.1]; changes the pitch too
    tempo: list[float] = removed([], "augment.speed stretches and compresses, and changes the pitch too")
    gain_db: list[float] = numbers([], -100, 100, lengths=(0, 2))  # range of the gain: [low, high]
    noise_probability: float = number(0.0, 0, 1)  # share of utterances with noise; Deep Speech 2: 0.4
    noise_snr_db: list[float] = numbers([10.0, 30.0], -100, 200, lengths=(0, 2))  # signal-to-noise ratio: [low, high]
    noise: list[str] = field(default_factory=list)  # manifests of noise recordings; empty: generated noise
    noise_colours: list[float] = numbers([1.0], -2, 4)  # of generated noise, one is drawn: 0 white, 1 pink, 2 brown
    babble_share: float = number(0.0, 0, 1)  # share of the noise that is speech of other training utterances
    babble_voices: int = removed(4, "babble is made of 4 utterances")
    room_probability: float = number(0.0, 0, 1)  # share of utterances with the echo of a generated room
    room_rt60_s: list[float] = numbers([0.1, 0.6], 0.01, 10, lengths=(2,))  # decay time of rooms by 60 dB: [low, high]
    codec_probability: float = number(0.0, 0, 1)  # share of utterances that go through a codec
    codecs: list[str] = field(default_factory=lambda: list(CODECS))  # codecs, one is drawn
    noisy_epochs: int = number(0, 0, COUNT)  # noise, rooms and codecs in the first epochs only; 0: in all epochs
    vtlp: list[float] = numbers([], 0.5, 2, lengths=(0, 2))  # vocal tract length perturbation: [low, high] factor
    time_warp_s: float = number(0.0, 0, 3600)  # SpecAugment: a moment moves by up to so much; views share it; 0: off
    frequency_masks: int = number(0, 0, 1000)  # SpecAugment: masks over frequency
    frequency_width: int = number(27, 0, 100_000)  # SpecAugment: greatest width of a mask, in bins
    time_masks: int = number(0, 0, 1000)  # SpecAugment: masks over time
    time_width_s: float = number(0.4, 0, 3600)  # SpecAugment: greatest width of a mask
    time_fraction: float = number(0.2, 0, 1)  # SpecAugment: greatest share of an utterance under one mask


@dataclass
class BatchingConfig:
    """How utterances become batches."""

    utterances: int = number(32, 0, COUNT)  # utterances in a batch, over all ranks; 0: batching.audio_s decides
    audio_s: float = number(0.0, 0, COUNT)  # padded audio in a batch, over all ranks; 0: batching.utterances decides
    auto: bool = False  # find the largest batching.audio_s that fits the GPU; use batching=auto
    sortagrad: bool = True  # the first epoch in order of duration (SortaGrad)
    buckets: int = removed(10, "later epochs are shuffled in 10 buckets of similar duration")
    longest_first: bool = False  # start every epoch with the longest batch, which shows at once if memory suffices


@dataclass
class ConvConfig:
    """One 2-D convolution; kernel and stride are [frequency, time]."""

    kernel: list[int] = numbers([41, 11], 1, 10_001, lengths=(2,))
    stride: list[int] = numbers([2, 2], 1, 10_001, lengths=(2,))
    channels: int = number(32, 1, 65_536)
    causal: bool = False  # sees no future frames; else the kernel is centred, and half of it is ahead


@dataclass
class ModelConfig:
    """The network: convolutions, recurrent layers with residual skips, row convolutions (Diamos et al. 2016)."""

    convs: list[ConvConfig] = field(  # 2-D, over the features: [{kernel:[F,T],stride:[F,T],channels:N,causal:false}]
        default_factory=lambda: [ConvConfig(), ConvConfig(kernel=[21, 11], stride=[2, 1], channels=32)]
    )
    # Of recurrent layers; gru_before: reset before the product.
    cell: str = choice("rnn", *(name.removesuffix("_after") for name in GATED))
    nonlinearity: str = choice("clipped_relu", *PLAIN)  # of the cell rnn
    clip: float = number(20.0, 0, 1e9, above=True)  # upper limit of the clipped ReLU, in the convolutions too
    hidden: int = number(1152, 1, 1_000_000)  # units of each recurrent layer
    depth: int = number(8, 1, 1000)  # recurrent layers
    skip: int = number(4, 0, 1000)  # recurrent layers that one residual skip spans; 0: no skips
    skip_first: str = choice("none", "projection")  # skip over the first residual module, whose input is wider
    row_convs: int = number(10, 0, 10_000)  # row convolutions, spread evenly over the residual modules
    row_conv_context: int = number(3, 0, 10_000)  # future frames that each row convolution reads (tau)
    bidirectional: bool = False  # recurrent layers in both directions
    batch_norm: bool = True  # batch normalisation of convolutions and, with norm=batch, of all layers
    norm: str = choice("batch", "rms")  # of recurrent layers and classifiers; rms: each frame by its root mean square
    batch_norm_momentum: float = number(0.1, 0, 1)  # of the running statistics
    dropout: float = number(0.0, 0, 1, below=True)  # of the inputs of recurrent layers
    # Initial recurrent weights and scale of residual branches, for the cell rnn and M branches. plain: as torch.nn,
    # scale 1. damped: half the identity, scale 1 / sqrt(M). even: as torch.nn, scale 1 / sqrt(M).
    start: str = choice("damped", "even", "plain")
    stochastic_depth: float = removed(0.0, "training runs all layers")
    intermediate: list[int] = numbers([], 1, 1000)  # residual modules after which training has an extra CTC loss
    intermediate_phones: list[str] = field(default_factory=list)  # set by train.intermediate_lexicon: its phones
    max_lookahead_ms: float = number(800.0, 0, UNLIMITED)  # upper limit of the lookahead; 0: no limit (bidirectional)
    backend: str = choice("auto", "persistent", "gemm", "cpu", "reference")  # of the ds2_ops kernels


@dataclass
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: str = choice("sgd", "adamw")  # sgd: with Nesterov momentum
    learning_rate: float = number(3e-4, 0, 1e6, above=True)  # at the start, after the warm-up
    momentum: float = number(0.99, 0, 1, below=True)  # of sgd
    betas: list[float] = numbers([0.9, 0.98], 0, 1, below=True, lengths=(2,))  # of adamw
    weight_decay: float = number(0.0, 0, 1e6)  # strength of the weight decay
    # anneal: divide the rate by optim.anneal after each epoch. cosine: to zero at the last epoch. timed_cosine: to zero
    # at the last epoch or after train.max_minutes, whichever comes first; depends on the clock.
    schedule: str = choice("anneal", "cosine", "timed_cosine", "constant")
    anneal: float = number(1.2, 0, 1e6, above=True)  # divisor of optim.schedule=anneal
    warmup_steps: int = number(0, 0, COUNT)  # steps in which the rate rises from zero
    clip_norm: float = number(400.0, 0, UNLIMITED)  # greatest norm of the gradient; 0: no clipping
    layer_rates: dict[str, float] = numbers(  # factors of the rate, by start or end of names: {weight_hh: 0.3}
        {}, 0, 1e6, above=True, way_out="train.freeze=[NAME] keeps weights unchanged"
    )


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: int = number(20, 1, COUNT)  # passes over the training set
    max_minutes: float = number(0.0, 0, UNLIMITED)  # stop after this time of steps, evaluations excluded; 0: no limit
    max_steps: int = number(0, 0, COUNT)  # stop after this many optimizer steps; 0: no limit
    precision: str = choice("auto", "fp32", "bf16")  # auto: bf16 on a GPU, fp32 on a CPU
    graphs: str = choice("auto", "on", "off")  # steps as CUDA graphs; auto: where no sum within is of hosts or MPI
    wavefront: str = choice("auto", "on", "off")  # layers side by side in recorded steps; auto: where that is faster
    calibrate: int = number(0, 0, 1000)  # kernel tiles to time before the first step; 0: use the planner's choice
    objective: str = choice("ctc", "ctc_crf")  # ctc_crf: against all label sequences, weighted by an n-gram of labels
    ctc_weight: float = number(0.1, 0, 1e6)  # ctc_crf: weight of the CTC loss that is added
    denominator_order: int = number(4, 1, 20)  # ctc_crf: labels of the longest n-gram
    denominator_prune: int = number(0, 0, COUNT)  # ctc_crf: drop n-grams of 3 and more labels seen at most so often
    denominator_text: list[str] = field(default_factory=list)  # ctc_crf: texts or manifests; empty: the transcripts
    delay_penalty: float = number(0.0, 0, 100)  # CTC: cost of a label's later start, nats a label and output frame
    delay_penalty_after_epochs: int = number(0, 0, COUNT)  # epochs without it, in which the network begins to align
    consistency: float = number(0.0, 0, 1e6)  # CR-CTC: weight of the loss between two augmented views; 0: one view
    intermediate_weight: float = number(0.3, 0, 1)  # weight of the losses of model.intermediate; the rest is the last's
    # Pronunciations, as alphabet.lexicon: the classifiers of model.intermediate learn phones; only training needs it.
    intermediate_lexicon: str = ""
    noise_scale: bool = False  # log the gradient noise scale, an estimate of the largest useful batch
    accumulate: int = number(1, 1, COUNT)  # batches in one optimizer step
    average_decay: float = number(0.0, 0, 1, below=True)  # moving average of the weights, saved as best model; 0: off
    dropout_rise_epochs: int = removed(0, "model.dropout has its whole rate in every epoch")
    early_stop_epochs: int = number(0, 0, COUNT)  # stop after this many epochs without a better dev score; 0: off
    max_skipped_steps: int = number(20, 0, COUNT)  # steps with non-finite loss or gradient before training stops
    evaluate_every_epochs: int = number(1, 1, COUNT)  # epochs from one evaluation of the dev set to the next
    evaluate_from_epoch: int = removed(1, "evaluations start with the first epoch")
    log_every_steps: int = number(10, 1, COUNT)  # steps from one line of log.jsonl to the next
    metric: str = choice("wer", "cer")  # the dev score that selects the best model
    freeze: list[str] = field(default_factory=list)  # weights to keep unchanged, by start or end of names: [convs]
    seed: int = number(1, 0, SEED)  # of weights, batches and augmentation


@dataclass
class CheckpointConfig:
    """Content of the run folder."""

    every_minutes: float = number(10.0, 0, UNLIMITED)  # minutes from one saved trainer state to the next; 0: off
    every_steps: int = number(0, 0, COUNT)  # steps from one saved trainer state to the next; 0: off
    every_epochs: int = number(1, 1, COUNT)  # epochs from one saved trainer state and last model to the next
    keep_last: int = number(1, 1, COUNT)  # last models to keep, each with its epoch in its name if more than 1
    # Model file, run folder or shipped name whose architecture, features and weights start this run.
    init_from: str = ""
    resume: bool = True  # continue from the trainer state of the run folder, if there is one
    sharded: bool = False  # each rank writes its part of the trainer state; needs a run_dir that all hosts share


@dataclass
class CommConfig:
    """How ranks exchange gradients."""

    backend: str = choice("auto", "single", "mpi", "gloo", "nccl")  # transport between ranks; single: one process
    batch_norm: str = choice("shared", "local")  # statistics over the batch of all ranks, or of each rank
    overlap: bool = True  # send gradients during the backward pass
    bucket_mib: float = number(25.0, 0, 1_000_000, above=True)  # gradients that are sent together
    timeout_s: float = number(600.0, 0, UNLIMITED, above=True)  # a rank without progress for this long ends the job
    max_ranks: int = number(0, 0, 4096)  # processes that share run_dir join the run and leave it, so many; 0: off
    min_ranks: int = number(1, 1, 4096)  # with max_ranks: fewer ranks do not train, they wait for others
    wait_s: float = number(60.0, 0, UNLIMITED)  # with max_ranks: fewer than min_ranks for this long save and end


@dataclass
class DecodeConfig:
    """Log-probs to words: Q(y) = log p_ctc(y|x) + alpha log p_lm(y) + beta words(y), in natural logarithms."""

    method: str = choice("greedy", "beam", "native", "ctcdecode")  # beam: on the model's device; native: C++ on the CPU
    beam: int = number(64, 1, 1_000_000)  # hypotheses after each frame
    lm: str = ""  # n-gram model (binary or ARPA) of words, characters or pieces; empty: none
    alpha: float = number(0.5, -1e6, 1e6)  # weight of the language model
    beta: float = number(1.5, -1e6, 1e6)  # bonus for each word
    unknown_score: float = number(-23.0, -1e9, 1e9)  # added to log p_lm of words outside a word model's vocabulary
    lexicon: bool = False  # allow only words of the language model and hot words
    hot_words: list[str] = field(default_factory=list)  # words to prefer, as the network writes them; beam: phrases too
    hot_word_bonus: float = number(10.0, -1e6, 1e6)  # bonus for each hot word
    label_min_log_prob: float = number(-5.0, -UNLIMITED, 0, below=True)  # ignore less likely labels of a frame
    prune: float = number(10.0, 0, 1e12, above=True)  # drop hypotheses this far below the best one at each frame
    nbest: int = number(1, 1, 1_000_000)  # hypotheses to return
    rescore: str = ""  # recurrent model (`ds2 lm train`) that ranks the hypotheses of the search again; empty: none
    rescore_weight: float = number(0.5, 0, 1)  # its share of log p_lm; the n-gram model has the rest
    rescore_hypotheses: int = number(32, 1, 1_000_000)  # hypotheses to rank again
    rescore_in_search: bool = removed(False, "decode.rescore ranks the hypotheses after the search")
    threads: int = number(0, 0, 1024)  # of the methods native and ctcdecode; 0: one a core
    times: bool = True  # compute times and confidences of words by an alignment
    confidence: list[float] = numbers([1.0, 0.0], -1e9, 1e9, lengths=(2,))  # calibration: [slope, offset] of the logit
    keyword_alarms: list[float] = numbers([], 1e-9, 1e9, lengths=(0, 5))  # of one keyword an hour, at bonuses -4 to 4


@dataclass
class Config:
    """A training run."""

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
    run_dir: str = MISSING  # folder of the run: models, trainer states, logs
    device: str = "auto"  # auto | cpu | cuda | cuda:N
