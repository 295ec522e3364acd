"""The parsers of what strangers send: what `fuzz.py` and `test_fuzz.py` feed with damaged inputs.

A target is a function without arguments, which imports what it needs. It returns the check of one input, in the working
directory, which lets only faults of the parser pass: errors that its documentation does not name. The valid inputs of a
target are the files of corpus/NAME, and corpus/words.json has what is put into them.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fuzz import Check, Target

from meltcore.common.errors import ConfigError, RequestError

TESTS = Path(__file__).resolve().parent.parent
CORPUS = TESTS / "fuzz/corpus"
PACKAGE = TESTS.parent / "src/meltcore"
sys.path += [str(TESTS / name) for name in ("audio", "serve/http", "text") if str(TESTS / name) not in sys.path]


def with_corpus(check: Check, name: str, seeds: list[bytes] | None = None) -> Target:
    """Return a target with the files of corpus/NAME, unless other seeds are given."""
    words = json.loads((CORPUS / "words.json").read_text()).get(name, [])
    files = sorted((CORPUS / name).iterdir()) if seeds is None else []
    return Target(
        check, seeds or [path.read_bytes() for path in files], tuple(each.encode("latin-1") for each in words)
    )


def body() -> Target:
    """JSON bodies of all routes: decoded in each form, and converted to a chat and to grammars where there is one."""
    from test_answer_parser import make_format

    from meltcore.serve.dialects import messages, responses
    from meltcore.serve.dialects.response_forms import ResponsesRequest
    from meltcore.serve.endpoints import endpoint_types
    from meltcore.serve.requests.protocol import ChatRequest, CompletionRequest, decode_request
    from meltcore.serve.tasks.generation.structured import requested_grammar
    from meltcore.serve.tasks.generation.tools import requested_tools, tool_grammar
    from meltcore.text.chat_template import ChatTemplate

    answers, template = make_format("hermes"), ChatTemplate("tools")
    operations = [each for endpoint in endpoint_types() for each in endpoint.operations]
    forms = sorted({each.body for each in operations if isinstance(each.body, type)}, key=lambda form: form.__name__)

    def check(data: bytes) -> None:
        for form in forms:
            with suppress(RequestError):
                request: Any = decode_request(data, form)
                if isinstance(request, ResponsesRequest):
                    request, _ = responses.chat_of(request, {})
                elif isinstance(request, messages.CountRequest):
                    request = messages.chat_of(request, {})
                if isinstance(request, ChatRequest | CompletionRequest):
                    grammar = requested_grammar(request)
                if isinstance(request, ChatRequest):
                    requested_tools(request, answers, template)
                    tool_grammar(request, answers, grammar)

    return with_corpus(check, "body")


def http() -> Target:
    """Bytes of a connection, in two pieces: no answer has a status of 500 or above."""
    from test_http_protocol import talk

    from meltcore.serve.requests.asgi import ClientDisconnectedError, read_body, send_bytes, send_error

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await read_body(scope, receive, 1000)
        except RequestError as error:
            await send_error(send, error)
        except ClientDisconnectedError:
            return
        else:
            await send_bytes(send, b"%d bytes" % len(body), b"text/plain")

    def check(data: bytes) -> None:
        cut = len(data) * (data[-1] if data else 0) >> 8
        written = talk([data[:cut], data[cut:]], app=application).written
        statuses = [int(each) for each in re.findall(rb"^HTTP/1\.1 (\d{3})", written, re.MULTILINE)]
        assert all(100 <= status < 500 or status == 501 for status in statuses), statuses

    return with_corpus(check, "http")


def multipart() -> Target:
    """Forms with files: the line of the content type, then the body."""
    from meltcore.serve.http.forms import find_field, split_audio_form

    def check(data: bytes) -> None:
        line, _, form = data.partition(b"\n")
        content_type = line.decode("latin-1")
        with suppress(RequestError):
            found = find_field(form, content_type, "model")
            assert found is None or 0 <= found.start <= found.stop <= len(form)
        with suppress(RequestError):
            asyncio.run(split_audio_form(form, content_type, ("file",), 2))

    return with_corpus(check, "multipart")


def template() -> Target:
    """Chat templates of a checkpoint: compiled and rendered."""
    from meltcore.text.chat_template import ChatTemplate

    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]

    def check(data: bytes) -> None:
        try:
            found = ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>", "eos_token": "</s>"})
        except ConfigError:
            return
        with suppress(RequestError):
            found.render(messages, {"tools": [{"type": "function", **call}], "enable_thinking": False})

    return with_corpus(check, "template")


def gguf() -> Target:
    """GGUF files: header, configuration, formats, vocabulary and tokenizer."""
    from meltcore.models.checkpoints.gguf.gguf_config import read_servable_config
    from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel, describe_value
    from meltcore.models.checkpoints.gguf.gguf_kinds import other_kind
    from meltcore.text.gguf_tokenizer import broken_reasons, build_tokenizer, special_tokens, template_source
    from meltcore.text.tokenizer import Tokenizer

    path = Path("model.gguf")
    path.touch()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            model = GGUFModel(path)
            other_kind(model)
            for value in model.metadata.values():
                describe_value(value)
            with suppress(ConfigError):
                read_servable_config(model, has_tokenizer=False)
            with suppress(ConfigError):
                special_tokens(model)
                template_source(model)
            broken_reasons(path)
            tokenizer = Tokenizer(build_tokenizer(model))
            tokenizer.decode(tokenizer.encode("a b <s> é", add_special_tokens=True))

    return with_corpus(check, "gguf")


def safetensors() -> Target:
    """Headers of safetensors files, and what their entries say is there."""
    import torch

    from meltcore.models.checkpoints.safetensors_file import open_decoder_files

    path = Path("model.safetensors")
    path.touch()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            [file] = open_decoder_files([path])
            with file:
                for name in file.entries:
                    with suppress(ConfigError):
                        assert isinstance(file.read(name), torch.Tensor)

    return with_corpus(check, "safetensors")


def onnx() -> Target:
    """Graphs and weights of ONNX files, also in a file beside them."""
    from meltcore.models.checkpoints.onnx_file import OnnxGraph

    path = Path("model.onnx")
    path.touch()
    Path("w.bin").write_bytes(bytes(64))

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            graph = OnnxGraph.read(path)
            graph.users("w")
            for found in graph.tensors.values():
                with suppress(ConfigError):
                    found.read()

    return with_corpus(check, "onnx")


def torch_archive() -> Target:
    """Archives of torch.save: pickles of which nothing is run."""
    from meltcore.models.checkpoints.torch_archive import TorchArchive, script_fields
    from meltcore.models.checkpoints.torch_file import TorchFile

    path = Path("weights.pt")
    path.touch()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            archive = TorchArchive(path)
            with suppress(ValueError):
                list(script_fields(archive.root))
            with TorchFile(path) as file:
                for name in file.entries:
                    with suppress(ConfigError):
                        file.read(name)

    return with_corpus(check, "torch_archive")


def nemo() -> Target:
    """NeMo's tar archives, with their configuration and SentencePiece models."""
    import tarfile

    from meltcore.models.checkpoints.nemo_archive import NemoArchive

    path = Path("model.nemo")
    path.touch()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            archive = NemoArchive(path)
            try:
                archive.token_texts(archive.model_config)
            finally:
                archive.close()

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("model_config.yaml", "en_tokenizer.model", "hi_tokenizer.model"):
            tar.add(PACKAGE / "bundled/tones" / name, f"./{name}")
    return with_corpus(check, "nemo", [file.getvalue()])


def sentencepiece() -> Target:
    """SentencePiece models of translation: loaded and used."""
    from meltcore.text.translation.tokenizer import _load_model

    path = Path("model.SRC")
    path.touch()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            _load_model(path).encode("a sentence with हिन्दी and \0 \U0001f600", out_type=str)

    seeds = [path.read_bytes() for path in sorted((PACKAGE / "bundled/tones").glob("*_tokenizer.model"))]
    return with_corpus(check, "sentencepiece", seeds)


def tokenizer() -> Target:
    """tokenizer.json, and after two NULs tokenizer_config.json: loaded, used, and compiled for grammars."""
    from meltcore.text.grammar import GrammarCompiler
    from meltcore.text.tokenizer import Tokenizer

    names = ("tokenizer.json", "tokenizer_config.json")
    for name in names:
        Path(name).touch()

    def check(data: bytes) -> None:
        whole, _, config = data.partition(b"\0\0")
        for name, content in zip(names, (whole, config or b"{}"), strict=True):
            Path(name).write_bytes(content)
        with suppress(ConfigError):
            found = Tokenizer.from_folder(Path())
            token_ids = found.encode("a b <s> é\n", add_special_tokens=True)
            found.decode(token_ids, skip_special_tokens=False)
            assert found.control_tokens is not None
            list(map(found.token_bytes, range(min(found.vocab_size, 50))))
            GrammarCompiler(found, [0])

    return with_corpus(check, "tokenizer")


def checkpoint() -> Target:
    """The JSON files of a checkpoint's folder, with two NULs between them."""
    from meltcore.models.checkpoints.checkpoint import folder_reasons, open_checkpoint

    names = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json")
    for name in names:
        Path(name).touch()

    def check(data: bytes) -> None:
        for name, content in zip(names, [*data.split(b"\0\0"), *[b"{}"] * len(names)], strict=False):
            Path(name).write_bytes(content)
        with suppress(ConfigError):
            found = open_checkpoint(str(Path().resolve()), files="all")
            assert isinstance(found.eos_token_ids, tuple)
            for is_dummy in (False, True):
                folder_reasons(found, is_dummy=is_dummy)

    others: list[dict[str, Any]] = [
        {"eos_token_id": [1, 2]},
        {"metadata": {"total_size": 1}, "weight_map": {"a": "x.safetensors"}},
        {"eos_token": "<s>", "added_tokens_decoder": {"1": {"content": "<s>"}}},
    ]
    rest = b"".join(b"\0\0" + json.dumps(each).encode() for each in others)
    paths = [PACKAGE / "bundled" / name / "config.json" for name in ("sums", "sums-gemma", "sums-hybrid")]
    return with_corpus(check, "checkpoint", [path.read_bytes() + rest for path in paths])


def audio(name: str) -> Target:
    """Files of one container, decoded to the end."""
    from test_audio_decode import LIMITS

    from meltcore.audio.decode import decode

    def check(data: bytes) -> None:
        with suppress(RequestError):
            for _ in decode(data, LIMITS):
                pass

    return with_corpus(check, name)


def fleet() -> Target:
    """fleet.yaml."""
    from meltcore.settings.fleet_file import parse_fleet

    def check(data: bytes) -> None:
        with suppress(ConfigError):
            parse_fleet(data.decode(errors="surrogateescape"))

    return with_corpus(check, "fleet", [path.read_bytes() for path in sorted(PACKAGE.glob("fleet/examples/*.yaml"))])


def upstream() -> Target:
    """Answers of upstream servers, in pieces: head, events, usage, and a chat that a route of this server reads."""
    import msgspec
    from test_http_protocol import Transport

    from meltcore.serve.tasks.generation import upstream_chat
    from meltcore.serve.upstream.event_stream import MAX_HELD_BYTES, EventBuffer
    from meltcore.serve.upstream.http_attempt import read_usage
    from meltcore.serve.upstream.http_connection import UpstreamConnection, UpstreamError, read_answer

    async def answer(pieces: list[bytes]) -> bytes:
        connection = UpstreamConnection()
        connection.connection_made(Transport())  # type: ignore[arg-type]
        connection.send(b"")
        reading = asyncio.ensure_future(read_answer(connection))
        for piece in pieces:
            await asyncio.sleep(0)
            if connection.is_open and not connection.is_complete:
                connection.data_received(piece)
        connection.connection_lost(None)
        return (await reading).body

    def check(data: bytes) -> None:
        numbers = random.Random(len(data))
        cuts = sorted(numbers.randrange(len(data) + 1) for _ in range(3))
        pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        with suppress(UpstreamError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # as `ask_upstream` does
            upstream_chat._decode(asyncio.run(answer(pieces)))
        events = EventBuffer()
        assert b"".join([*map(events.add, pieces), events.end()]) == data
        assert len(events.end()) <= MAX_HELD_BYTES
        assert all(each is None or each >= 0 for each in read_usage(data))

    return with_corpus(check, "upstream")


def events() -> Target:
    """Answers of servers that `meltcore load` measures: head, body, events."""
    from meltcore.measure.load.wire.http import EventParser, HttpError, ResponseParser

    class Handler:
        def __init__(self) -> None:
            self.events = EventParser()

        def on_head(self, status: int, headers: dict[str, str]) -> None: ...

        def on_body(self, data: bytes) -> None:
            list(self.events.feed(data))

        def on_end(self) -> None: ...

        def on_failure(self, reason: str, detail: str) -> None: ...

    def check(data: bytes) -> None:
        with suppress(HttpError):
            parser = ResponseParser(Handler())
            for start in range(0, len(data), 100):
                if not parser.is_done:
                    parser.feed(data[start : start + 100])
            parser.feed_eof()

    return with_corpus(check, "upstream")


def _compiler() -> Any:
    from meltcore.text.grammar import GrammarCompiler
    from meltcore.text.tokenizer import Tokenizer

    return GrammarCompiler(Tokenizer.synthetic_bytes(300), [299])


def schema() -> Target:
    """JSON schemas of requests."""
    from meltcore.serve.tasks.generation.structured import first_valid, grammar_of_schema

    compiler = _compiler()

    def check(data: bytes) -> None:
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(fields, dict):
            with suppress(RequestError):
                first_valid(compiler, grammar_of_schema(fields, "schema", is_strict=False))

    return with_corpus(check, "schema")


def grammar() -> Target:
    """Grammars in Lark, and regular expressions after a NUL."""
    from llguidance import LLMatcher

    compiler = _compiler()

    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        build = LLMatcher.grammar_from_regex if text.startswith("\0") else LLMatcher.grammar_from_lark
        with suppress(ValueError):
            compiler.check(build(text.removeprefix("\0")))

    return with_corpus(check, "grammar")


def calls() -> Target:
    """Answers of models with tool calls, in all formats: the same result whole and in pieces."""
    from call_examples import FAMILIES, examples
    from test_answer_parser import make_format, marks_of, parse

    forms = [make_format(family) for family in FAMILIES]

    def check(data: bytes) -> None:
        text = data.decode(errors="replace")
        half = len(text) // 2
        for form in forms:
            assert parse(form, [text]) == parse(form, [text[:half], *text[half:]])

    seeds = {example.written.encode() for family in FAMILIES for example in examples(family)}
    marks = {mark.encode() for family in FAMILIES for mark in marks_of(family)}
    return Target(check, sorted(seeds), (*sorted(marks), b"<parameter=", b"</function>", b"\\u", b'\\"', b"{'a': "))


TARGETS: dict[str, Callable[[], Target]] = {
    **{each.__name__: each for each in (http, body, multipart, template, gguf, safetensors, onnx, torch_archive, nemo)},
    **{each.__name__: each for each in (sentencepiece, tokenizer, checkpoint, fleet, upstream, events, schema)},
    **{each.__name__: each for each in (grammar, calls)},
    **{name: partial(audio, name) for name in ("wav", "flac", "ogg", "mp3", "matroska", "mp4")},
}
