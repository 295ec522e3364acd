from pathlib import Path

import pytest

from meltcore.errors import ConfigError
from meltcore.trials.command import free_port, parse_command, read_command


def test_port_and_arguments_go_where_the_template_says() -> None:
    command = parse_command("serve model --port {port} {args} --last")
    assert command.filled(81, ["--seqs", "4"]) == ["serve", "model", "--port", "81", "--seqs", "4", "--last"]
    assert parse_command("serve --port={port}").filled(81, ["-x"]) == ["serve", "--port=81", "-x"]
    assert parse_command("serve --port={port} {args}").filled(81) == ["serve", "--port=81"]


def test_a_file_may_hold_comments_line_breaks_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "A.cmd"
    file.write_text("# ours\nCUDA_VISIBLE_DEVICES=0 NAME=\"two words\" \\\n  serve 'a model'\n  --port {port}  # 0\n")
    command = read_command(file)
    assert command.words == ("serve", "a model", "--port", "{port}")
    assert command.environment == {"CUDA_VISIBLE_DEVICES": "0", "NAME": "two words"}


def test_what_is_kept_of_a_command_holds_no_secret_and_no_folder() -> None:
    command = parse_command("TOKEN=hush /opt/bin/serve --api-key secret --port {port} {args}")
    assert command.published == "TOKEN=... .../serve --api-key '***' --port {port} {args}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "starts nothing"),
        ("A=1 # only that", "starts nothing"),
        ("serve 'model --port {port}", "cannot be read"),
        ("serve model --port 8000", "does not say where the port goes"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_anything_starts(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_command(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the command file .*none\.cmd"):
        read_command(tmp_path / "none.cmd")


def test_a_free_port_is_free() -> None:
    assert 1024 <= free_port() <= 65_535
