"""One tiny real request, which an engine has to answer before it gets those of clients."""

from __future__ import annotations

import asyncio
import math
from array import array
from typing import Any

from meltcore.common.errors import EngineDeadError
from meltcore.fleet.run.replica import Replica
from meltcore.protocol.engines import FromEngine, ServedReady, ToEngine
from meltcore.protocol.generation import AddRequest, GenerationReady, StepOutputs, pack_token_ids
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.synthesis import SynthesisOutputs, SynthesisReady, Synthesize
from meltcore.protocol.transcription import Transcribe, TranscriptionOutputs, TranscriptionReady
from meltcore.protocol.translation import Translate, TranslationOutputs
from meltcore.serve.engines.engine_process import EngineProcess

PROBE_ID = "readiness"
_TONE_HZ = 220.0


async def probe(replica: Replica, engine: EngineProcess, limits: ServedReady, limit_s: float) -> None:
    """Let the engine of a replica answer one tiny request. Raises EngineDeadError when it does not."""
    replica.probe = asyncio.get_running_loop().create_future()
    engine.send(probe_request(limits))
    ended = asyncio.create_task(engine.wait())
    waited: set[asyncio.Future[Any]] = {replica.probe, ended}
    try:
        await asyncio.wait(waited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if replica.probe.done():
            problem = replica.probe.result()
        elif ended.done():
            problem = ended.result()
        else:
            problem = f"no answer within {limit_s:g} s"
    finally:
        ended.cancel()
        replica.probe = None
    if problem:
        raise EngineDeadError(f"the readiness request failed: {problem}")


def probe_request(engine: ServedReady) -> ToEngine:
    """Return the request: a token, a sentence of a few tokens, the shortest clip of silence, or a word to speak."""
    if isinstance(engine, GenerationReady):
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        return AddRequest(PROBE_ID, pack_token_ids([min(1, engine.vocab_size - 1)]), sampling)
    if isinstance(engine, TranscriptionReady):
        silence = bytes(2 * engine.min_samples)
        return Transcribe(request_id=PROBE_ID, samples=silence, language=engine.languages[0], decoder="ctc")
    if isinstance(engine, SynthesisReady):
        voice = engine.voices[0] if engine.voices else ""
        return Synthesize(
            request_id=PROBE_ID,
            text="नमस्ते",
            voice=voice,
            reference=b""
            if voice
            else _tone(engine.sample_rate, (engine.min_reference_s + engine.max_reference_s) / 2),
            reference_text="" if voice else "नमस्ते",
            num_steps=min(engine.steps),
        )
    last = engine.vocab_size - 1
    return Translate(request_id=PROBE_ID, token_ids=[min(token_id, last) for token_id in (4, 5, 6, 2)])


def probe_error(message: FromEngine) -> str | None:
    """Return the error with which `message` ends the request: "" for a whole answer; None: it has not ended yet."""
    if isinstance(message, StepOutputs | SynthesisOutputs | TranscriptionOutputs | TranslationOutputs):
        for output in message.outputs:
            if output.request_id == PROBE_ID and output.finish_reason is not None:
                is_whole = output.finish_reason in ("stop", "length")
                return "" if is_whole else output.error or f"the engine ended it: {output.finish_reason}"
    return None


def _tone(sample_rate: int, duration_s: float) -> bytes:
    """Return float32 samples of a tone, for a model that speaks in the voice of a reference."""
    step = 2 * math.pi * _TONE_HZ / sample_rate
    return array("f", (0.3 * math.sin(step * index) for index in range(round(sample_rate * duration_s)))).tobytes()
