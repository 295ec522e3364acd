"""fleet.yaml at its limits: values that no machine has, aliases that stand for billions, secrets of addresses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.options import shown_url
from meltcore.settings.fleet_file import load_fleet, parse_fleet

MODEL = "checkpoint: meltcore/sums"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"models: {{a: {{{MODEL}, {key}: {value}}}}}", f"models.a.{key}: got {value}; must be {limit}")
        for key, value, limit in (
            ("max_num_seqs", 65_537, "int <= 65536"),
            ("max_num_seqs", -1, "int >= 1"),
            ("max_num_seqs", "true", "int"),
            ("max_num_seqs", 10**30, "int <= 65536"),
            ("max_model_len", 16_777_217, "int <= 16777216"),
            ("max_num_batched_tokens", 16_777_217, "int <= 16777216"),
            ("replicas", 65, "int <= 64"),
            ("max_queue", 100_000_001, "int <= 100000000"),
            ("max_queue_tokens", 10**12 + 1, "int <= 1000000000000"),
            ("memory", 2**50 + 1, "at most 1,024 TiB"),
        )
    ]
    + [
        (f"models: {{a: {{{MODEL}}}}}\n{section}", message)
        for section, message in (
            ("gpus: [{id: 1024}]", "gpus[0].id: got 1024; must be int <= 1023"),
            ("server: {api_server_count: 1025}", "server.api_server_count: got 1025; must be int <= 1024"),
            ("limits: {class_shares: [1000001, 1, 1]}", "limits.class_shares[0]: got 1000001; must be int <= 1000000"),
            ("timeouts: {start_s: .nan}", "timeouts.start_s: got nan; must be a finite number"),
            ("timeouts: {start_s: .inf}", "timeouts.start_s: got inf; must be a finite number"),
            ("timeouts: {drain_s: 31536001}", "timeouts.drain_s: got 31536001; must be float <= 31536000"),
            ("residency: {swaps_per_minute: 1000001}", "residency.swaps_per_minute: got 1000001; must be int <="),
        )
    ]
    + [
        ("models: {" + ", ".join(f"m{n}: {{{MODEL}}}" for n in range(257)) + "}", "models: has 257 entries; must have"),
        (LAUGHS + "models: *i", "aliases make more than 100,000 values"),
        ("models: &m {a: *m}", "line 1: an alias stands for a value that holds it"),
        (f'models: {{a: {{{MODEL}}}}}\nkeys: [{{name: a, file: "a\\0b"}}]', "keys[0].file: has a NUL character"),
        ("models: " + "[" * 10_000, "not YAML"),
        (f"models: {{a: {{{MODEL}, max_num_seqs: {'9' * 5000}}}}}", "not YAML"),
    ],
)
def test_values_past_their_limits_are_refused_quickly(text: str, message: str) -> None:
    started_s = time.process_time()
    with pytest.raises(ConfigError) as error:
        parse_fleet(text)
    assert message in str(error.value).replace("got True", "got true")
    assert time.process_time() - started_s < 5


def test_empty_file_is_named_empty(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load_fleet(file)


def test_aliases_of_small_values_are_read() -> None:
    spec = parse_fleet(f"models: {{a: &a {{{MODEL}, max_num_seqs: 4}}, b: {{<<: *a, max_num_seqs: 8}}, c: *a}}")
    assert [model.max_num_seqs for model in spec.models.values()] == [4, 8, 4]


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@host:8001",
        "http://:hunter2@host:8001",
        "http://us/er:hunter2@host:8001",
        "http://host:8001/v1?key=hunter2",
        "http://host:8001#hunter2",
        "http://user:hunter2@host:99999",
        "ftp://user:hunter2@host",
        "https://user:hunter2@[::1",
        "user:hunter2@host",
        " http://user:hunter2@host",
    ],
)
def test_address_with_a_secret_is_refused_without_showing_it(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{far: {{url: '{url}'}}}}")
    for command in (["plan", str(file), "--vram", "80"], ["up", str(file)]):
        assert main(command) == 2
        output = capsys.readouterr()
        assert "models.far.url: " in output.err
        assert "hunter2" not in output.err + output.out


def test_shown_url_keeps_what_is_no_secret() -> None:
    assert shown_url("https://host:8001/v1/traces") == "https://host:8001/v1/traces"
    assert shown_url("https://a:b@host:8001/v1?c=d#e") == "https://***@host:8001/v1?***"
