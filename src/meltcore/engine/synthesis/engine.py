"""Synthesizes speech for the batch engine. The speech of a text is returned chunk by chunk.

A step of the engine is one step of one batch of chunks. The next chunk of a request begins when the previous chunk has
been computed, so requests take turns. The first chunk is due when the request arrives, and a later chunk when the
speech before it ends. So the first sound of a new request comes before the fifth sentence of another request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.host.device import byte_budget, has_budget
from meltcore.engine.memory.workspace import graph_node_bytes
from meltcore.engine.synthesis.memory import (
    BUDGET_GRAPHS,
    GRAPHS,
    MAX_BATCH_FRAMES,
    MAX_SYNTHESIS_COST,
    max_speech_s,
    plan_synthesis,
    synthesis_shape,
)
from meltcore.engine.synthesis.speech_audio import MIN_REFERENCE_S, Samples, SpeechJoiner, prepare_reference
from meltcore.engine.synthesis.synthesis import (
    STEPS,
    SpeechSampler,
    Utterance,
    load_synthesis_model,
)
from meltcore.engine.synthesis.voices import dummy_voice, read_voices
from meltcore.engine.tasks.batch_engine import BatchEngine, BatchTask
from meltcore.engine.tasks.device_task import DeviceTask
from meltcore.protocol.batch import TaskFinishReason
from meltcore.protocol.synthesis import SynthesisOutputs, SynthesisReady, Synthesize, Synthesized
from meltcore.settings.config import EngineConfig
from meltcore.text.synthesis.chunks import (
    MAX_REFERENCE_S,
    MAX_TEXT,
    ReferenceText,
    TextChunk,
    plan_chunks,
)
from meltcore.text.synthesis.vocabulary import load_vocabulary
from meltcore.text.synthesis.voices import PUBLISHED_VOICES, find_voice

MIN_SPEED, MAX_SPEED = 0.25, 4.0
_SAMPLE_BYTES = 4
_MAX_UPLOAD_S = 60.0  # of a reference with the silence at its ends


class _Speaker(NamedTuple):
    """A reference as the model uses it: prepared samples, and the text that is spoken in them."""

    samples: Samples
    text: ReferenceText


@dataclass
class _Speech:
    """A request of which at least one chunk was queued."""

    request: Synthesize
    chunks: list[TextChunk]
    mels: torch.Tensor
    reference_frames: int
    noise: torch.Generator
    joiner: SpeechJoiner
    num_steps: int
    arrived_s: float
    spoken: int = 0  # chunks
    plays_until_s: float = 0.0  # if playback began with the first sound


class SynthesisTask(DeviceTask, BatchTask[Synthesize, Synthesized]):
    """Speaks texts with an IndicF5 model on one device."""

    result, message = Synthesized, SynthesisOutputs
    gpu_dtype = torch.bfloat16

    def __init__(
        self, config: EngineConfig, progress: Callable[[str, float], None] = lambda _stage, _part: None
    ) -> None:
        """Load the model and its voices, and plan the memory.

        Raises ConfigError when the checkpoint, a voice or a setting cannot work.
        """
        super().__init__(config)
        checkpoint = self._open_checkpoint(config)
        self._vocabulary = load_vocabulary(checkpoint, is_dummy=self._is_dummy)
        self.model = self._keep_model(
            partial(
                load_synthesis_model,
                checkpoint,
                self._dtype,
                self._device,
                self._vocabulary.size,
                dummy_seed=config.seed if self._is_dummy else None,
            ),
            progress,
        )
        self._mel = self.model.config.mel
        self._max_speech_s = max_speech_s(self.model.config)
        self.max_reference_s = min(MAX_REFERENCE_S, 0.6 * self._max_speech_s)
        weight_bytes = sum(values.nbytes for values in self.model.parameters()) + self.model.modulations.nbytes
        self.max_shape = synthesis_shape(self.model.config)
        max_batch_frames, self.max_cost, self.memory = plan_synthesis(
            self.model.config,
            weight_bytes=weight_bytes,
            element_size=self.model.dtype.itemsize,
            memory_bytes=byte_budget(config, self._device, weight_bytes),
            max_shape=self.max_shape,
            limits=(MAX_BATCH_FRAMES[self._device.type], MAX_SYNTHESIS_COST[self._device.type]),
            has_graphs=self._device.type == "cuda",
            is_exact=has_budget(config, self._device),
        )
        is_exact = has_budget(config, self._device)
        graph_limits = BUDGET_GRAPHS if is_exact else GRAPHS
        self.outside_bytes = graph_node_bytes(graph_limits[1], self.model.config.num_layers) if is_exact else 0
        self.memory += self._sleep_rows()
        with self._building():
            self._sampler = SpeechSampler(self.model, max_batch_frames, graph_limits)
        self._voices = self._load_voices(config, None if self._is_dummy else checkpoint.folder)
        self._plans: dict[str, tuple[_Speaker, list[TextChunk]]] = {}  # of requests that wait
        self._running: dict[str, _Speech] = {}
        self._load_s = time.monotonic() - self._start_s

    def cost(self, request: Synthesize) -> int:
        """Return the number of frames of the longest chunk, including its reference.

        Raises RequestError if the text cannot be spoken.
        """
        if not (math.isfinite(request.speed) and MIN_SPEED <= request.speed <= MAX_SPEED):
            raise RequestError(f"speed must be {MIN_SPEED:g} to {MAX_SPEED:g}; got {request.speed:g}", param="speed")
        if request.num_steps not in (0, *STEPS):
            steps = ", ".join(map(str, STEPS))
            raise RequestError(f"num_steps must be one of {steps}; got {request.num_steps}", param="num_steps")
        if not 0 <= request.seed < 2**63:
            raise RequestError(f"seed must be from 0 to 2^63 - 1; got {request.seed}", param="seed")
        speaker = self._speaker(request)
        chunks = plan_chunks(
            request.text, speaker.text, self._vocabulary, speed=request.speed, max_speech_s=self._max_speech_s
        )
        frames = max(chunk.frames for chunk in chunks)
        if frames > self.max_shape:
            raise RequestError(
                f"a chunk takes {frames} frames with its reference, the limit is {self.max_shape}: reference or "
                "speed is slow",
                param="speed",
            )
        self._plans[request.request_id] = speaker, chunks
        return frames

    def start(self, requests: Sequence[Synthesize], padded_cost: int) -> None:  # noqa: ARG002 - chunks have lengths of their own
        """Queue the first chunks of these requests."""
        for request in requests:
            speaker, chunks = self._plans.pop(request.request_id)
            with torch.inference_mode():
                mels = self.model.mel_spectrogram(torch.from_numpy(speaker.samples).to(self._device))
            speech = _Speech(
                request,
                chunks,
                mels,
                speaker.text.frames,
                # On the host and of the request alone, so that neither the device nor its company changes the noise.
                torch.Generator().manual_seed(request.seed),
                SpeechJoiner(self._mel.sample_rate),
                request.num_steps or STEPS[0],
                request.arrived_s or time.monotonic(),
            )
            self._running[request.request_id] = speech
            self._queue_chunk(speech)

    def step(self) -> list[Synthesized]:
        """Compute one step of the batch that is due first. Return one result per completed chunk."""
        return [self._on_samples(self._running[key], samples) for key, samples in self._sampler.step()]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests, including their chunks in batches."""
        self._sampler.cancel(request_ids)
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def ended(self, request_id: str, reason: TaskFinishReason, error: str | None) -> Synthesized:
        """Return a result without samples, which ends a request."""
        self._plans.pop(request_id, None)
        return super().ended(request_id, reason, error)

    def ready(self) -> SynthesisReady:
        """Return the ready message with the limits of requests."""
        return SynthesisReady(
            **self._ready_fields(),
            voices=list(self._voices),
            sample_rate=self._mel.sample_rate,
            max_text=MAX_TEXT,
            min_reference_s=MIN_REFERENCE_S,
            max_reference_s=self.max_reference_s,
            min_speed=MIN_SPEED,
            max_speed=MAX_SPEED,
            steps=list(STEPS),
            tokens="synthetic" if self._vocabulary.is_synthetic else "real",
        )

    def _load_voices(self, config: EngineConfig, folder: Path | None) -> dict[str, _Speaker]:
        """Return the checkpoint's voices.

        Without `folder` the weights are random, and the voices have the names of the published voices.
        """
        if folder is None:
            rate, max_s = self._mel.sample_rate, 0.9 * self.max_reference_s
            voices = {name: dummy_voice(rate, max_s, seed) for seed, name in enumerate(PUBLISHED_VOICES)}
        else:
            voices = read_voices(folder, self._mel.sample_rate)
        speakers = {}
        for name, voice in voices.items():
            try:
                speakers[name] = self._prepare(voice.samples, voice.text)
            except RequestError as error:
                raise ConfigError(f"{config.model}, voice {name}: {error}") from error
        return speakers

    def _speaker(self, request: Synthesize) -> _Speaker:
        """Return the voice or the reference of a request. Raises RequestError."""
        if request.voice and request.reference:
            raise RequestError("give either a voice or a reference", param="voice")
        if request.voice:
            return self._voices[find_voice(request.voice, list(self._voices))]
        if not request.reference:
            voice_names = ", ".join(self._voices) or "none"
            raise RequestError(f"give a voice ({voice_names}) or a reference with its text", param="voice")
        num_bytes, max_bytes = len(request.reference), int(_MAX_UPLOAD_S * self._mel.sample_rate) * _SAMPLE_BYTES
        if num_bytes % _SAMPLE_BYTES or num_bytes > max_bytes:
            raise RequestError(
                f"the reference has {num_bytes} bytes; it must have float32 samples of at most {_MAX_UPLOAD_S:g} s, "
                f"{max_bytes} bytes",
                param="reference",
            )
        return self._prepare(np.frombuffer(request.reference, np.float32), request.reference_text)

    def _prepare(self, samples: Samples, text: str) -> _Speaker:
        reference = prepare_reference(samples, self._mel.sample_rate, self.max_reference_s)
        frames = len(reference.samples) // self._mel.hop
        words = ReferenceText.read(text, self._vocabulary, frames=frames, seconds=reference.seconds)
        return _Speaker(reference.samples, words)

    def _queue_chunk(self, speech: _Speech) -> None:
        """Queue the next chunk of a request. It is due when the speech before it ends."""
        chunk, request = speech.chunks[speech.spoken], speech.request
        self._sampler.add(
            Utterance(
                key=request.request_id,
                due=(request.priority, speech.plays_until_s or speech.arrived_s),
                reference=speech.mels,
                token_ids=chunk.token_ids,
                frames=chunk.frames,
                first_frame=speech.reference_frames,
                noise=torch.randn(chunk.frames, self._mel.num_mels, generator=speech.noise),
                num_steps=speech.num_steps,
            )
        )

    def _on_samples(self, speech: _Speech, samples: Samples) -> Synthesized:
        """Return the result of a chunk, and queue the next one."""
        request_id = speech.request.request_id
        speech.spoken += 1
        is_last = speech.spoken == len(speech.chunks)
        if not np.isfinite(samples).all():
            del self._running[request_id]
            reason = f"the speech of chunk {speech.spoken} is not finite; --dtype bfloat16 or float32 has a wider range"
            return self.ended(request_id, "error", reason)
        part = speech.joiner.add(samples, is_last=is_last)
        speech.plays_until_s = (speech.plays_until_s or time.monotonic()) + len(part) / self._mel.sample_rate
        if is_last:
            del self._running[request_id]
        else:
            self._queue_chunk(speech)
        return Synthesized(
            request_id=request_id,
            finish_reason="stop" if is_last else None,
            samples=part.tobytes(),
            chunk=speech.spoken,
            chunks=len(speech.chunks),
        )


def synthesis_engine(
    config: EngineConfig, progress: Callable[[str, float], None]
) -> BatchEngine[Synthesize, Synthesized]:
    """Load a synthesis checkpoint and return its engine. Raises ConfigError if the checkpoint cannot be loaded."""
    return BatchEngine(SynthesisTask(config, progress))
