import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

import meltcore
from meltcore.results.fingerprint import clean_arguments, take_fingerprint


def test_the_fingerprint_names_machine_and_versions() -> None:
    found = take_fingerprint(["demo"], seed=3)
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28
    assert found.versions["meltcore"] == meltcore.__version__
    assert found.versions["numpy"]
    assert (found.arguments, found.seed) == (["demo"], 3)


def test_the_fingerprint_tells_no_host_name_and_no_folder() -> None:
    text = msgspec.json.encode(take_fingerprint(["--out", str(Path.home() / "runs")])).decode()
    assert str(Path.home() / "runs") not in text
    assert str(Path(meltcore.__file__).parent) not in text
    assert f'"{socket.gethostname()}"' not in text


def test_secrets_and_folders_leave_the_arguments() -> None:
    given = ["load", "http://me:pw@host:1", "--api-key", "abc", "--out=/home/me/x", "--hf-token=t", "--seed", "1"]
    assert clean_arguments(given) == [
        *("load", "http://***@host:1", "--api-key", "***", "--out=.../x", "--hf-token=***", "--seed", "1")
    ]


def test_a_secret_that_looks_like_an_option_is_hidden_too() -> None:
    assert clean_arguments(["--api-key", "--key", "x"]) == ["--api-key", "***", "x"]


def test_taking_a_fingerprint_does_not_import_torch() -> None:
    code = (
        "import sys; from meltcore.results.fingerprint import take_fingerprint; take_fingerprint(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
