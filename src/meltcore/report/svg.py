"""A little SVG: the elements our charts are made of. Colours come from the page's style sheet by class name."""

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

Point = tuple[float, float]


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """One element. `cls` becomes `class`, underscores become hyphens; numbers get one decimal; text is escaped."""
    parts = [_attribute(name, value) for name, value in attributes.items()]
    inner = Markup("").join(escape(child) for child in children)
    opening = " ".join([tag, *parts])
    return Markup(f"<{opening}>{inner}</{tag}>") if inner else Markup(f"<{opening}/>")


def _attribute(name: str, value: object) -> str:
    written = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
    written_name = "class" if name == "cls" else name.replace("_", "-")
    return f'{written_name}="{escape(written)}"'


def text(at: Point, content: str, cls: str, anchor: str = "middle") -> Markup:
    return element("text", content, x=at[0], y=at[1], cls=cls, text_anchor=anchor)


def line(start: Point, end: Point, cls: str) -> Markup:
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], cls=cls)


def polyline(points: Sequence[Point], cls: str) -> Markup:
    return element("polyline", points=_points(points), cls=cls)


def area(points: Sequence[Point], floor: float, cls: str) -> Markup:
    """The region between a line and the height `floor`."""
    outline = [(points[0][0], floor), *points, (points[-1][0], floor)]
    return element("polygon", points=_points(outline), cls=cls)


def dot(at: Point, cls: str, tip: str) -> Markup:
    """A point of a series; hovering over it shows `tip`."""
    return element("circle", element("title", tip), cx=at[0], cy=at[1], r=4, cls=cls)


def picture(width: float, height: float, label: str, children: Iterable[Markup]) -> Markup:
    """The whole drawing: scales with its column; `label` is what a screen reader says."""
    return element("svg", *children, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
