"""The page of any one document, drawn again."""

from __future__ import annotations

from pathlib import Path

from meltcore.errors import ConfigError
from meltcore.report.card_page import render_card
from meltcore.report.certificate_page import render_certificate
from meltcore.report.documents import PAGES, Document
from meltcore.report.gaps_page import render_profile
from meltcore.report.judge_page import render_judgement
from meltcore.report.page import render
from meltcore.report.tune_page import render_tuning
from meltcore.results.card import Card
from meltcore.results.certificate import Certificate
from meltcore.results.gaps import Profile
from meltcore.results.judgement import Judgement
from meltcore.results.snapshot import Snapshot
from meltcore.results.tuning import Tuning


def page_of(document: Document) -> str:
    """As HTML. Raises ConfigError for a snapshot, which has no page of its own."""
    content = document.content
    if isinstance(content, Snapshot):
        raise ConfigError(
            f"{document.path} is a snapshot, which has no page of its own: give it with others for a card"
        )
    if isinstance(content, Certificate):
        return render_certificate(content)
    if isinstance(content, Tuning):
        return render_tuning(content)
    if isinstance(content, Profile):
        return render_profile(content)
    if isinstance(content, Judgement):
        return render_judgement(content)
    return render_card(content) if isinstance(content, Card) else render(content)


def place_of(document: Document) -> Path:
    """Where its page belongs: beside it, under the name that its command gave it."""
    name = PAGES.get(document.path.name, f"{document.path.stem}.html")
    return document.path.with_name(name)
