"""Draws the life of a replica from its table, for docs/fleet.md: docs/replica-life.svg and replica-life-narrow.svg.

python scripts/replica_picture.py

Boxes and paths stand here; what an arrow says comes from the table. A row of the table that no arrow shows is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from meltcore.fleet.run.replica import LIFE, ReplicaState

DOCS = Path(__file__).resolve().parent.parent / "docs"
CAPTIONS: dict[ReplicaState, str] = {
    "waiting": "for its turn",
    "pending": "no node has room",
    "loading": "",
    "ready": "serves",
    "draining": "ends its requests",
    "sleeping": "memory is free",
    "pausing": "before a start",
    "unloaded": "until wanted",
    "failed": "until restarted",
}
FRAME: tuple[ReplicaState, ...] = ("waiting", "pending", "loading", "ready", "draining", "sleeping")
OUTSIDE: tuple[ReplicaState, ...] = ("pausing", "unloaded", "failed")
STYLE = """
    .box { fill: #fff; stroke: #37474f; stroke-width: 1.5; rx: 6 }
    .frame { fill: none; stroke: #90a4ae; stroke-dasharray: 4 4; rx: 10 } .gpu { fill: #fff3e0; stroke: #e65100 }
    .t { font-weight: 600; fill: #111; text-anchor: middle } .s { fill: #455a64; font-size: 12px; text-anchor: middle }
    .r { text-anchor: start }
    .l { stroke: #37474f; stroke-width: 1.5; fill: none } .e { marker-end: url(#a) }
"""
MARKER = (
    '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0l10 5-10 5z" fill="#37474f"/></marker></defs>'
)


class Arrow(NamedTuple):
    """The rows of the table that lead from some states to another one, with the place of their events' names.

    joins: lines of other sources that end at the path. is_wrapped: a note has a line of its own.
    """

    sources: tuple[ReplicaState, ...]
    target: ReplicaState
    path: str
    x: int
    y: int
    is_centered: bool = True
    joins: str = ""
    is_wrapped: bool = False


class Layout(NamedTuple):
    """One of the two pictures. Boxes have their left upper corner; all have one height."""

    file: str
    width: int
    height: int
    frame: tuple[int, int, int, int]
    box_width: int
    outer_width: int  # of the boxes outside the frame
    boxes: dict[ReplicaState, tuple[int, int]]
    arrows: tuple[Arrow, ...]


BOX_HEIGHT = 52
WIDE = Layout(
    "replica-life.svg",
    1060,
    352,
    (20, 56, 720, 224),
    124,
    160,
    {
        "waiting": (40, 84),
        "loading": (220, 84),
        "ready": (400, 84),
        "draining": (586, 84),
        "pending": (130, 200),
        "sleeping": (500, 200),
        "pausing": (870, 36),
        "unloaded": (870, 142),
        "failed": (870, 248),
    },
    (
        Arrow(FRAME, "waiting", "M102 20V80", 110, 44, is_centered=False),
        Arrow(("waiting",), "loading", "M164 110H216", 190, 102),
        Arrow(("pending",), "loading", "M254 226H282V140", 310, 180),
        Arrow(("loading",), "ready", "M344 110H396", 370, 102),
        Arrow(("ready",), "draining", "M524 110H582", 553, 102),
        Arrow(("draining",), "sleeping", "M648 136V226H628", 674, 180),
        Arrow(("sleeping",), "ready", "M500 226H462V140", 436, 180),
        Arrow(FRAME, "pending", "M192 280V256", 200, 274, is_centered=False),
        Arrow(FRAME, "pausing", "M740 62H866", 803, 54),
        Arrow(FRAME, "unloaded", "M740 168H866", 803, 144, is_wrapped=True),
        Arrow(FRAME, "failed", "M740 274H866", 803, 266),
        Arrow(("pausing", "failed"), "unloaded", "M950 88V138M950 248V198", 958, 118, is_centered=False),
        Arrow(OUTSIDE, "waiting", "M1030 62H1046V320H70V140", 420, 312, joins="M1030 168H1046M1030 274H1046"),
    ),
)
NARROW = Layout(
    "replica-life-narrow.svg",
    400,
    560,
    (24, 46, 370, 310),
    124,
    92,
    {
        "waiting": (44, 78),
        "loading": (254, 78),
        "pending": (44, 176),
        "ready": (254, 176),
        "sleeping": (44, 286),
        "draining": (254, 286),
        "pausing": (18, 444),
        "unloaded": (154, 444),
        "failed": (296, 444),
    },
    (
        Arrow(FRAME, "waiting", "M106 14V74", 114, 34, is_centered=False),
        Arrow(("waiting",), "loading", "M168 104H250", 209, 96),
        Arrow(("pending",), "loading", "M168 192L250 130", 190, 148),
        Arrow(("loading",), "ready", "M316 130V172", 324, 156, is_centered=False),
        Arrow(("ready",), "draining", "M316 228V282", 324, 260, is_centered=False),
        Arrow(("draining",), "sleeping", "M254 312H172", 213, 304),
        Arrow(("sleeping",), "ready", "M168 298L250 228", 190, 250),
        Arrow(FRAME, "pending", "M24 202H40", 30, 166, is_centered=False),
        Arrow(FRAME, "pausing", "M64 356V440", 70, 404, is_centered=False),
        Arrow(FRAME, "unloaded", "M200 356V440", 206, 396, is_centered=False, is_wrapped=True),
        Arrow(FRAME, "failed", "M342 356V440", 312, 430),
        Arrow(("pausing", "failed"), "unloaded", "M110 470H150M296 470H252", 132, 462),
        Arrow(OUTSIDE, "waiting", "M342 496V520H10V104H40", 204, 538, joins="M64 496V520M200 496V520"),
    ),
)


def main() -> None:
    """Write both pictures."""
    for layout in (WIDE, NARROW):
        (DOCS / layout.file).write_text(picture(layout), encoding="utf-8")
        print(f"written: docs/{layout.file}")


def picture(layout: Layout) -> str:
    """Return a picture as SVG. Raises SystemExit for a row of the table that it does not show."""
    check_complete(layout)
    title, (x, y, width, height) = "The life of a replica", layout.frame
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {layout.height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img" aria-label="{title}">',
        f"  <style>{STYLE}  </style>",
        f"  {MARKER}",
        f'  <rect width="{layout.width}" height="{layout.height}" fill="#fafafa"/>',
        f'  <rect class="frame" x="{x}" y="{y}" width="{width}" height="{height}"/>',
    ]
    for state, (left, top) in layout.boxes.items():
        box_width = layout.box_width if state in FRAME else layout.outer_width
        middle, kind = left + box_width // 2, "box gpu" if state in ("loading", "ready", "draining") else "box"
        title_y = top + (23 if CAPTIONS[state] else 31)
        lines.append(f'  <rect class="{kind}" x="{left}" y="{top}" width="{box_width}" height="{BOX_HEIGHT}"/>')
        lines.append(f'  <text class="t" x="{middle}" y="{title_y}">{state}</text>')
        if CAPTIONS[state]:
            lines.append(f'  <text class="s" x="{middle}" y="{top + 41}">{CAPTIONS[state]}</text>')
    for arrow in layout.arrows:
        lines += [f'  <path class="l e" d="M{path}"/>' for path in arrow.path.split("M")[1:]]
        lines += [f'  <path class="l" d="{arrow.joins}"/>'] if arrow.joins else []
        style = "s" if arrow.is_centered else "s r"
        lines += [
            f'  <text class="{style}" x="{arrow.x}" y="{arrow.y + 15 * index}">{text}</text>'
            for index, text in enumerate(labels(arrow))
        ]
    return "\n".join([*lines, "</svg>", ""])


def check_complete(layout: Layout) -> None:
    """Raise SystemExit where the arrows do not show each row of the table that changes the state."""
    shown = {(source, arrow.target) for arrow in layout.arrows for source in arrow.sources}
    rows = {(state, after) for state, events in LIFE.items() for after in events.values() if state != after}
    if missing := sorted(rows - shown):
        raise SystemExit(f"{layout.file} has no arrow for {missing}: add one to scripts/replica_picture.py")


def labels(arrow: Arrow) -> list[str]:
    """Return the lines of an arrow: its events, each with the states from which it does not lead along it."""
    found: dict[str, list[str]] = {}  # by the states that have no such row
    for event in dict.fromkeys(event for source in arrow.sources for event in LIFE[source]):
        having = [source for source in arrow.sources if LIFE[source].get(event) == arrow.target]
        without = [source for source in arrow.sources if source not in having and source != arrow.target]
        if having and having != [arrow.target]:
            found.setdefault(f"not from {' or '.join(without)}" if without else "", []).append(event)
    if arrow.is_wrapped:
        return [line for note, events in found.items() for line in (", ".join(events), note) if line]
    return ["; ".join(", ".join(events) + (note and f" ({note})") for note, events in found.items())]


if __name__ == "__main__":
    main()
