"""Serves POST /v1/speech_to_speech in the form of dwani.ai's API: a spoken question gets a spoken answer."""

from __future__ import annotations

import base64
from typing import Literal

import msgspec

from meltcore.common.errors import RequestError
from meltcore.common.visible import is_visible
from meltcore.serve.http.forms import split_audio_form
from meltcore.serve.http.operation import AUDIO_TYPE, DWANI, Operation
from meltcore.serve.requests.asgi import while_connected
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.protocol import convert_fields
from meltcore.serve.requests.request_fields import header
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.generation.chat import check_mode
from meltcore.serve.tasks.synthesis.forms import SpeechOptions, speak_whole, synthesizer
from meltcore.serve.tasks.synthesis.speech import send_speech
from meltcore.serve.tasks.transcription.forms import transcriber
from meltcore.serve.tasks.transcription.transcription_form import speech_request
from meltcore.serve.tasks.translation.translated_chat import answer_in

_MAX_SESSION_BYTES = 128


class SpeechToSpeechFields(SpeechOptions, forbid_unknown_fields=True, kw_only=True):
    """The fields of POST /v1/speech_to_speech beside the audio.

    `model` names the language model. Without `target_language` the answer is in the language of the question.
    """

    target_language: str | None = None
    mode: Literal["llm", "agent"] = "llm"
    agent_name: str | None = None
    format: Literal["audio", "json"] = "audio"
    stream_format: Literal["audio", "sse"] = "audio"
    voice: str | None = None


class _Answer(msgspec.Struct):
    """The answer if the request's format is json."""

    transcription: str
    llm_response: str
    audio_base64: str


class SpeechToSpeechEndpoint(Endpoint):
    """Transcribes a question, asks a language model, and sends the model's answer as speech, chunk by chunk."""

    has_uploads = True
    paths = dwani_paths = ("/v1/speech_to_speech", "/v1/speech_to_speech/")
    operations = (
        Operation(
            *("post", paths[0], "Answer a spoken question with speech"),
            *(("file", *SpeechToSpeechFields.__struct_fields__), AUDIO_TYPE),
            tag=DWANI,
        ),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        session = header(exchange.scope, b"x-session-id")
        if session is not None and len(session) > _MAX_SESSION_BYTES:
            raise RequestError(f"X-Session-ID has {len(session)} characters; the limit is {_MAX_SESSION_BYTES}")
        body = await exchange.body(self.limit_bytes)
        texts, (data,) = await split_audio_form(body, exchange.body_type, ("file",))
        fields = convert_fields({**exchange.query, **dict(texts)}, SpeechToSpeechFields)
        check_mode(fields.mode)
        await while_connected(exchange.scope, self._answer(exchange, fields, data))

    async def _answer(self, exchange: Exchange, fields: SpeechToSpeechFields, data: bytes) -> None:
        language = fields.language or ""
        if not language:
            raise RequestError("language is required: models do not detect it", param="language")
        transcriber_backend, request = transcriber(self.choices, speech_request({"language": language}, data))
        target = fields.target_language or language
        synthesizer_backend = synthesizer(
            self.choices, target, param="target_language"
        )  # before any work: a server without one says so now
        exchange.fields["model"] = self.choices.chat_model(fields.model).names[0]
        is_events, is_json = fields.stream_format == "sse", fields.format == "json"

        transcript = await transcriber_backend.transcribe(request)
        if not is_visible(transcript.text):
            raise RequestError("no speech was found in the audio", param="file", code="no_speech")
        if is_events:
            await exchange.event({"type": "transcript.text.done", "text": transcript.text})
        answer = await answer_in(self.choices, exchange, transcript.text, (language, target))
        if not is_visible(answer):
            raise RequestError(f"{exchange.fields['model']} gave an empty answer", status=502, code="empty_answer")
        if is_events:
            await exchange.event({"type": "response.output_text.done", "text": answer})
        speech = fields.request(answer, fields.voice)._replace(
            is_whole=is_json, is_events=is_events, language=target, model=None
        )
        if not is_json:
            exchange.headers.append(
                (b"content-disposition", f'inline; filename="speech.{speech.response_format}"'.encode())
            )
            await send_speech(exchange, synthesizer_backend, speech)
            return
        audio = base64.b64encode(await speak_whole(synthesizer_backend, speech)).decode()
        await exchange.answer_json(_Answer(transcription=transcript.text, llm_response=answer, audio_base64=audio))
