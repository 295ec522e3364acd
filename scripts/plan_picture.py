"""Draws the plan of the example fleet within 96 GiB: docs/fleet-plan.svg, for docs/one-gpu.md.

python scripts/plan_picture.py
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from xml.sax.saxutils import escape

from meltcore.common.sizes import GIB
from meltcore.fleet.plan.context_memory import find_contexts
from meltcore.fleet.plan.plan import Plan, plan_fleet
from meltcore.settings.fleet_file import parse_fleet

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "fleet-plan.svg"
VRAM_GIB = 96
# In units of the picture, which is as wide as a small screen has pixels.
WIDTH, MARGIN, ROW, BAR, NAME_Y = 400, 8, 34, 12, 12
CACHES = ("KV pages", "recurrent states", "slots", "activations", "requests")
KINDS = {"weights": "weights", "caches": "KV, activations", "other": "workspace", "context": "CUDA context"}
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 11px; fill: #57606a; }
.weights { fill: #3b6fb6; } .caches { fill: #2e9e7c; } .other { fill: #c98a2b; } .context { fill: #8b949e; }
.frame { fill: none; stroke: #8b949e; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9da7b3; }
  .weights { fill: #6ea0e6; } .caches { fill: #4cc39d; } .other { fill: #e0aa52; } .context { fill: #6e7681; }
}
"""


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"written: {PICTURE.name}")


def picture() -> str:
    """Return the SVG of the example fleet's plan."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    text = (resources.files("meltcore.fleet") / "examples" / "fleet.yaml").read_text(encoding="utf-8")
    plan, _ = plan_fleet(parse_fleet(text), [VRAM_GIB * GIB], contexts=find_contexts(None))
    if plan is None:
        raise SystemExit(f"the example fleet does not fit within {VRAM_GIB} GiB")
    rows = [("driver", {"context": plan.gpus[0].driver_bytes}), *((name, parts(plan, name)) for name in plan.needs)]
    used = plan.gpus[0].used_bytes
    height = (len(rows) + 1) * ROW + 46
    title = f"{used / GIB:.1f} of {VRAM_GIB} GiB planned"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<text x="{MARGIN}" y="{NAME_Y}">{title}</text>',
        *bar(MARGIN, 18, [(kind, sum(sizes.get(kind, 0) for _, sizes in rows)) for kind in KINDS], VRAM_GIB * GIB),
        f'<rect class="frame" x="{MARGIN}" y="18" width="{WIDTH - 2 * MARGIN}" height="{BAR}"/>',
    ]
    largest = max(sum(sizes.values()) for _, sizes in rows)
    for index, (name, sizes) in enumerate(sorted(rows, key=lambda row: -sum(row[1].values()))):
        top = (index + 1) * ROW + 10
        label = f"{sum(sizes.values()) / GIB:.2f} GiB"
        lines.append(f'<text x="{MARGIN}" y="{top + NAME_Y - 2}">{escape(name)}</text>')
        lines.append(
            f'<text class="small" x="{WIDTH - MARGIN}" y="{top + NAME_Y - 2}" text-anchor="end">{label}</text>'
        )
        lines += bar(MARGIN, top + NAME_Y + 2, [(kind, sizes.get(kind, 0)) for kind in KINDS], largest)
    x = float(MARGIN)
    for kind, text_of_kind in KINDS.items():
        lines.append(f'<rect class="{kind}" x="{x:.0f}" y="{height - 20}" width="10" height="10"/>')
        lines.append(f'<text class="small" x="{x + 13:.0f}" y="{height - 11}">{text_of_kind}</text>')
        x += 13 + 6.2 * len(text_of_kind) + 8
    return "\n".join([*lines, "</svg>", ""])


def parts(plan: Plan, name: str) -> dict[str, int]:
    """Return the bytes of a model by kind, those of its context included."""
    needs = plan.needs[name]
    sizes = {row.name: row.size_bytes for row in needs.rows}
    caches = sum(sizes.get(cache, 0) for cache in CACHES)
    other = needs.budget_bytes - sizes["weights"] - caches
    context = plan.contexts.process_bytes(needs.task)
    return {"weights": sizes["weights"], "caches": caches, "other": other, "context": context}


def bar(x: float, y: int, sizes: list[tuple[str, int]], total: int) -> list[str]:
    """Return the rectangles of a stacked bar; `total` is as wide as the picture without its margins."""
    lines = []
    for kind, size in sizes:
        width = (WIDTH - 2 * MARGIN) * size / total
        if size:
            lines.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>')
        x += width
    return lines


if __name__ == "__main__":
    main()
