"""Renders the page of any document; each document type has its page builder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.common.files import write_document
from meltcore.measure.documents.backends import BackendComparison
from meltcore.measure.documents.card import Card
from meltcore.measure.documents.comparison import ComparisonResult
from meltcore.measure.documents.gaps import GpuProfile
from meltcore.measure.documents.node import Certificate
from meltcore.measure.documents.schema import FleetLoad, RunResult
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.tuning import Tuning
from meltcore.measure.documents.values.documents import PAGE_FILES, Content, DocumentFile
from meltcore.measure.report.comparisons.backends import backends_page
from meltcore.measure.report.comparisons.comparison import comparison_page
from meltcore.measure.report.comparisons.tuning import tuning_page
from meltcore.measure.report.load.fleet_load import fleet_load_page
from meltcore.measure.report.load.run import run_page
from meltcore.measure.report.nodes.card import card_page
from meltcore.measure.report.nodes.certificate import certificate_page
from meltcore.measure.report.nodes.profile import profile_page
from meltcore.measure.report.page.charts_export import export_page
from meltcore.measure.report.page.html import render_html, write_page
from meltcore.measure.report.page.page import Page
from meltcore.measure.report.scores.score import score_page

_PAGE_BUILDERS: dict[type, Callable[[Any], Page]] = {
    RunResult: run_page,
    ScoredRun: score_page,
    Certificate: certificate_page,
    Tuning: tuning_page,
    GpuProfile: profile_page,
    ComparisonResult: comparison_page,
    BackendComparison: backends_page,
    Card: card_page,
    FleetLoad: fleet_load_page,
}


def render(content: object) -> str:
    """Return the page of a document as HTML text."""
    return render_html(_PAGE_BUILDERS[type(content)](content))


def save_document(path: Path, content: Content, page_path: Path | None = None) -> Path:
    """Write a document to `path`, and its page as `render_document` does. Returns the path of the page."""
    write_document(path, content)
    return render_document(DocumentFile(path, content), page_path)


def export_document(document: DocumentFile, path: Path) -> Path:
    """Write the charts of a document's page to `path`, an SVG or PNG file, and return the path.

    Raises ConfigError for a document without a page, a page without charts, and a path that cannot be written.
    """
    export_page(_page_builder(document)(document.content), path)
    return path


def render_document(document: DocumentFile, path: Path | None = None) -> Path:
    """Write a document's page to `path`, by default to its usual name beside the document, and return the path.

    Raises ConfigError for a snapshot, which has no page.
    """
    builder = _page_builder(document)
    page_path = document.path.with_name(PAGE_FILES.get(document.path.name, f"{document.path.stem}.html"))
    return write_page(path or page_path, builder(document.content))


def _page_builder(document: DocumentFile) -> Callable[[Any], Page]:
    if type(document.content) not in _PAGE_BUILDERS:
        raise ConfigError(
            f"{document.path} is a snapshot, which has no page of its own: give it with others for a card"
        )
    return _PAGE_BUILDERS[type(document.content)]
