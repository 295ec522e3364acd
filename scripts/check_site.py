"""Fails where a built documentation site would load anything from another host.

    check_site.py SITE

Reads every HTML and CSS file: scripts, styles, images, fonts and frames must be local. Links for readers may point
anywhere.
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


def main() -> int:
    site = Path(sys.argv[1])
    pages = list(site.rglob("*.html"))
    if not pages:
        print(f"{site} holds no pages", file=sys.stderr)
        return 2
    found = external_loads(site)
    for each in found:
        print(f"loaded from another host: {each}", file=sys.stderr)
    if not found:
        print(f"{len(pages)} pages load nothing from other hosts")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
