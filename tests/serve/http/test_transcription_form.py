"""Forms of transcription requests: every part that is not as it must be is named; and OpenAI's verbose answer."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from exchanges import new_exchange

pytest.importorskip("python_multipart", reason="the extra audio has it")

from openai.types.audio import TranscriptionVerbose

from meltcore.common.errors import RequestError
from meltcore.serve.http.forms import read_multipart
from meltcore.serve.tasks.synthesis.speech import read_request
from meltcore.serve.tasks.transcription.transcription_form import read_form, render
from meltcore.text.transcripts import SpokenWord, Transcription

MULTIPART = "multipart/form-data; boundary=x"
END = b"--x--\r\n"


def part(disposition: str, data: bytes = b"RIFF", header: bytes = b"") -> bytes:
    return (
        b"--x\r\ncontent-disposition: form-data; " + disposition.encode() + b"\r\n" + header + b"\r\n" + data + b"\r\n"
    )


FILE = part('name="file"; filename="a.wav"')


def field(name: str, value: str) -> bytes:
    return part(f'name="{name}"', value.encode())


def read(body: bytes, content_type: str = MULTIPART) -> Any:
    return asyncio.run(read_form(body, content_type, {}))


@pytest.mark.parametrize(
    "disposition",
    [
        'name="file"; filename=""',
        "name=\"file\"; filename*=UTF-8''a%20b.wav",
        'filename="x"; name="file"',
        "name=file; FileName=a",
    ],
)
def test_file_with_any_kind_of_name_is_read(disposition: str) -> None:
    request = read(part(disposition, b"data", b"content-type: audio/wav\r\n") + field("language", "kn") + END)
    assert (request.data, request.language) == (b"data", "kn")
    assert read(FILE + END, 'Multipart/Form-Data; Boundary="x"').data == b"RIFF"


@pytest.mark.parametrize("zero", ["0", "0.0", "0.00", "-0", "0e3"])
def test_temperature_may_be_any_zero(zero: str) -> None:
    assert read(FILE + field("temperature", zero) + END).data == b"RIFF"


BAD: dict[str, tuple[bytes, str | None, str]] = {
    "no file name": (
        part('name="file"') + END,
        "file",
        "the part file has no file name, so that it is text: a file needs",
    ),
    "content type alone": (part('name="file"', b"x", b"content-type: audio/wav\r\n") + END, "file", "no file name"),
    "long, no file name": (
        part('name="file"', bytes(70_000)) + END,
        "file",
        "the part file has more than 65,536 bytes",
    ),
    "text beside a file": (FILE + field("file", "a") + END, "file", "the part file has no file name"),
    "two files": (FILE + FILE + END, "file", "the form has more than 1 file, the limit"),
    "no file": (field("language", "kn") + END, "file", "the field file is missing"),
    "file elsewhere": (
        part('name="audio"; filename="a"') + END,
        "audio",
        "audio must be text, not a file; a file goes into the field file",
    ),
    "file for a text": (part('name="model"; filename="a"') + END, "model", "model must be text, not a file"),
    "unknown": (FILE + field("wings", "2") + END, "wings", "unknown field 'wings'"),
    "twice": (FILE + field("language", "kn") + field("language", "hi") + END, "language", "language is given twice"),
    "not a number": (FILE + field("temperature", "hot") + END, "temperature", "must be a number; got 'hot'"),
    "temperature": (FILE + field("temperature", "0.2") + END, "temperature", "temperature is not supported"),
    "truth": (FILE + field("stream", "yes") + END, "stream", "stream must be one of true, 1, false, 0; got 'yes'"),
    "granularity": (FILE + field("timestamp_granularities[]", "char") + END, "timestamp_granularities", "got 'char'"),
    "long text": (FILE + field("prompt", "a" * 70_000) + END, "prompt", "the part prompt has more than 65,536 bytes"),
    "not closed": (FILE + field("language", "kn"), None, "the form ends before its closing boundary"),
    "cut in the file": (FILE[:-4], None, "the form ends before its closing boundary"),
    "nothing": (b"", None, "the form ends before its closing boundary"),
    "no name": (part('filename="a"') + END, None, '"name" must be provided'),
    "line ends": (FILE.replace(b"\r\n", b"\n") + END, None, "lines must end in CR LF"),
    "many fields": (FILE + field("user", "a") * 40 + END, None, "Maximum number of fields is 32"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_part_is_named(name: str) -> None:
    body, param, message = BAD[name]
    with pytest.raises(RequestError) as caught:
        read(body)
    assert message in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("content_type", "message"),
    [
        (new_exchange().body_type, "must be multipart/form-data"),  # of a body without one
        ("application/json", "must be multipart/form-data"),
        ("application/x-www-form-urlencoded", "must be multipart/form-data"),
        ("multipart/mixed; boundary=x", "must be multipart/form-data"),
        ("multipart/form-data", "Missing boundary"),
        ("multipart/form-data; boundary=y", "begin with the boundary of Content-Type"),
        ("multipart/form-data; boundary=", "begin with the boundary of Content-Type"),
    ],
)
def test_wrong_content_type_is_named(content_type: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(FILE + END, content_type)


@pytest.mark.parametrize("charset", ["undefined", "no\0codec"])
def test_charset_that_decodes_nothing_is_a_400(charset: str) -> None:
    names = FILE + field("language", "en")
    with pytest.raises(RequestError, match="is not valid multipart/form-data"):
        read(names + END, f"{MULTIPART}; charset={charset}")


def test_reference_of_speech_needs_a_file_name() -> None:
    body = field("input", "a") + field("reference", "RIFF") + END
    with pytest.raises(RequestError, match="the part reference has no file name") as caught:
        asyncio.run(read_request(body, MULTIPART, {}))
    assert caught.value.param == "reference"


def test_several_files_have_a_limit() -> None:
    assert len(asyncio.run(read_multipart(FILE * 3 + END, MULTIPART, 3))) == 3
    with pytest.raises(RequestError, match="the form has more than 3 files, the limit"):
        asyncio.run(read_multipart(FILE * 4 + END, MULTIPART, 3))


@pytest.mark.parametrize("granularities", [{"segment"}, {"word"}, {"word", "segment"}])
def test_verbose_answer_has_the_fields_of_openai(granularities: set[str]) -> None:
    words = [
        SpokenWord("one", 0.5, 0.8, (3, 4), -0.6, -2.0),
        SpokenWord("two", 0.9, 1.2, (7,), -0.3, -1.0),
        SpokenWord("late", 9.0, 9.5, (1,), -0.25, math.log(0.5)),
    ]
    fields = b"".join(field("timestamp_granularities[]", each) for each in sorted(granularities))
    request = read(FILE + field("response_format", "verbose_json") + fields + END)
    body, content_type = render(Transcription(words, 10.25, "kn"), request)
    answer = json.loads(body)
    assert content_type == b"application/json"
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", "kn", 10.25)
    assert answer["text"] == "one two late"
    assert answer["usage"] == {"type": "duration", "seconds": 10.25}
    assert answer.get("words", []) == (
        [{"word": each.text, "start": each.start_s, "end": each.end_s} for each in words]
        if "word" in granularities
        else []
    )
    parsed = TranscriptionVerbose.model_validate_json(body, strict=True)
    if "segment" in granularities:
        first, second = answer["segments"]
        assert set(first) == {
            *("id", "seek", "start", "end", "text", "tokens", "temperature"),
            *("avg_logprob", "compression_ratio", "no_speech_prob"),
        }
        assert (first["id"], first["seek"], first["start"], first["end"], first["text"]) == (0, 50, 0.5, 1.2, "one two")
        assert (second["id"], second["seek"], second["tokens"], first["tokens"]) == (1, 900, [1], [3, 4, 7])
        assert [each["avg_logprob"] for each in (first, second)] == [pytest.approx(-0.3), -0.25]
        assert [each["no_speech_prob"] for each in (first, second)] == [pytest.approx(math.exp(-3), abs=1e-6), 0.5]
        assert 0 < first["compression_ratio"] < 1.5
        assert parsed.segments is not None
    else:
        assert "segments" not in answer
