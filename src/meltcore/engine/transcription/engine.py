"""Transcribes clips for the batch engine. Transcripts have the times of words. A batch takes one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from meltcore.common.errors import RequestError
from meltcore.engine.host.device import byte_budget, has_budget
from meltcore.engine.tasks.batch_engine import BatchEngine, OneStepTask
from meltcore.engine.tasks.device_task import DeviceTask
from meltcore.engine.transcription.ctc import Emissions, ctc_greedy
from meltcore.engine.transcription.memory import (
    BUDGET_TRANSCRIPTION_GRAPHS,
    MAX_CLIP_S,
    MAX_TRANSCRIPTION_COST,
    TRANSCRIPTION_GRAPHS,
    TranscriptionGraphs,
    plan_transcription,
    planned_config,
    transcription_graph_bytes,
    transcription_shape,
)
from meltcore.engine.transcription.speech_encoding import EncoderGraphs, encode_samples
from meltcore.engine.transcription.transducer import TransducerGraphs, transducer_greedy
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.models.checkpoints.checkpoint import Progress, find_transcriber, has_assets
from meltcore.models.checkpoints.nemo_archive import NemoArchive
from meltcore.models.configs.task_configs import IndicConformerConfig
from meltcore.models.loader import allocate, check_memory, parameter_bytes, planned_device, task_dtype
from meltcore.models.tasks.indicconformer import IndicConformer, TranscriberFiles
from meltcore.models.tasks.transcriber_assets import PublishedAssets
from meltcore.protocol.transcription import Transcribe, Transcript, TranscriptionOutputs, TranscriptionReady, Word
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection

_SAMPLE_BYTES = 2
# Seconds per RNN-T token of random weights: their heads would emit none, or all they may. Speech has 3 to 5 per s.
_SYNTHETIC_TOKEN_S = 0.25
_WORD_START = "\u2581"


class TranscriptionTask(DeviceTask, OneStepTask[Transcribe, Transcript]):
    """Transcribes clips with an IndicConformer model on one device."""

    result, message = Transcript, TranscriptionOutputs

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda _stage, _part: None
    ) -> None:
        """Load the model and plan its memory.

        Raises ConfigError when the checkpoint or a setting cannot work.
        """
        super().__init__(config)
        path = find_transcriber(config.model, dummy=self._is_dummy)
        assert path is not None, "the caller has found it"
        device = self._device
        self._token_texts: dict[str, list[str]] = {}

        def load(*, progress: Progress) -> IndicConformer:
            files: TranscriberFiles = PublishedAssets(path) if has_assets(path) else NemoArchive(path)
            try:
                model = _build(config, files.model_config, self._dtype, device)
                self._token_texts = _load(model, files, config, progress)
            finally:
                files.close()
            return model

        self.model = self._keep_model(load, progress)
        model_config = self.model.config
        self.max_samples = MAX_CLIP_S * model_config.features.sample_rate
        self._languages = {language: index for index, language in enumerate(model_config.languages)}
        max_shape = transcription_shape(model_config)
        weight_bytes = sum(values.nbytes for values in self.model.parameters())
        is_exact = has_budget(config, device)
        self.max_cost, self.memory = plan_transcription(
            model_config,
            weight_bytes=weight_bytes,
            element_size=self._dtype.itemsize,
            memory_bytes=byte_budget(config, device, weight_bytes),
            max_shape=max_shape,
            limit=MAX_TRANSCRIPTION_COST[device.type],
            graphs=BUDGET_TRANSCRIPTION_GRAPHS if is_exact else None,
        )
        graphs = BUDGET_TRANSCRIPTION_GRAPHS if is_exact else TRANSCRIPTION_GRAPHS
        self.model.encoder.pre_encode.max_elements = graphs.subsampling
        self.outside_bytes = transcription_graph_bytes(model_config, graphs) if is_exact else 0
        self.model.prepare(max_shape)
        is_cuda = device.type == "cuda"
        synthetic_frames = max(1, round(_SYNTHETIC_TOKEN_S / model_config.frame_s))
        self._frames_per_token = synthetic_frames if self._is_dummy else None
        self.memory += self._sleep_rows()
        self._encoder_graphs: EncoderGraphs | None = None
        self._rnnt_graphs: TransducerGraphs | None = None
        if is_cuda:
            with self._building():
                self._capture(graphs, max_shape, progress)
        self._load_s = time.monotonic() - self._start_s

    def _capture(self, graphs: TranscriptionGraphs, max_shape: int, progress: Callable[[str, float], None]) -> None:
        """Capture the graphs of few clips, so that no request waits for one."""
        capturer = GraphCapturer()
        self._encoder_graphs = EncoderGraphs(self.model, graphs.encoder_shapes(max_shape))
        self._encoder_graphs.capture(capturer, progress)
        self._rnnt_graphs = TransducerGraphs(self.model, graphs.transducer, self._frames_per_token)
        self._rnnt_graphs.capture(capturer, graphs.clips, max_shape)

    def cost(self, request: Transcribe) -> int:
        """Return the number of encoder frames of a clip.

        Raises RequestError if the clip or the language cannot be served.
        """
        if request.language not in self._languages:
            raise RequestError(
                f"language {request.language!r} is not one of the model's: {', '.join(self._languages)}",
                param="language",
            )
        samples, odd_bytes = divmod(len(request.samples), _SAMPLE_BYTES)
        min_samples = self.model.config.features.min_samples
        if odd_bytes or not min_samples <= samples <= self.max_samples:
            raise RequestError(
                f"a clip must have {min_samples} to {self.max_samples} samples of {_SAMPLE_BYTES} bytes; "
                f"it has {len(request.samples)} bytes",
                param="file",
            )
        return self.model.encoded_frames(samples)

    def compute(self, requests: Sequence[Transcribe], padded_cost: int) -> list[Transcript]:
        """Return one transcript per clip."""
        with torch.inference_mode():
            encoded, frames = self._encode(requests, padded_cost)
            emissions: list[Emissions | None] = [None] * len(requests)
            for rows, found in (*self._ctc(requests, encoded, frames), *self._rnnt(requests, encoded, frames)):
                for row, emission in zip(rows, found, strict=True):
                    emissions[row] = emission
        return [
            self._transcript(request, emission, count)
            for request, emission, count in zip(requests, emissions, frames.tolist(), strict=True)
            if emission is not None
        ]

    def ready(self) -> TranscriptionReady:
        """Return the ready message with the limits of requests."""
        features = self.model.config.features
        return TranscriptionReady(
            **self._ready_fields(),
            languages=list(self._languages),
            sample_rate=features.sample_rate,
            min_samples=features.min_samples,
            max_samples=self.max_samples,
            tokens="synthetic" if self._is_dummy else "real",
        )

    def _encode(self, requests: Sequence[Transcribe], padded_cost: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the encoder's output for clips padded to `padded_cost` frames, and each clip's number of frames."""
        features, factor = self.model.config.features, self.model.config.encoder.subsampling_factor
        # The longest clip of `padded_cost` encoder frames.
        size = padded_cost * factor * features.hop - (0 if features.drops_last_frame else 1)
        is_cuda = self._device.type == "cuda"
        samples = torch.zeros(len(requests), size, dtype=torch.int16, pin_memory=is_cuda)
        lengths = torch.zeros(len(requests), dtype=torch.int64, pin_memory=is_cuda)
        for row, (target, request) in enumerate(zip(samples.numpy(), requests, strict=True)):
            clip = np.frombuffer(request.samples, np.int16)
            target[: len(clip)] = clip
            lengths[row] = len(clip)
        on_device = samples.to(self._device, non_blocking=True), lengths.to(self._device, non_blocking=True)
        if self._encoder_graphs is not None:
            return self._encoder_graphs.encode(*on_device)
        return encode_samples(self.model, *on_device)

    def _ctc(
        self, requests: Sequence[Transcribe], encoded: torch.Tensor, frames: torch.Tensor
    ) -> list[tuple[list[int], list[Emissions]]]:
        """Decode the clips that ask for CTC, language by language. Returns pairs of clip indices and emissions."""
        by_language: dict[str, list[int]] = {}
        for row, request in enumerate(requests):
            if request.decoder == "ctc":
                by_language.setdefault(request.language, []).append(row)
        blank = self.model.config.blank
        return [
            (rows, ctc_greedy(self.model.ctc_logits(encoded[rows], self._languages[language]), frames[rows], blank))
            for language, rows in by_language.items()
        ]

    def _rnnt(
        self, requests: Sequence[Transcribe], encoded: torch.Tensor, frames: torch.Tensor
    ) -> list[tuple[list[int], list[Emissions]]]:
        """Decode the clips that ask for RNN-T, of all languages together.

        Returns pairs of clip indices and emissions.
        """
        rows = [row for row, request in enumerate(requests) if request.decoder == "rnnt"]
        if not rows:
            return []
        languages = torch.tensor([self._languages[requests[row].language] for row in rows], device=self._device)
        if len(rows) < len(requests):
            encoded, frames = encoded[rows], frames[rows]
        emissions = transducer_greedy(
            self.model,
            encoded,
            frames,
            languages,
            graphs=self._rnnt_graphs,
            frames_per_token=self._frames_per_token,
        )
        return [(rows, emissions)]

    def _transcript(self, request: Transcribe, emissions: Emissions, frames: int) -> Transcript:
        words = join_tokens(emissions, self._token_texts[request.language], self.model.config.frame_s)
        return Transcript(
            request_id=request.request_id,
            finish_reason="stop",
            text=" ".join(word.text for word in words),
            words=words,
            tokens=len(emissions.tokens),
            frames=frames,
        )


def transcription_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> BatchEngine[Transcribe, Transcript]:
    """Load a transcriber and return its engine. Raises ConfigError if the checkpoint cannot be loaded."""
    return BatchEngine(TranscriptionTask(config, progress))


def join_tokens(emissions: Emissions, texts: Sequence[str], frame_s: float) -> tuple[Word, ...]:
    """Join tokens to words with their times.

    `texts` has the texts of the language's tokens. A frame lasts `frame_s` seconds.
    """
    tokens = emissions.tokens
    starts = [index for index, token in enumerate(tokens) if index == 0 or texts[token].startswith(_WORD_START)]
    words = (_make_word(emissions, texts, frame_s, first, end) for first, end in pairwise([*starts, len(tokens)]))
    return tuple(word for word in words if word.text)


def _make_word(emissions: Emissions, texts: Sequence[str], frame_s: float, first: int, end: int) -> Word:
    """Return the word that consists of the tokens from `first` up to, but not including, `end`."""
    tokens = emissions.tokens[first:end]
    first_frame, end_frame = emissions.first_frames[first], emissions.end_frames[end - 1]
    return Word(
        "".join(texts[token] for token in tokens).removeprefix(_WORD_START),
        round(first_frame * frame_s, 3),
        round(end_frame * frame_s, 3),
        tuple(tokens),
        sum(emissions.logprobs[first:end]),
        sum(emissions.blank_logprobs[first_frame:end_frame]),
    )


def _build(
    config: EngineConfig, model_config: IndicConformerConfig, dtype: torch.dtype, device: torch.device
) -> IndicConformer:
    """Build the model with uninitialized weights on the device. Raises ConfigError if the weights do not fit."""
    model = _meta_model(model_config, dtype)
    check_memory(config.model, parameter_bytes(model), device, 1)
    return allocate(model, device)


def _meta_model(config: IndicConformerConfig, dtype: torch.dtype) -> IndicConformer:
    with torch.device("meta"):
        return IndicConformer(config).to(dtype)


def weight_bytes(model: ModelSection, on_cpu: bool) -> int:
    """Return the bytes of a model's weights, for a plan. Raises UnknownSizesError as `planned_config` does."""
    dtype = task_dtype(model.dtype, planned_device(on_cpu), on_gpu=torch.float16)
    assert model.checkpoint is not None
    config = planned_config(model.checkpoint, is_dummy=model.load_format == "dummy")
    return parameter_bytes(_meta_model(config, dtype))


def _load(
    model: IndicConformer, files: TranscriberFiles, config: EngineConfig, progress: Callable[[str, float], None]
) -> dict[str, list[str]]:
    """Load the weights, and return the texts of the tokens by language. With dummy weights the texts are numbers."""
    if config.load_format == "dummy":
        progress("making weights", 0.0)
        model.fill_dummy(config.seed)
        names = [f"{_WORD_START}{token}" for token in range(model.config.tokens_per_language)]
        return dict.fromkeys(model.config.languages, names)
    progress("reading tokenizers", 0.0)
    texts = files.token_texts(model.config)
    progress("loading weights", 0.0)
    model.load(files.tensors(), str(files.path), has_batch_norm=files.has_batch_norm)
    return texts
