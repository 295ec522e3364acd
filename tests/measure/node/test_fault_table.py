"""The table of faults in the documentation names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_every_fault_of_the_table_has_its_test() -> None:
    page = (TESTS.parent / "docs/certify.md").read_text()
    faults = dict(re.findall(r"^\| ([^|]+?) \| `(test_\w+)` \|", page, re.MULTILINE))
    files = [*(TESTS / "measure/node").glob("test_*.py"), TESTS / "cli/test_certify_command.py"]
    defined = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert len(faults) == 30
    assert set(faults.values()) - defined == set()
