"""Draws the report of a demo for the README: docs/report.png, the page of benchmarks/results/demo/cpu.json.

    python scripts/report_picture.py        needs Chromium

The picture names the digest of the page that it shows, so that a test finds a picture that is older than its page. The
document was written by `make demo` on two idle cores, and lacks the recordings of its synthesis.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

import msgspec

from meltcore.measure.documents.schema import RunResult
from meltcore.measure.report.render import render

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "report.png"
DOCUMENT = ROOT / "benchmarks" / "results" / "demo" / "cpu.json"
WIDTH, HEIGHT = 1200, 1730  # pixels: cautions, tiles and the first charts
_SIGNATURE, _KEY = b"\x89PNG\r\n\x1a\n", b"page"


def page() -> str:
    """The HTML of the demo's report."""
    return render(msgspec.json.decode(DOCUMENT.read_bytes(), type=RunResult))


def digest(html: str) -> str:
    """What a picture of a page names."""
    return hashlib.sha256(html.encode()).hexdigest()


def shown(picture: bytes) -> str | None:
    """The digest of the page that a picture shows. Returns None for a picture that names none."""
    at = len(_SIGNATURE)
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        content = picture[at + 8 : at + 8 + length]
        if picture[at + 4 : at + 8] == b"tEXt" and content.startswith(_KEY + b"\0"):
            return content[len(_KEY) + 1 :].decode("latin-1")
        at += length + 12
    return None


def named(picture: bytes, digest_text: str) -> bytes:
    """A PNG picture with the digest of its page, in a chunk of text behind the header."""
    chunk = b"tEXt" + _KEY + b"\0" + digest_text.encode("latin-1")
    end = len(_SIGNATURE) + 25  # of the header's chunk
    added = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return picture[:end] + added + picture[end:]


def main() -> None:
    """Write the picture, if the page has changed."""
    html = page()
    if PICTURE.exists() and shown(PICTURE.read_bytes()) == digest(html):
        return
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit(f"{PICTURE.name} is older than its page, and Chromium, which draws it, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "report.html", Path(folder) / "report.png"
        source.write_text(html, encoding="utf-8")
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        )
        command = [chromium, *flags, f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={target}", source.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        PICTURE.write_bytes(named(target.read_bytes(), digest(html)))
    print(f"written: {PICTURE.name}")


if __name__ == "__main__":
    main()
