"""Filling a page: one style sheet for all, strict about names, nothing fetched from anywhere."""

from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meltcore.results import wording


def fill(template: str, **context: Any) -> str:
    """The page `template` (a file of this folder) with `context`, the style sheet as `style`."""
    folder = resources.files("meltcore.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        number=wording.number, percent=wording.percent, duration=wording.duration, load_of=wording.load_of
    )
    style = Markup((folder / "report.css").read_text(encoding="utf-8"))
    return environment.from_string((folder / template).read_text(encoding="utf-8")).render(style=style, **context)
