"""POST /v1/translate over a real engine: dwani.ai's form, many requests together, bad input, clients that leave."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S

from meltcore.common.options import Size

pytest.importorskip("sentencepiece", reason="the extra `translate` is not installed: make .venv/.installed")


from m2m100_tools import SMALL, reference_model, write_checkpoint
from server_harness import RunningServer, configure, running, serve_command
from translation_texts import write_tokenizer
from waiting import wait_until

from meltcore import Translator
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import run_levels
from meltcore.settings.fleet_spec import ModelSection

pytestmark = pytest.mark.slow  # the server starts with three seconds of imports and loading
CORPUS = ["the cat sat on the mat", "a dog ran home", "वह घर गया", "क ख ग घ", "नमस्ते दुनिया", "< ID1 > . , ? ! ।"] * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "tiny-en-indic"
    path.mkdir()
    num_ids = len(write_tokenizer(path, CORPUS))
    values = {**SMALL, "encoder_vocab_size": num_ids, "decoder_vocab_size": num_ids, "max_target_positions": 10}
    write_checkpoint(path, values, reference_model(values, seed=0))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    models = {
        "meltcore/sums": ModelSection(checkpoint="meltcore/sums", device="cpu", memory=Size(2**27)),
        "translator": ModelSection(
            checkpoint=str(folder), task="translation", device="cpu", memory=Size(2**22), max_queue=200
        ),
    }
    config = configure(models=models, port=0, api_server_count=2)
    with (
        tempfile.TemporaryDirectory() as directory,
        running(serve_command(config, engine=ENGINE_COMMAND), Path(directory) / "stderr") as running_server,
    ):
        running_server.wait_healthy(WAIT_S)
        yield running_server


def translate(server: RunningServer, sentences: list[str], **fields: Any) -> Any:
    body = {"sentences": sentences, "src_lang": "eng_Latn", "tgt_lang": "kan_Knda", **fields}
    return server.post("/v1/translate", body)


def test_translations_are_those_of_the_offline_translator(server: RunningServer, folder: Path) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "home"]
    texts = [*(" ".join(words[i % 9 : i % 9 + 1 + i % 4]) for i in range(24)), "", "home.\n\nThe mat!"]
    expected = Translator(str(folder), device="cpu").translate(texts, "en", "kn", max_new_tokens=10)
    before = server.metrics()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: translate(server, [text]), filter(None, texts)))
    assert [answer.json["translations"] for answer in answers] == [[text] for text in filter(None, expected)]
    together = translate(server, texts, model="translator", tgt_lang="Kannada").json
    assert together["translations"] == expected
    found = server.check_no_leak()
    for name, metric in (("prompt_tokens", "prompt_tokens_total"), ("completion_tokens", "generation_tokens_total")):
        assert sum(answer.json["usage"][name] for answer in answers) == together["usage"][name]
        assert found[metric] - before[metric] == 2 * together["usage"][name]
    assert found["requests_failed_total"] == found["requests_aborted_total"] == 0
    assert found["requests_finished_total"] >= 2 * 26


def test_load_generator_counts_what_the_server_translates(server: RunningServer) -> None:
    before = server.metrics()
    workload = "translate:src=eng_Latn,tgt=kan_Knda,words=2-6,sentences=1-3"
    [level] = run_levels(
        LoadConfig(
            url=server.url, model="translator", workload=workload, num_prompts=(12,), concurrency=(4,), num_warmups=0
        )
    )
    assert level.task is not None
    assert (level.failed, level.task.source_unit) == (0, "token")
    found = server.check_no_leak()
    assert level.task.source == found["prompt_tokens_total"] - before["prompt_tokens_total"]
    assert level.task.work == found["requests_finished_total"] - before["requests_finished_total"]
    assert level.task.work == found["requests_accepted_total"] - before["requests_accepted_total"], "for step costs"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"sentences": []}, 400, "sentences must have 1 to 1024 texts; got 0"),
        ({"sentences": ["x"] * 1025}, 400, "got 1025"),
        ({"sentences": "x"}, 400, "sentences"),
        ({"sentences": ["x"], "tgt_lang": "deu_Latn"}, 400, "tgt_lang 'deu_Latn' is not a language of IndicTrans2"),
        ({"sentences": ["x"], "tgt_lang": "en"}, 400, "both eng_Latn"),
        ({"sentences": ["क"], "src_lang": "hi", "tgt_lang": "en"}, 400, "translator translates en-indic"),
        ({"sentences": ["क"]}, 400, "eng_Latn, which is written in Latin"),
        ({"sentences": ["a" * 100_000]}, 400, "100,000 characters, of at most 4,096"),
        ({"sentences": ["x"], "num_beams": 3}, 400, "num_beams"),
        ({"sentences": ["x"], "model": "meltcore/sums"}, 400, "meltcore/sums cannot translate"),
        ({"sentences": ["x"], "model": "missing"}, 404, "there is no model"),
        ({"sentences": ["home. The mat! A cat. Dog."] * 300}, 429, "the queue is full"),
    ],
)
def test_bad_request_is_an_error_that_names_it(
    server: RunningServer, body: dict[str, Any], status: int, reason: str
) -> None:
    answer = translate(server, **{"sentences": [], **body})
    assert (answer.status, reason in answer.error["message"]) == (status, True), answer.body
    assert translate(server, ["home"]).status == 200


@pytest.mark.parametrize("texts", [["\u200b"], ["", " \n", "\ufeff\u200d"], ["\u3164", "\u00ad\ufe0f", "\u0301"]])
def test_texts_without_a_visible_character_are_returned_without_the_model(
    server: RunningServer, texts: list[str]
) -> None:
    answer = translate(server, texts).json
    assert answer["translations"] == texts
    assert answer["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    [home] = translate(server, ["home"]).json["translations"]
    mixed = translate(server, [*texts, "home", *texts, f"home\n{texts[0]}"]).json["translations"]
    assert mixed == [*texts, home, *texts, f"{home}\n{texts[0]}"]


def test_dwani_client_translates(server: RunningServer) -> None:
    dwani = pytest.importorskip("dwani", reason="the test group has dwani")
    client = dwani.DwaniClient("none", server.url)
    expected = translate(server, ["the cat sat", "a dog ran"]).json
    assert client.translate(["the cat sat", "a dog ran"], "English", "Kannada") == expected
    # The client itself cuts a text at full stops, and loses them.
    assert client.translate("the cat sat. a dog ran.", "eng_Latn", "kan_Knda") == expected
    with pytest.raises(dwani.DwaniAPIError, match="deu_Latn"):
        client.translate(["the cat"], "English", "German")
    worker = {"sentences": ["the cat sat", "a dog ran"], "src_lang": "eng_Latn", "tgt_lang": "kan_Knda"}
    assert server.post("/translate?src_lang=eng_Latn&tgt_lang=kan_Knda", worker).json == expected


def test_text_generation_and_translation_do_not_mix(server: RunningServer) -> None:
    chat = {"model": "translator", "messages": [{"role": "user", "content": "x"}]}
    answer = server.post("/v1/chat/completions", chat)
    assert (answer.status, "POST /v1/translate" in answer.error["message"]) == (400, True)
    body = {"model": "meltcore/sums", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
    assert server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    cards = {card["id"]: card for card in server.request("GET", "/v1/models").json["data"]}
    assert cards["translator"]["task"] == "translation"
    assert cards["translator"]["direction"] == "en-indic"
    assert translate(server, ["x"], tgt_lang="hi").status == 200
    assert "max_model_len" in cards["meltcore/sums"]


def test_client_that_leaves_ends_its_request(server: RunningServer) -> None:
    before = server.metrics()["requests_aborted_total"]
    for _ in range(3):
        connection = server.open(
            "/v1/translate", {"sentences": ["the cat sat on the mat"] * 150, "src_lang": "en", "tgt_lang": "hi"}
        )
        server.wait_metric("requests_in_flight", 1)
        connection.close()
        wait_until(lambda: server.metrics()["requests_in_flight"] == 0, "nothing in flight")
    assert server.metrics()["requests_aborted_total"] > before
    assert translate(server, ["home"]).status == 200


def test_log_has_the_request_and_no_text(server: RunningServer) -> None:
    translate(server, ["a secret cat"])
    wait_until(lambda: "path=/v1/translate model=translator sentences=1 status=200" in server.stderr, "the log line")
    assert "secret" not in server.stderr


def test_death_of_the_engine_fails_its_requests_alone(server: RunningServer) -> None:
    [engine] = server.engine_pids("tiny-en-indic")
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(translate, server, ["home", "a dog"])
        server.wait_metric("requests_in_flight", 2)
        os.kill(engine, signal.SIGKILL)
        answer = waiting.result()
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert translate(server, ["home"], model="translator").status == 503
    assert server.post("/v1/completions", {"model": "meltcore/sums", "prompt": "a", "max_tokens": 2}).status == 200
    assert server.check_no_leak()["requests_failed_total"] == 2
