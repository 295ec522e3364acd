"""Hub ids of repositories with GGUF files: which file they name, and that only it is downloaded. A fake hub."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import httpx
import huggingface_hub
import numpy as np
import pytest
from gguf_tools import add_tokenizer, finish, new_writer
from hf_xet import XetFileInfo, XetSession
from transformers import AutoConfig
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.process import call_with_timeout
from meltcore.models.checkpoints import hub
from meltcore.models.checkpoints.checkpoint import find_folder, open_checkpoint
from meltcore.models.checkpoints.hub import download_gguf, hub_problem, hub_problems

SPLIT = [f"BF16/M-BF16-0000{part}-of-00002.gguf" for part in (1, 2)]
SEVERAL = ["README.md", "config.json", "M-Q8_0.gguf", "M-Q4_K_M.gguf", "M-UD-Q4_K_M.gguf", "mmproj-M-f16.gguf", *SPLIT]
REPOSITORIES = {
    "owner/several-GGUF": SEVERAL,
    "owner/one-gguf": ["README.md", "m-q4_0.gguf", "mmproj-model-f16-27B.gguf"],
    "owner/beside": [
        *("M-imatrix-Q4_K_M.gguf", "M.imatrix.gguf", "imatrix_M.gguf", "M-mmproj-F16.gguf", "MMPROJ-BF16.gguf"),
        *("x/M-mmproj-f16.gguf", "imatrix-Q8_0.gguf"),
    ],
    "owner/upper-gguf": ["M-Q8_0.GGUF", "imatrix.GGUF"],
    "owner/both": ["config.json", "model.safetensors", "m-Q8_0.gguf"],
    "owner/usual": ["config.json", "model.safetensors"],
    "owner/bin": ["config.json", "pytorch_model.bin", "tf_model.h5"],
    "owner/embedder": [
        *("config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json", "model.safetensors"),
        *("onnx/config.json", "1_Pooling/notes.txt", "openvino/1_x/config.json"),
    ],
}
Asked = list[tuple[str, tuple[str, ...]]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A hub of REPOSITORIES, and the downloads that it was asked for."""
    downloads: Asked = []

    def download(repository: str, *, allow_patterns: list[str] | None = None, local_files_only: bool = False) -> str:
        folder = tmp_path / repository
        if local_files_only:
            if not folder.exists():
                raise OSError("not in the cache")
            return str(folder)
        patterns = allow_patterns or ["*"]
        files = [name for name in REPOSITORIES[repository] if any(fnmatch(name, pattern) for pattern in patterns)]
        downloads.append((repository, tuple(files)))
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"GGUF")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", REPOSITORIES.__getitem__)
    return downloads


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("owner/one-gguf", ["m-q4_0.gguf"]),
        ("owner/one-gguf:Q4_0", ["m-q4_0.gguf"]),
        ("owner/several-GGUF:q8_0", ["M-Q8_0.gguf"]),
        ("owner/several-GGUF:UD-Q4_K_M", ["M-UD-Q4_K_M.gguf"]),
        ("owner/several-GGUF:M-Q4_K_M.gguf", ["M-Q4_K_M.gguf"]),
        ("owner/several-GGUF:BF16", SPLIT),
        ("owner/several-GGUF:M-BF16-00001-of-00002.gguf", SPLIT),
        ("owner/several-GGUF:BF16/M-BF16-00001-of-00002.gguf", SPLIT),
        ("owner/both:Q8_0", ["m-Q8_0.gguf"]),
        ("owner/beside", ["M-imatrix-Q4_K_M.gguf"]),
        ("owner/beside:q4_k_m", ["M-imatrix-Q4_K_M.gguf"]),
        ("owner/upper-gguf", ["M-Q8_0.GGUF"]),
        ("owner/upper-gguf:M-Q8_0.GGUF", ["M-Q8_0.GGUF"]),
        ("owner/upper-gguf:q8_0", ["M-Q8_0.GGUF"]),
    ],
)
def test_only_the_chosen_file_is_downloaded(asked: Asked, tmp_path: Path, model: str, files: list[str]) -> None:
    repository = model.partition(":")[0]
    assert download_gguf(model) == tmp_path / repository / files[0]
    assert asked == [(repository, tuple(files))]


@pytest.mark.parametrize("model", ["owner/both", "owner/usual", "./owner/one-gguf", "owner/m.gguf", "one", "a/b/c"])
def test_other_names_are_no_gguf_files_of_the_hub(asked: Asked, model: str) -> None:
    assert download_gguf(model) is None
    assert asked == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("owner/several-GGUF", "it has several GGUF files; choose one as owner/several-GGUF:FILE .*: .*, M-Q8_0.gguf"),
        ("owner/several-GGUF:Q4_K_M", "2 of its GGUF files match 'Q4_K_M'; .*: M-Q4_K_M.gguf, M-UD-Q4_K_M.gguf$"),
        ("owner/several-GGUF:K_M", "0 of its GGUF files match 'K_M'; .*: BF16/M-BF16-00001-of-00002.gguf, M-Q4_K_M"),
        ("owner/several-GGUF:8_0", "0 of its GGUF files match '8_0'"),
        ("owner/usual:Q8_0", "owner/usual has no .*gguf files to choose from"),
    ],
)
def test_choice_of_none_or_several_is_refused_with_the_files(asked: Asked, model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        open_checkpoint(model, files="all")
    assert "mmproj" not in str(refused.value)
    assert asked == []


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("M-mmproj-F16.gguf", "M-mmproj-F16.gguf is a multimodal projector by its name, and no model"),
        ("bf16", "MMPROJ-BF16.gguf is a multimodal projector by its name, and no model"),
        ("M.imatrix.gguf", "M.imatrix.gguf is an importance matrix by its name, and no model"),
        ("Q8_0", "imatrix-Q8_0.gguf is an importance matrix by its name, and no model"),
    ],
)
def test_choice_of_what_stands_beside_a_model_is_refused_as_such(asked: Asked, choice: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(f"owner/beside:{choice}", files="all")
    assert asked == []


def without_network(*_: object) -> list[str]:
    raise OSError("no network\nand more")


def test_modules_of_sentence_transformers_and_a_pytorch_file_are_downloaded(asked: Asked) -> None:
    find_folder("owner/embedder", "text")
    find_folder("owner/embedder", "all")
    texts = ("config.json", "modules.json", "1_Pooling/config.json", "2_Dense/config.json")
    find_folder("owner/bin", "all")
    assert asked == [
        ("owner/embedder", texts),
        ("owner/embedder", (*texts, "model.safetensors")),
        ("owner/bin", ("config.json", "pytorch_model.bin")),
    ]


def test_cached_file_is_found_without_a_connection(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    found = download_gguf("owner/several-GGUF:Q8_0")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", without_network)
    assert download_gguf("owner/several-GGUF") == found  # the only one in the cache
    with pytest.raises(ConfigError, match=r"^owner/one-gguf: its files cannot be listed: no network$"):
        download_gguf("owner/one-gguf:Q4_0")
    assert asked[0] == ("owner/several-GGUF", ("M-Q8_0.gguf",))


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("owner/usual", ""),
        ("owner/one-gguf", ""),
        ("owner/several-GGUF:Q9_9", "owner/several-GGUF:Q9_9: 0 of its GGUF files match 'Q9_9'"),
        ("owner/none", "owner/none: not a local folder, and its download from the hub failed: 'owner/none'"),
    ],
)
def test_problem_of_a_hub_id_is_named_and_no_weights_are_downloaded(asked: Asked, model: str, problem: str) -> None:
    assert hub_problem(model).startswith(problem)
    assert bool(hub_problem(model)) == bool(problem)
    assert all(files == ("config.json",) for _, files in asked)


def test_hub_that_does_not_answer_leaves_the_cache_to_answer(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has no time limit where packets are dropped."""
    download_gguf("owner/one-gguf")
    closed = threading.Event()

    def list_files(repository: str) -> list[str]:
        if repository != "owner/usual":
            closed.wait(WAIT_S)
        return REPOSITORIES[repository]

    monkeypatch.setattr(huggingface_hub, "list_repo_files", list_files)
    problems = hub_problems(["owner/usual", "owner/one-gguf", "owner/several-GGUF:Q8_0"], 2.0)
    assert not closed.is_set()
    closed.set()
    lacks = "the hub gave no answer within 2 s, and the cache does not have it"
    assert problems == {"owner/usual": "", "owner/one-gguf": "", "owner/several-GGUF:Q8_0": lacks}


def test_checkpoint_of_the_hub_is_the_file(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr(Path, "write_bytes", lambda path, _: write(path))
    for files in ("config", "text", "all"):
        checkpoint = open_checkpoint("owner/one-gguf", files=files)  # type: ignore[arg-type]
        assert checkpoint.name == "owner/one-gguf"
        assert checkpoint.gguf is not None
        assert checkpoint.gguf.path == tmp_path / "owner/one-gguf/m-q4_0.gguf"
    assert len(asked) == 3


@pytest.fixture
def write() -> Callable[[Path], Path]:
    """Writes the header of a small network."""

    def write_header(path: Path) -> Path:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        writer = new_writer(path, AutoConfig.for_model("qwen3", **sizes))
        add_tokenizer(writer, tokens=[f"t{index}" for index in range(300)])
        for name, shape in (("token_embd", (300, 64)), ("blk.0.attn_norm", (64,))):
            writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
        return finish(writer, path)

    return write_header


def test_hub_that_sends_nothing_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client waits without a limit for the list of a repository's files."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_SILENCE_LIMIT_S", 0.05)
    hub._limit_silence()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(httpx.ReadTimeout):
        huggingface_hub.get_session().get(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=None)


def test_hub_that_sends_nothing_ends_a_download_of_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Large files come through hf_xet, which repeated a silent request 5 times, for 120 s each."""
    for name in ("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "HF_XET_CLIENT_READ_TIMEOUT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
    monkeypatch.setattr(hub, "_SILENCE_LIMIT_S", 0.3)
    hub._limit_silence()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, session = f"http://127.0.0.1:{silent.getsockname()[1]}", XetSession()

        def download() -> None:
            with session.new_file_download_group(
                endpoint=url, token="a", token_expiry_unix_secs=2**40, token_refresh_url=url, token_refresh_headers={}
            ) as group:
                group.start_download_file(XetFileInfo("a" * 64, 1000), str(tmp_path / "model.safetensors"))

        with pytest.raises(RuntimeError, match="error sending request"):
            call_with_timeout(WAIT_S, download)


def test_without_downloads_the_advice_is_one_that_plan_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meltcore plan` sets HF_HUB_OFFLINE, and its error told users to unset it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for model in ("owner/none", "owner/none-GGUF:Q8_0"):
        with pytest.raises(ConfigError, match=r"not in the cache .* as `meltcore plan` does; .*`shapes:`"):
            open_checkpoint(model, files="all")
