"""Command-line options made from fields of dataclasses and of structs."""

import argparse
import doctest
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

import meltcore.common.options
from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.options import (
    Size,
    add_options,
    check_unused,
    from_options,
    is_number,
    json_object,
    not_empty,
    number,
    option,
    read_number,
    setting,
    size_bytes,
)
from meltcore.measure.load.config import parse_numbers, parse_range, parse_slo
from meltcore.measure.load.fleet.fleet_config import parse_mix
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_file import parse_fleet


@dataclass(frozen=True, kw_only=True)
class Settings:
    url: str
    port: int = option(8000, "TCP port.", group="HTTP server", limits={"minimum": 0, "maximum": 65_535})
    key: str | None = option(None, "API key.", group="HTTP server", type=not_empty)
    names: tuple[str, ...] = option((), "Names.", nargs="+", action="extend")
    levels: tuple[int, ...] = option((1, 32), "Concurrency levels.", limits={"minimum": 1})
    debug: tuple[Literal["a", "b"], ...] = option((), "Switches.")
    share: float | None = option(None, "90 % of them.", limits={"exclusive_minimum": 0, "maximum": 1})
    memory_bytes: int | None = option(None, "Memory.")
    timeout_s: float = option(600.0, "Time limit (default: 10 minutes).", limits={"exclusive_minimum": 0})
    idle_s: float = option(30.0, "Idle limit.")
    stream: bool = option(True, "Ask for whole answers.")
    warm: bool | None = option(None, "Warm up (default: on a GPU).")
    cache: bool = option(True, "Cache (default: on).", action=argparse.BooleanOptionalAction)
    daemon: bool = option(False, "Run in the background.")
    out: Path = option(Path("runs"), "Parent of the run folder.", metavar="DIR")
    limits_ms: dict[str, float] = option({}, "Limits.", flag="--slo", type=lambda text: {text: 1.0})
    internal: int = 3


Positive = Annotated[int, Meta(ge=1)]
Key = Annotated[str, Meta(min_length=1, extra={"reader": not_empty})]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The same settings as a struct."""

    url: Annotated[str, Meta(description="No option.")]
    port: Annotated[Annotated[int, Meta(ge=0, le=65_535)], setting("TCP port.", group="HTTP server")] = 8000
    key: Annotated[Key | None, setting("API key.", group="HTTP server")] = None
    names: Annotated[tuple[str, ...], setting("Names.", nargs="+", action="extend")] = ()
    levels: Annotated[tuple[Positive, ...], setting("Concurrency levels.")] = (1, 32)
    debug: Annotated[tuple[Literal["a", "b"], ...], setting("Switches.")] = ()
    share: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, setting("Other words.", help="90 % of them.")] = None
    memory_bytes: Annotated[Size | None, setting("Memory.", flag="--memory")] = None
    timeout_s: Annotated[Annotated[float, Meta(gt=0)], setting("Time limit (default: 10 minutes).")] = 600.0
    idle_s: Annotated[float, setting("Idle limit.")] = 30.0
    stream: Annotated[bool, setting("Ask for whole answers.")] = True
    warm: Annotated[bool | None, setting("Warm up (default: on a GPU).")] = None
    cache: Annotated[bool, setting("Cache (default: on).", action=argparse.BooleanOptionalAction)] = True
    daemon: Annotated[bool, setting("Run in the background.")] = False
    out: Annotated[Path, setting("Parent of the run folder.", metavar="DIR")] = Path("runs")
    limits_ms: Annotated[dict[str, float], setting("Limits.", flag="--slo", type=lambda text: {text: 1.0})] = {}
    internal: Annotated[int, Meta(description="No option.")] = 3


BOTH = pytest.mark.parametrize("form", [Settings, Section])


def parser_of(form: Any, *names: str, **keywords: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="test")
    parser.add_argument("url")
    add_options(parser, form, *names, **keywords)
    return parser


@BOTH
def test_defaults_are_those_of_the_fields(form: Any) -> None:
    assert from_options(form, parser_of(form).parse_args(["u"]), url="u") == form(url="u")


def test_a_dataclass_takes_every_parsed_name_and_a_struct_its_options() -> None:
    args = parser_of(Settings).parse_args(["u"])
    assert from_options(Settings, args).url == "u"
    with pytest.raises(TypeError, match="url"):
        from_options(Section, args)


@BOTH
def test_options_without_a_meaning_are_refused(form: Any) -> None:
    check_unused(parser_of(form).parse_args(["u"]), form, "is for others")
    args = parser_of(form).parse_args(["u", "--memory", "1", "--slo", "a"])
    check_unused(args, form, "is for others", "memory_bytes", "limits_ms")
    for allowed, flag in (("memory_bytes", "--slo"), ("limits_ms", "--memory")):
        with pytest.raises(ConfigError, match=f"^{flag} is for others$"):
            check_unused(args, form, "is for others", allowed)


@BOTH
def test_values_are_read_by_annotation(form: Any) -> None:
    arguments = ["u", "--port", "0", "--key", "k", "--names", "a", "b", "--names", "c", "--levels", "4,8"]
    arguments += ["--debug", "a", "--debug", "b", "--share", "1", "--memory", "2KiB", "--timeout", "3", "--no-stream"]
    arguments += ["--daemon", "--out", "x", "--slo", "ttft"]
    assert from_options(form, parser_of(form).parse_args(arguments), url="u", internal=4) == form(
        url="u",
        port=0,
        key="k",
        names=("a", "b", "c"),
        levels=(4, 8),
        debug=("a", "b"),
        share=1.0,
        memory_bytes=2048,
        timeout_s=3.0,
        stream=False,
        daemon=True,
        out=Path("x"),
        limits_ms={"ttft": 1.0},
        internal=4,
    )


@BOTH
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "65536"], "'65536' is not a whole number of at least 0 and at most 65535"),
        (["--port", "1.5"], "'1.5' is not a whole number"),
        (["--levels", "4,0"], "'0' is not a whole number of at least 1"),
        (["--share", "0"], "'0' is not a number of more than 0 and at most 1"),
        (["--timeout", "nan"], "'nan' is not a number of more than 0"),
        (["--timeout", "inf"], "'inf' is not a number of more than 0"),
        (["--memory", "much"], "'much' is not a size"),
        (["--key", " "], "' ' is empty"),
        (["--debug", "c"], "invalid choice: 'c'"),
    ],
)
def test_values_outside_limits_are_refused(
    form: Any, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser_of(form).parse_args(["u", *arguments])
    assert reason in capsys.readouterr().err


def test_large_limits_are_written_in_digits() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="of at least 1 and at most 9223372036854775807"):
        number(int, minimum=1, maximum=2**63 - 1)("0")


@BOTH
@pytest.mark.parametrize(
    ("arguments", "warm", "cache"),
    [
        ([], None, True),
        (["--warm", "--cache"], True, True),
        (["--no-warm", "--no-cache"], False, False),
        (["--no-cache", "--cache"], None, True),
    ],
)
def test_some_flags_have_both_forms(form: Any, arguments: list[str], warm: bool | None, cache: bool) -> None:
    settings = from_options(form, parser_of(form).parse_args(["u", *arguments]), url="u")
    assert (settings.warm, settings.cache) == (warm, cache)


def test_examples_of_the_documentation_run() -> None:
    assert doctest.testmod(meltcore.common.options) == doctest.TestResults(failed=0, attempted=5)


@BOTH
def test_help_is_grouped_and_shows_defaults(form: Any) -> None:
    text = " ".join(parser_of(form).format_help().split())
    assert "HTTP server: --port N TCP port (default: 8000). --key KEY API key." in text
    assert "--levels N,... Concurrency levels (default: 1,32)." in text
    assert "90 % of them." in text
    assert "Time limit (default: 10 minutes)." in text
    assert "--share N" in text
    assert "--idle S Idle limit (default: 30)." in text
    assert "--no-stream Ask for whole answers." in text
    assert "--warm, --no-warm Warm up (default: on a GPU)." in text
    assert "--internal" not in text


@BOTH
def test_subset_takes_its_own_group_and_defaults(form: Any) -> None:
    parser = parser_of(form, "levels", "port", group="Load", defaults={"levels": (64,)})
    assert "Load:" in parser.format_help()
    assert "--daemon" not in parser.format_help()
    assert from_options(form, parser.parse_args(["u"]), url="u") == form(url="u", levels=(64,))


@pytest.mark.parametrize(("text", "size"), [("1000000", 10**6), ("40GiB", 40 * 2**30), ("1.5k", 1536), ("2 MB", 2**21)])
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert size_bytes(text) == size


def test_misspelled_debug_switch_is_refused() -> None:
    assert EngineConfig(model="m", debug=("no-peer-memory",)).debug == ("no-peer-memory",)
    with pytest.raises(ConfigError, match=r"debug must be any of reference-kernels, .*; got 'no-graphs'"):
        EngineConfig(model="m", debug=("no-graphs",))  # type: ignore[arg-type]


def test_json_option_reads_an_object() -> None:
    assert json_object('{"a": {"b": 1.5}}') == {"a": {"b": 1.5}}


@pytest.mark.parametrize(
    ("text", "message"), [("{", "'{' is not JSON"), ("[1]", "is not a JSON object"), ("", "not JSON")]
)
def test_other_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        json_object(text)


ODD_NUMBERS = ["１", "٣", "1_0", "+1", "1０", "²", "0x1", "", " ", "--1", "1 0"]


@pytest.mark.parametrize("text", ODD_NUMBERS)
def test_numbers_have_plain_digits(text: str) -> None:
    """Python reads most of these as numbers, and other programs do not."""
    assert not is_number(text)
    for number_type in (int, float):
        with pytest.raises(ValueError, match="is not a number in digits from 0 to 9"):
            read_number(text, number_type)
        with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
            number(number_type)(text)
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        size_bytes(f"{text}GiB")


def test_numbers_are_read() -> None:
    assert [read_number(text, int) for text in ("0", "-7", " 42\n", "007")] == [0, -7, 42, 7]
    assert [read_number(text, float) for text in ("1e3", "-.5", "2.", "1E-2", "inf")] == [1e3, -0.5, 2, 0.01, math.inf]
    assert is_number("0123456789")


@pytest.mark.parametrize("text", ["１", "1_0", "+1"])
@pytest.mark.parametrize(
    "read",
    [
        lambda text: parse_range(f"1-{text}", "--x"),
        lambda text: parse_numbers(f"1,{text}", "--x", int),
        lambda text: parse_numbers(text, "--x", float),
        lambda text: parse_slo(f"ttft:{text}"),
        lambda text: parse_mix(f"generation={text}"),
        lambda text: parse_fleet(f"models: {{a: {{checkpoint: meltcore/sums, max_num_seqs: {text}}}}}"),
        lambda text: parse_fleet(f"models: {{a: {{checkpoint: meltcore/sums, memory: {text}GiB}}}}"),
    ],
)
def test_numbers_of_workloads_and_files_have_plain_digits(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(text)
    assert text in str(error.value)


@pytest.mark.parametrize("text", ["010", "0x10", "1:30", "1_000.5", "+1.5", "1:30.5"])
def test_numbers_of_a_fleet_file_are_not_read_in_other_forms_of_yaml(text: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2: got .*; write a number in plain digits, text in quotes"):
        parse_fleet(f"models: {{a: {{checkpoint: meltcore/sums}}}}\ntimeouts: {{request_s: {text}}}")
    parse_fleet(f"models: {{a: {{checkpoint: '{text}', max_num_seqs: 10}}}}\ntimeouts: {{request_s: 1.5}}")


@pytest.mark.parametrize("command", [["ps", "--port"], ["down", "--timeout"], ["serve", "m", "-tp"], ["logs", "-n"]])
@pytest.mark.parametrize("text", ["１", "1_0", "+1"])
def test_options_of_commands_have_plain_digits(
    command: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, text])
    assert f"{text!r} is not a" in capsys.readouterr().err
