"""Fails where a built documentation site would load anything from another host, or has no search in a folder.

    check_site.py SITE

Reads every HTML and CSS file: scripts, styles, images, fonts and frames must be local. Links for readers may point
anywhere. Browsers start no worker and read no JSON from a folder, so each page loads what stands in for both.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "use": ("href", "xlink:href"),
}
_LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}
_EXTERNAL = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
_SHIM = 'iframe-worker.js"></script>'
_CSS_URL = re.compile(r"""(?:url\(|@import\s+)["']?((?:[a-z]+:)?//[^"')\s]+)""", re.IGNORECASE)


class _Loads(HTMLParser):
    """Collects the addresses that a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        if tag == "link" and _LOADED_LINKS & set(values.get("rel", "").split()):
            self.found.append(values.get("href", ""))
        self.found += [values[key] for key in _LOADED.get(tag, ()) if key in values]
        self.found += _CSS_URL.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        self.found += _CSS_URL.findall(data)


def external_loads(site: Path) -> list[str]:
    """`FILE: ADDRESS` for everything that a page or style sheet of the site loads from another host."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            page = _Loads()
            page.feed(path.read_text())
            found += [f"{path.relative_to(site)}: {each}" for each in page.found if _EXTERNAL.match(each)]
        elif path.suffix == ".css":
            found += [f"{path.relative_to(site)}: {each}" for each in _CSS_URL.findall(path.read_text())]
    return found


def without_search(site: Path) -> list[str]:
    """The pages that have no search when they are opened from a folder; all of them where the index is missing."""
    has_index = (site / "search" / "search_index.js").exists()
    pages = sorted(site.rglob("*.html"))
    return [str(path.relative_to(site)) for path in pages if not has_index or _SHIM not in path.read_text()]


def main() -> int:
    site = Path(sys.argv[1])
    pages = list(site.rglob("*.html"))
    if not pages:
        print(f"{site} holds no pages", file=sys.stderr)
        return 2
    found = external_loads(site)
    for each in found:
        print(f"loaded from another host: {each}", file=sys.stderr)
    silent = without_search(site)
    for each in silent:
        print(f"no search from a folder: {each}", file=sys.stderr)
    if found or silent:
        return 1
    print(f"{len(pages)} pages load nothing from other hosts, and have search from a folder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
