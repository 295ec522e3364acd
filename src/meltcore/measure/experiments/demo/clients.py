"""Requests every route of the fleet with the clients that users have: `openai`, `dwani`, or plain HTTP.

The clients are not modified. Each route is one check, which fails if the answer is not the expected one.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import time
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meltcore.common.errors import MeltcoreError
from meltcore.measure.documents.schema import CheckResult
from meltcore.measure.load.tasks.task import Problem, default_task, tasks
from meltcore.measure.load.tasks.transcription import DEMO_LANGUAGE, clips
from meltcore.measure.load.tasks.translation import phrases
from meltcore.measure.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE

PACKAGES = ("openai", "dwani")
LIMIT_S = 120.0  # of one request
_CHAT, _TRANSLATE = "/v1/chat/completions", "/v1/translate"
_SPEECH, _TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"
_EMBEDDINGS = "/v1/embeddings"
_RERANK, _SCORE = ("/v1/rerank", "/v2/rerank", "/rerank"), ("/v1/score", "/score")
_QUESTION, _ANSWER = "What is 7 * 8?", "56"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_TEXT = "go at seven"
_NUM_STEPS = 8  # of synthesis: a quarter of the usual number
_MAX_DETAIL_CHARS = 200
_SPEECH_STARTS = (b"ID3", b"\xff\xf3", b"\xff\xfb")  # of an MP3 file


class _WrongError(MeltcoreError):
    """Reports an answer that is not the expected one."""


@dataclass(frozen=True)
class _Fleet:
    """The server under test, and the data to send to it. `models` maps the request path of a task to a model."""

    url: str
    models: Mapping[str, str]
    openai: Any
    dwani: Any
    http: Any
    clip: Problem
    clip_path: Path
    phrase: Problem

    def send(self, path: str, method: str = "POST", status: int = 200, **fields: Any) -> Any:
        """Return the response to a plain HTTP request. Raises _WrongError if its status is not `status`."""
        response = self.http.request(method, f"{self.url}{path}", timeout=LIMIT_S, **fields)
        _expect(response.status_code == status, f"status {response.status_code}: {response.text[:120]}")
        return response


_Run = Callable[[_Fleet], str]


@dataclass(frozen=True)
class _Check:
    """A check that requests the routes `paths`. It runs only if the fleet has the tasks of the paths in `needs`.

    `run` returns a description of what it observed, or raises an error.
    """

    name: str
    paths: tuple[str, ...]
    needs: tuple[str, ...]
    run: _Run


_CHECKS: list[_Check] = []


def _opens(name: str, *paths: str, needs: Collection[str] = ()) -> Callable[[_Run], _Run]:
    """Return a decorator that registers a function as the check called `name`, which requests `paths`.

    The check runs if the fleet has the tasks of the paths in `needs`. The default of `needs` is the paths in `paths`
    that belong to a task, or the chat path without such paths.
    """

    def register(function: _Run) -> _Run:
        needed_paths = needs or {task.path for task in tasks().values()}.intersection(paths) or (default_task().path,)
        _CHECKS.append(_Check(name, paths, tuple(needed_paths), function))
        return function

    return register


def missing_clients() -> str:
    """Return which clients are not installed, and how to install them. Returns "" if all are."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    verb = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {verb} not installed (pip install 'meltcore[clients]')" if missing else ""


def check_routes(
    url: str, models: Mapping[str, str], folder: Path, on_check: Callable[[CheckResult], None] = lambda _check: None
) -> list[CheckResult]:
    """Request the routes of the tasks in `models`, which maps task to model name. Returns one check per route.

    A check of a task that is not in `models` is NOT_APPLICABLE. `folder` is for the files that clients upload.
    `on_check` receives each check as it ends.
    """
    import dwani
    import openai
    import requests

    logging.getLogger("dwani").addHandler(logging.NullHandler())  # its errors are raised too

    clip, phrase = clips(1, 1)[0], phrases(1, 1)[0]
    clip_path = folder / "clip.wav"
    clip_path.write_bytes(clip.audio_wav or b"")
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client,
        requests.Session() as session,
    ):
        by_path = {tasks()[task].path: model for task, model in models.items()}
        fleet = _Fleet(url, by_path, client, dwani.DwaniClient("none", url), session, clip, clip_path, phrase)
        checks = []
        for check in _CHECKS:
            lacking = [path for path in check.needs if path not in by_path]
            reason = f"no model was served at {', '.join(lacking)}"
            result = CheckResult(name=check.name, status="NOT_APPLICABLE", detail=reason)
            checks.append(result if lacking else _run_check(check, fleet))
            on_check(checks[-1])
        return checks


def _run_check(check: _Check, fleet: _Fleet) -> CheckResult:
    started_s = time.monotonic()
    try:
        finding = check.run(fleet)[:_MAX_DETAIL_CHARS]
    except Exception as error:  # whatever a client raises is the finding
        detail = f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS]
        return CheckResult(name=check.name, status="FAIL", detail=detail)
    return CheckResult(name=check.name, status="PASS", detail=f"{finding} ({time.monotonic() - started_s:.2f} s)")


def _expect(condition: object, finding: str) -> str:
    """Return `finding` if `condition` holds. Raises _WrongError with `finding` otherwise."""
    if not condition:
        raise _WrongError(finding)
    return finding


def _refusal(fleet: _Fleet, model: str, error_name: str) -> str:
    """Return the client's message for a chat that the server must refuse with the client's error `error_name`."""
    import openai

    try:
        fleet.openai.chat.completions.create(model=model, messages=_MESSAGES)
    except getattr(openai, error_name) as error:
        return str(error)
    raise _WrongError("it was answered")


# --- openai ---------------------------------------------------------------------------------------------------------


@_opens("openai: models.list, models.retrieve", "/v1/models", "/v1/models/{name}")
def _models(fleet: _Fleet) -> str:
    names = [model.id for model in fleet.openai.models.list()]
    _expect(set(fleet.models.values()) <= set(names), f"listed are {names}")
    model = fleet.openai.models.retrieve(fleet.models[_CHAT])
    _expect(model.owned_by == "meltcore", repr(model))
    return ", ".join(names)


@_opens("openai: chat.completions.create", _CHAT)
def _chat(fleet: _Fleet) -> str:
    answer = fleet.openai.chat.completions.create(model=fleet.models[_CHAT], messages=_MESSAGES, temperature=0)
    text = answer.choices[0].message.content
    return _expect(_ANSWER in text and answer.usage.completion_tokens > 0, repr(text))


@_opens("openai: chat.completions.create, streamed", _CHAT)
def _chat_stream(fleet: _Fleet) -> str:
    stream = fleet.openai.chat.completions.create(
        model=fleet.models[_CHAT],
        messages=_MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    _expect(_ANSWER in text and chunks[-1].usage.completion_tokens > 0, repr(text))
    return f"{len(chunks)} chunks"


@_opens("openai: completions.create, whole and streamed", "/v1/completions")
def _completions(fleet: _Fleet) -> str:
    fields = {"model": fleet.models[_CHAT], "prompt": "7 * 8 =", "max_tokens": 8, "temperature": 0}
    text = fleet.openai.completions.create(**fields).choices[0].text
    chunk_texts = [chunk.choices[0].text for chunk in fleet.openai.completions.create(**fields, stream=True)]
    _expect(text and text == "".join(chunk_texts), f"{text!r} and {chunk_texts}")
    return repr(text)


@_opens("openai: audio.speech.create, read back by audio.transcriptions.create", _SPEECH, _TRANSCRIPTIONS)
def _speech(fleet: _Fleet) -> str:
    model = fleet.models[_SPEECH]
    audio = fleet.openai.audio.speech.create(model=model, voice="seven", input=_TEXT, response_format="wav").content
    _expect(audio[:4] == b"RIFF", f"it begins with {audio[:4]!r}")
    transcript = fleet.openai.audio.transcriptions.create(
        model=fleet.models[_TRANSCRIPTIONS], file=("speech.wav", audio), language=DEMO_LANGUAGE
    ).text
    _expect(transcript, "nothing was heard in it")
    return f"{len(audio):,} bytes, heard as {transcript!r}"


@_opens("openai: audio.speech.with_streaming_response.create", _SPEECH)
def _speech_stream(fleet: _Fleet) -> str:
    with fleet.openai.audio.speech.with_streaming_response.create(
        model=fleet.models[_SPEECH], voice="seven", input=_TEXT, extra_body={"num_steps": _NUM_STEPS}
    ) as response:
        parts = list(response.iter_bytes())
    _expect(b"".join(parts).startswith(_SPEECH_STARTS), f"it begins with {parts[0][:4]!r}")
    return f"{sum(map(len, parts)):,} bytes of MP3"


@_opens("openai: audio.transcriptions.create, with word times", _TRANSCRIPTIONS)
def _transcription(fleet: _Fleet) -> str:
    transcription = fleet.openai.audio.transcriptions.create(
        model=fleet.models[_TRANSCRIPTIONS],
        file=("clip.wav", fleet.clip.audio_wav),
        language=DEMO_LANGUAGE,
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    _expect(transcription.text == fleet.clip.answer, f"{transcription.text!r}, not {fleet.clip.answer!r}")
    _expect(len(transcription.words) == len(fleet.clip.answer.split()), f"{len(transcription.words)} words have times")
    return repr(transcription.text)


@_opens("openai: an unknown model is a 404 that lists the models", _CHAT)
def _unknown_model(fleet: _Fleet) -> str:
    error = _refusal(fleet, "no-such-model", "NotFoundError")
    return _expect(fleet.models[_CHAT] in error, error)


@_opens("openai: a model of another task is a 400", _CHAT, needs=(_CHAT, _SPEECH))
def _wrong_task(fleet: _Fleet) -> str:
    return _refusal(fleet, fleet.models[_SPEECH], "BadRequestError")


# --- dwani ----------------------------------------------------------------------------------------------------------


@_opens("dwani: chat.create", "/v1/indic_chat")
def _indic_chat(fleet: _Fleet) -> str:
    answer = fleet.dwani.chat("What is 37 + 45?", "english", "kannada", model="gemma3")["response"]
    _expect(answer.strip(), "the answer is empty")
    return repr(answer)


@_opens("dwani: chat.direct", "/v1/chat_direct")
def _chat_direct(fleet: _Fleet) -> str:
    answer = fleet.dwani.chat_direct(_QUESTION, model="qwen3")["response"]
    return _expect(_ANSWER in answer, repr(answer))


@_opens("dwani: translate.run_translate", _TRANSLATE)
def _translate(fleet: _Fleet) -> str:
    translations = fleet.dwani.translate([fleet.phrase.given], "english", "kannada")["translations"]
    _expect(translations == [fleet.phrase.answer], f"{translations}, not {fleet.phrase.answer!r}")
    return translations[0]  # type: ignore[no-any-return]


@_opens("dwani: asr.transcribe", "/v1/transcribe", needs=(_TRANSCRIPTIONS,))
def _transcribe(fleet: _Fleet) -> str:
    transcript = fleet.dwani.transcribe(str(fleet.clip_path), "english")["text"]
    _expect(transcript == fleet.clip.answer, f"{transcript!r}, not {fleet.clip.answer!r}")
    kannada = fleet.dwani.transcribe(str(fleet.clip_path), "kannada")["text"]
    _expect(kannada and not kannada.isascii(), repr(kannada))
    return f"{transcript!r}, as kannada {kannada!r}"


@_opens("dwani: audio.speech", _SPEECH)
def _dwani_speech(fleet: _Fleet) -> str:
    audio = fleet.dwani.speech(_TEXT, "mp3", "kannada")
    _expect(audio.startswith(_SPEECH_STARTS), f"it begins with {audio[:4]!r}")
    return f"{len(audio):,} bytes of MP3"


@_opens("dwani: vision and documents are refused with 501", "/v1/visual_query_direct", "/v1/indic_visual_query",
        "/v1/ocr", "/v1/extract-text-all")  # fmt: skip
def _vision(fleet: _Fleet) -> str:
    import dwani

    path, reasons = str(fleet.clip_path), []
    for call in (fleet.dwani.caption, fleet.dwani.caption_direct, fleet.dwani.ocr_image, fleet.dwani.document_ocr_all):
        try:
            call(path)
        except (dwani.DwaniAPIError, OSError) as error:
            reasons.append(str(error))
        else:
            raise _WrongError("it was answered")
    _expect(all("501" in reason for reason in reasons) and "vision model" in reasons[0], str(reasons))
    return reasons[0]


# --- plain HTTP: what no client has a method for -----------------------------------------------------------------


@_opens("HTTP: /v1/chat", "/v1/chat")
def _talk(fleet: _Fleet) -> str:
    reply = fleet.send("/v1/chat", json={"text": _QUESTION}).json()["reply"]
    return _expect(_ANSWER in reply, repr(reply))


@_opens("HTTP: /v1/speech_to_speech, streamed as events", "/v1/speech_to_speech",
        needs=(_CHAT, _SPEECH, _TRANSCRIPTIONS))  # fmt: skip
def _speech_to_speech(fleet: _Fleet) -> str:
    form = {"language": "english", "stream_format": "sse", "num_steps": str(_NUM_STEPS)}
    response = fleet.send(
        "/v1/speech_to_speech", data=form, files={"file": ("clip.wav", fleet.clip.audio_wav)}, stream=True
    )
    lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines]
    _expect(not any("error" in event for event in events), lines[-1].decode(errors="replace"))
    transcript = next(event["text"] for event in events if event["type"] == "transcript.text.done")
    audio = b"".join(base64.b64decode(each["audio"]) for each in events if each["type"] == "speech.audio.delta")
    _expect(transcript == fleet.clip.answer, f"{transcript!r}, not {fleet.clip.answer!r}")
    _expect(audio.startswith(_SPEECH_STARTS) and events[-1]["type"] == "speech.audio.done", str(events[-1])[:120])
    return f"{len(events)} events, {len(audio):,} bytes of MP3"


@_opens("HTTP: the forms of workers: transcribe_batch, translate, audio/speech, audio/speech_batch",
        "/transcribe_batch", "/v1/audio/speech_batch", needs=(_TRANSLATE, _SPEECH, _TRANSCRIPTIONS))  # fmt: skip
def _workers(fleet: _Fleet) -> str:
    files = [("files", ("clip.wav", fleet.clip.audio_wav))] * 2
    transcripts = fleet.send("/transcribe_batch/?language=english", files=files).json()["transcriptions"]
    _expect(transcripts == [fleet.clip.answer] * 2, str(transcripts))
    codes = {"src_lang": SOURCE_LANGUAGE, "tgt_lang": TARGET_LANGUAGE}
    body = {"sentences": [fleet.phrase.given], **codes}
    translated = fleet.send("/translate", params=codes, json=body).json()["translations"]
    _expect(translated == [fleet.phrase.answer], str(translated))
    audio = fleet.send("/audio/speech", json={"text": _TEXT, "num_steps": _NUM_STEPS}).content
    _expect(audio[:4] == b"RIFF", f"speech begins with {audio[:4]!r}")
    texts = {"input": ["go", "at"], "num_steps": _NUM_STEPS}
    names = zipfile.ZipFile(io.BytesIO(fleet.send("/v1/audio/speech_batch", json=texts).content)).namelist()
    _expect(names == ["audio_00.mp3", "audio_01.mp3"], str(names))
    return f"2 transcripts, a translation, {len(names) + 1} files of speech"


@_opens("HTTP: routes of images and PDF files answer 501 in words", *(
    "/app-extract-text", "/v1/extract-text", "/v1/extract-text-all-chunk", "/v1/indic-extract-text",
    "/v1/indic-extract-text-all", "/v1/summarize-pdf", "/v1/indic-summarize-pdf", "/v1/indic-summarize-pdf-all",
    "/v1/custom-prompt-pdf", "/v1/indic-custom-prompt-pdf", "/v1/indic-custom-prompt-pdf-all",
    "/v1/indic-custom-prompt-kannada-pdf"))  # fmt: skip
def _documents(fleet: _Fleet) -> str:
    paths = next(check.paths for check in _CHECKS if check.run is _documents)
    for path in paths:
        detail = fleet.send(path, status=501, files={"file": b"%PDF"}).json()["detail"]
        _expect("vision model" in detail, detail)
    return f"{len(paths)} routes"


@_opens("HTTP: /tokenize and /detokenize", "/tokenize", "/detokenize")
def _tokenize(fleet: _Fleet) -> str:
    model = fleet.models[_CHAT]
    tokens = fleet.send("/tokenize", json={"model": model, "prompt": _QUESTION}).json()["tokens"]
    text = fleet.send("/detokenize", json={"model": model, "tokens": tokens}).json()["prompt"]
    _expect(_QUESTION in text, repr(text))
    return f"{len(tokens)} tokens"


@_opens("openai: responses, streamed, and their input tokens", "/v1/responses", "/v1/responses/input_tokens")
def _responses(fleet: _Fleet) -> str:
    asked: Any = {"model": fleet.models[_CHAT], "input": _QUESTION, "max_output_tokens": 64, "temperature": 0}
    whole = fleet.openai.responses.create(**asked)
    events = list(fleet.openai.responses.create(**asked, stream=True))
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    _expect(_ANSWER in whole.output_text, repr(whole.output_text))
    _expect(streamed == whole.output_text, f"{streamed!r} streamed, {whole.output_text!r} whole")
    counted = fleet.openai.responses.input_tokens.count(model=asked["model"], input=_QUESTION).input_tokens
    _expect(whole.usage.input_tokens == counted, f"{whole.usage.input_tokens} tokens, {counted} counted")
    return f"{whole.status}, {len(events)} events"


@_opens("HTTP: /v1/messages and /v1/messages/count_tokens", "/v1/messages", "/v1/messages/count_tokens")
def _anthropic(fleet: _Fleet) -> str:
    request = {"model": fleet.models[_CHAT], "messages": _MESSAGES}
    count = fleet.send("/v1/messages/count_tokens", json=request).json()["input_tokens"]
    message = fleet.send("/v1/messages", json={**request, "max_tokens": 64, "temperature": 0}).json()
    text, usage = message["content"][0]["text"], message["usage"]
    _expect(_ANSWER in text, repr(text))
    _expect(usage["input_tokens"] + usage["cache_read_input_tokens"] == count, f"{usage}, but {count} tokens counted")
    return f"{count} tokens, {message['stop_reason']}"


@_opens("openai: embeddings; HTTP: /v1/rerank and /v1/score", _EMBEDDINGS, *_RERANK, *_SCORE, needs=(_EMBEDDINGS,))
def _embeddings(fleet: _Fleet) -> str:
    model = fleet.models[_EMBEDDINGS]
    vectors = fleet.openai.embeddings.create(model=model, input=[_TEXT, _QUESTION]).data
    for path in _RERANK:
        pair = {"model": model, "query": _TEXT, "documents": [_QUESTION, {"text": _TEXT}]}
        best = fleet.send(path, json=pair).json()["results"][0]["index"]
        _expect(best == 1, f"{path}: document {best} is nearest to the second one")
    for path in _SCORE:
        scores = fleet.send(path, json={"model": model, "text_1": _TEXT, "text_2": [_TEXT]}).json()["data"]
    return f"{len(vectors[0].embedding)} values, score {scores[0]['score']:.3f}"


@_opens("HTTP: /, /docs, /openapi.json, /health, /v1/health, /live, /v1/status, /metrics", "/health", "/v1/health",
        "/live", "/v1/status", "/metrics")  # fmt: skip
def _pages(fleet: _Fleet) -> str:
    for path, content in (
        ("/", "<title>Meltcore</title>"),
        ("/docs", "openapi.json"),
        ("/openapi.json", '"openapi"'),
        ("/live", '"live"'),
        ("/health", '"ready"'),
        ("/v1/health", '"healthy"'),
        ("/metrics", "meltcore:num_requests_running"),
    ):
        text = fleet.send(path, "GET").text
        _expect(content in text, f"{path}: {text[:120]}")
    models = fleet.send("/v1/status", "GET").json()["models"]
    names = {model["name"] for model in models}  # the chat model's too, beside the first one of each task
    _expect(names >= set(fleet.models.values()), f"/v1/status: {sorted(names)}")
    return f"{len(models)} models"


@_opens("every route of /openapi.json was opened")
def _all_opened(fleet: _Fleet) -> str:
    """Fail if the server lists a route that no check requests. Checks of tasks that the fleet lacks count too."""
    listed = set(fleet.send("/openapi.json", "GET").json()["paths"])
    unchecked_paths = sorted(listed.difference(*(check.paths for check in _CHECKS)))
    _expect(not unchecked_paths, f"not opened: {', '.join(unchecked_paths)}")
    return f"{len(listed)} routes"
