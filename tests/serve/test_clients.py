"""Clients of other projects, unchanged, against a server: agents of the terminal, and libraries for agents.

`scripts/client_environments.py` installs each in an environment of its own and runs this file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from client_programs import END, PROGRAMS
from server_harness import MODEL, RunningServer, make_model, running, scripted_server

import meltcore
from meltcore.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

LIMIT_S = 180.0
TASK = "Make the file made.txt."
# An agent's model runs a command once, by the tool and the argument as the agent names them. Any other repeats.
TEMPLATE = """\
{#- <tool_call> -#}
{%- set names = tools | default([], true) | map(attribute='function.name') | list -%}
{%- set is_agent = 'exec_command' in names or 'Bash' in names -%}
{%- if is_agent and messages | selectattr('role', 'equalto', 'tool') | list -%}The file is made.~
{%- elif 'exec_command' in names -%}
<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo made > made.txt"}}</tool_call>~
{%- elif 'Bash' in names -%}
<tool_call>{"name": "Bash", "arguments": {"command": "echo made > made.txt", "description": "Makes it"}}</tool_call>~
{%- else -%}{{ messages[-1].content }}
{%- endif -%}
"""


def installed(name: str, path: str) -> str:
    """A program in the environment of a client. Skips where the client is not installed."""
    folder = os.environ.get("MELTCORE_CLIENTS")
    if folder is None or not Path(folder, name, path).exists():
        pytest.skip(f"{name} is not installed: python scripts/client_environments.py FOLDER {name}")
    return str(Path(folder, name, path))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = make_model(tmp_path_factory.mktemp("model"), end_id=ord(END))
    tokenizer = tokenizers.Tokenizer.from_str(Tokenizer.synthetic_bytes(300)._backend.to_str())
    tokenizer.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer.save(str(model / "tokenizer.json"))  # calls can be enforced if their marks are tokens
    template = model / "agent.jinja"
    template.write_text(TEMPLATE)
    settings = {"checkpoint": str(model), "chat_template": str(template), "max_model_len": 8192}
    with scripted_server("--tokens-per-step", "8", engine=settings) as scripted:
        yield scripted
        scripted.check_no_leak()


def run(command: list[str], folder: Path, limit_s: float = LIMIT_S, **variables: str) -> str:
    """The output of a client, with a home and a working folder of its own."""
    home, work = folder / "home", folder / "work"
    for each in (home, work):
        each.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    ended = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def check_agent(text: str, folder: Path) -> None:
    assert (folder / "work/made.txt").read_text() == "made\n", text
    assert text.strip().endswith("The file is made.")


def test_codex_calls_a_tool_and_ends(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    codex = installed("codex", "node_modules/.bin/codex")
    url = request.getfixturevalue("server").url
    provider = f'{{name = "Meltcore", base_url = "{url}/v1", wire_api = "responses"}}'
    settings = ["-c", f"model_providers.meltcore={provider}", "-c", "model_provider=meltcore"]
    settings += ["-c", "web_search=disabled", "-m", MODEL]  # which the server would have to run
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    text = run([codex, "exec", *settings, *options, TASK], tmp_path, CODEX_HOME=str(tmp_path / "home"))
    check_agent(text, tmp_path)


def test_claude_code_calls_a_tool_and_ends(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    # Its command needs Node 22, the program that it starts does not.
    claude = installed("claude-code", "node_modules/@anthropic-ai/claude-code-linux-x64/claude")
    text = run(
        [claude, "-p", TASK, "--allowedTools", "Bash"],
        tmp_path,
        ANTHROPIC_BASE_URL=request.getfixturevalue("server").url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="2048",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    check_agent(text, tmp_path)


def served_values(value: Any, models: list[str]) -> Any:
    """A description of the API with the names of models that are there, and with few tokens."""
    if isinstance(value, list):
        return [served_values(each, models) for each in value]
    if not isinstance(value, dict):
        return value
    few = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
    return {
        name: {"enum": models}
        if name == "model" and isinstance(each, dict)
        else {"type": "integer", "minimum": 1, "maximum": 8}
        if name in few
        else {"type": "number", "minimum": 20}
        if value.get("name") == "X-Request-Timeout" and name == "schema"
        else served_values(each, models)
        for name, each in value.items()
    }


@pytest.mark.timeout(1000)
def test_the_api_answers_as_it_describes_itself(tmp_path: Path) -> None:
    """No status of 500 or above, but for the 501 of what needs a vision model or agents."""
    schemathesis = installed("schemathesis", "bin/schemathesis")
    tasks = {"sums": "generation", "phrases": "translation", "tones": "transcription", "voice": "synthesis"}
    models = {name: {"checkpoint": f"meltcore/{name}", "task": task, "device": "cpu"} for name, task in tasks.items()}
    (tmp_path / "fleet.yaml").write_text(json.dumps({"server": {"port": 0}, "models": models}))
    command = [sys.executable, "-m", "meltcore.cli.main", "up", str(tmp_path / "fleet.yaml")]
    with running(command, tmp_path / "stderr") as server:
        server.wait_healthy()
        document = server.request("GET", "/openapi.json").json
        refused = [path for path, each in document["paths"].items() if "'501'" in str(each)]
        for path in refused:
            del document["paths"][path]
        (tmp_path / "openapi.json").write_text(json.dumps(served_values(document, [*tasks])))
        checks = "status_code_conformance,content_type_conformance,response_schema_conformance"
        options = ["--checks", checks, "--phases", "examples,coverage,fuzzing", "--seed", "1"]
        options += ["--max-examples", "15", "--request-timeout", "60"]  # about 6,200 requests in all
        run([schemathesis, "run", str(tmp_path / "openapi.json"), "--url", server.url, *options], tmp_path, 800)
        log = server.stderr
    assert log.count("event=request") > 100
    assert [line for line in log.splitlines() if re.search(r"status=5(?!01|03|04)", line)] == []
    assert "Traceback" not in log


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "lm-eval"])
def test_a_library_chats_calls_tools_and_parses(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = installed(name, "bin/python")
    url = request.getfixturevalue("server").url
    program = str(Path(__file__).parent / "client_programs.py")
    run([python, program, name, f"{url}/v1", MODEL], tmp_path)


def test_the_harness_ranks_answers_by_the_log_probabilities_of_transformers(tmp_path: Path) -> None:
    python = installed("lm-eval", "bin/python")
    checkpoint = str(Path(meltcore.__file__).parent / "bundled/sums")
    command = [sys.executable, "-m", "meltcore.cli.main", "serve", checkpoint, "--port", "0", "--device", "cpu"]
    program = str(Path(__file__).parent / "client_programs.py")
    with running([*command, "--memory", "256MiB"], tmp_path / "stderr") as server:
        server.wait_healthy()
        text = run([python, program, "lm-eval", f"{server.url}/v1", checkpoint], tmp_path, HF_HUB_OFFLINE="1")
    import torch  # not before a test is skipped
    import transformers

    found = json.loads(text.splitlines()[-1])
    assert found["accuracy"] >= 0.9  # of three answers each
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    assert len(found["pairs"]) == 48
    for prompt, answer, score in found["pairs"]:
        texts = (prompt + answer, prompt.rstrip())  # whitespace between them is scored, too
        ids, begin = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(logprobs[at - 1, ids[at]]) for at in range(len(begin), len(ids)))
        assert score == pytest.approx(expected, abs=0.02), (prompt, answer)
