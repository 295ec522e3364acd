"""Speech as files: every format, whole and piece by piece, in the encoding processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import numpy as np
import pytest
from waiting import WAIT_S

pytest.importorskip("soundfile", reason="the extra audio has soundfile")

import soundfile
from test_audio_decode import tone

from meltcore.audio.decode import AudioLimits, Clip, decode
from meltcore.audio.encode import make_encoder
from meltcore.audio.pool import AudioEncoders, missing_package
from meltcore.common.errors import RequestError

RATE = 24_000
FORMATS = ["wav", "pcm", "mp3", "opus", "flac", "aac"]


def samples_in(data: bytes, format_name: str) -> np.ndarray:
    if format_name == "pcm":
        return np.frombuffer(data, "<i2")
    clips = [part for part in decode(data, AudioLimits(RATE, 100.0)) if isinstance(part, Clip)]
    return np.concatenate([np.frombuffer(clip.samples, np.int16) for clip in clips])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_pieces_become_one_file(format_name: str, is_whole: bool) -> None:
    """A tone in four pieces, one of them empty: no gap, no change of phase, no click."""
    if (missing := missing_package(format_name)) is not None:
        pytest.skip(missing)
    speech, file = tone(6.0, RATE), make_encoder(format_name, RATE, is_whole=is_whole)
    pieces = [speech[:50_000], speech[50_000:60_000], speech[60_000:], speech[:0]]
    parts = [file.add(piece, is_last=index == 3) for index, piece in enumerate(pieces)]
    assert bool(parts[0]) is (not is_whole and format_name != "flac") or format_name == "aac"
    found = samples_in(b"".join(parts), format_name).astype(float)
    assert len(found) / RATE == pytest.approx(6.0, abs=0.1)
    middle = found[RATE : RATE * 5]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert spectrum.argmax() == 4 * 440
    noise = spectrum.sum() - spectrum[4 * 440 - 3 : 4 * 440 + 4].sum()
    assert noise < 0.05 * spectrum.sum()
    if format_name in ("wav", "flac", "pcm"):
        np.testing.assert_allclose(found, speech * 32767, atol=2)


def test_wav_header_has_sizes_when_they_are_known() -> None:
    whole = make_encoder("wav", RATE, is_whole=False).add(tone(1.0, RATE), is_last=True)
    assert soundfile.info(io.BytesIO(whole)).frames == RATE
    assert whole[4:8] == (len(whole) - 8).to_bytes(4, "little")
    begun = make_encoder("wav", RATE, is_whole=False).add(tone(1.0, RATE), is_last=False)
    assert (begun[40:44], begun[4:8]) == (b"\xff" * 4, b"\xff" * 4)
    loud = make_encoder("pcm", RATE, is_whole=False).add(np.array([2.0, -2.0], np.float32), is_last=True)
    assert np.frombuffer(loud, "<i2").tolist() == [32767, -32767]


@pytest.mark.slow
def test_processes_encode_many_files_and_survive_a_caller_that_leaves() -> None:
    async def scenario() -> None:
        encoders = AudioEncoders(2)
        await encoders.warm_up(RATE)
        pids = {worker.process.pid for worker in encoders._workers}

        async def speak(hz: float) -> np.ndarray:
            data, pieces = b"", np.split(tone(1.0, RATE, hz), 4)
            async with encoders.open("wav", RATE, is_whole=False) as file:
                for index, piece in enumerate(pieces):
                    data += await file.add(piece.tobytes(), is_last=index == 3)
            return samples_in(data, "wav")

        results = await asyncio.gather(*(speak(100.0 * number) for number in range(1, 9)))
        for number, found in enumerate(results, 1):
            np.testing.assert_allclose(found, tone(1.0, RATE, 100.0 * number) * 32767, atol=1)
        assert len(encoders._workers) == 2

        async with encoders.open("opus", RATE, is_whole=True) as file:
            leaving = asyncio.create_task(file.add(tone(60.0, RATE).tobytes(), is_last=False))
            await asyncio.sleep(0)
            leaving.cancel()
        assert len(await speak(300.0)) == RATE  # what it left is not taken for another's answer
        assert pids <= {worker.process.pid for worker in encoders._workers}

        async with encoders.open("wav", RATE, is_whole=False) as file:
            os.kill(file._worker.process.pid, signal.SIGKILL)
            with pytest.raises(RequestError, match="that encodes the speech has failed"):
                await file.add(b"", is_last=True)
        assert len(await speak(300.0)) == RATE
        await encoders.close()

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
