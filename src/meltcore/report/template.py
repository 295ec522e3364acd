"""Filling a page: one frame and one style sheet for all, strict about names, nothing fetched from anywhere."""

from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from meltcore.results import wording


def fill(template: str, **context: Any) -> str:
    """The page `template` (a file of this folder that extends base.html) with `context`."""
    environment = Environment(
        loader=PackageLoader("meltcore", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=wording.number, percent=wording.percent, duration=wording.duration, load_of=wording.load_of
    )
    style = Markup((resources.files("meltcore.report") / "report.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(style=style, **context)
