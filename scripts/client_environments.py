"""Installs clients of other projects in environments of their own, and runs them against a server of this machine.

    python scripts/client_environments.py FOLDER                 # all clients, about 2 GB
    python scripts/client_environments.py FOLDER codex autogen   # these

Each client of Python gets a virtual environment FOLDER/NAME with the versions of scripts/client_constraints.txt, and
each agent a folder of npm. What is there already stays. Then tests/serve/test_clients.py runs: an agent calls a tool
and ends, a library chats, streams, calls tools and parses, lm-eval compares log-probabilities of a bundled model,
and Schemathesis sends to each route of a fleet what /openapi.json allows and what it does not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

INSTALL_LIMIT_S, RUN_LIMIT_S = 900, 1800
ROOT = Path(__file__).resolve().parent.parent
NPM = {"codex": "@openai/codex@0.171.0", "claude-code": "@anthropic-ai/claude-code@2.1.332"}
_OPENAI = ("openai==3.57.0", "jiter==0.19.0")
PIP = {
    "langchain": ("langchain-openai", *_OPENAI),
    "pydantic-ai": ("pydantic-ai-slim[openai]", *_OPENAI),
    "autogen": ("autogen-agentchat", "autogen-ext[openai]", *_OPENAI),
    "instructor": ("instructor", "openai==3.3.0", "jiter==0.14.0", "rich==14.3.4"),  # it accepts no later ones
    "litellm": ("litellm", *_OPENAI),
    "schemathesis": ("schemathesis", "rich==15.0.0"),
    "lm-eval": ("lm_eval[api]", "transformers", "rich==15.0.0"),
}


def install(name: str, folder: Path) -> None:
    """Make the environment of a client. Raises CalledProcessError if its packages cannot be had."""
    target = folder / name
    if (target / "installed").exists():
        return
    if name in NPM:
        target.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"--prefix={target}", NPM[name]]
    else:
        venv.create(target, with_pip=True, clear=True)
        constraints = str(ROOT / "scripts/client_constraints.txt")
        command = [str(target / "bin/pip"), "install", "-q", "--no-compile", "-c", constraints, *PIP[name]]
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)
    (target / "installed").touch()


def main(argv: Sequence[str] | None = None) -> int:
    """Install the clients and run the tests. Return the exit code of pytest, or 1 if a client cannot be installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environments are, or will be")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*NPM, *PIP])}; default: all")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in (*NPM, *PIP)]
    if unknown:
        parser.error(f"no client {unknown[0]!r}; known are {', '.join([*NPM, *PIP])}")
    folder = args.folder.resolve()
    failed = False
    for name in args.names or (*NPM, *PIP):
        print(f"installing {name}", flush=True)
        try:
            install(name, folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            print(f"{name} is not installed: {error}", file=sys.stderr)
            failed = True
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "tests/serve/test_clients.py"]
    environment = os.environ | {"MELTCORE_CLIENTS": str(folder)}
    code = subprocess.run(command, cwd=ROOT, env=environment, timeout=RUN_LIMIT_S).returncode
    return code or int(failed)


if __name__ == "__main__":
    sys.exit(main())
