"""Names the version of the running code. Results state it, and the nodes of a cluster compare it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import meltcore

_SUFFIXES = {".py", ".cu"}


@functools.cache
def code_version(*folders: str) -> str:
    """Return meltcore's version and a digest of its code, such as "0.1.0+1f2e3d4c".

    With `folders`, the digest covers only these folders of the package.
    """
    root = Path(meltcore.__file__).parent
    digest = hashlib.sha256()
    for folder in folders or (".",):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{meltcore.__version__}+{digest.hexdigest()[:8]}"
