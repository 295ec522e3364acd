"""Where things are for tests, wherever a test file is: the root of the project, and programs beside tests."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SHARED = ROOT.parent / "shared"  # data that is not part of the project; tests that need it skip without it
# Folders with modules that tests import. Their names are unique, so that a test finds those of any other folder.
HELPERS = sorted({str(path.parent) for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest"))})


def program(name: str) -> Path:
    """Return the file of this name below tests/ that a test starts or reads. Raises ValueError unless it is one."""
    [path] = TESTS.rglob(name)
    return path
