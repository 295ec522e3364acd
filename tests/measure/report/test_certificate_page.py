"""The certificate's page and its lines on the console."""

import io
import re
from pathlib import Path

import msgspec
from rich.console import Console
from sample_certificates import certificate

from meltcore.measure.documents.node import Certificate, read_certificate
from meltcore.measure.report.nodes.certificate import certificate_page, check_line
from meltcore.measure.report.page.console import print_blocks, print_page
from meltcore.measure.report.render import render, save_document


def test_nothing_is_fetched_no_script_runs_and_names_are_escaped(tmp_path: Path) -> None:
    html = render(certificate(tmp_path))
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://", html)
    assert "<fake>" not in html
    assert "&lt;fake&gt;" in html


def test_verdict_the_findings_and_what_to_do_stand_before_the_measurements(tmp_path: Path) -> None:
    found = certificate(tmp_path, slow=(2, 1))
    assert [finding.code for finding in found.findings if finding.check == "peers"] == ["BELOW_FLOOR"]
    html = render(found)
    order = ['class="badge bad">FAIL', "GPU 2 -&gt; GPU 1 · BELOW_FLOOR", "What to do", "Every check on every GPU"]
    order += ["Not verified", "Every measurement", "exit status 2"]
    places = [html.index(words) for words in order]
    assert places == sorted(places)


def test_rows_alike_are_one_line_and_the_odd_one_stands_beside(tmp_path: Path) -> None:
    html = render(certificate(tmp_path, slow=(2, 1)))
    peers = html[html.index("peers/unidirectional</th>") :]
    assert "11 alike" in peers[:400]
    assert "GPU 2 -&gt; GPU 1" in peers


def test_every_gpu_has_a_cell_for_every_check(tmp_path: Path) -> None:
    html = render(certificate(tmp_path, "quick"))
    titles = ("State of the GPUs", "GEMM", "Memory bandwidth", "Host-device copies", "NCCL collectives")
    for title in titles:
        for gpu in range(4):
            assert f"<title>{title}, GPU {gpu}: " in html


def test_page_of_one_gpu_has_no_pairs(tmp_path: Path) -> None:
    html = render(certificate(tmp_path, "quick", gpus=1))
    assert "Peer copies, unidirectional" not in html
    assert "one GPU has no peer" in html


def test_saved_certificate_is_read_back_whole(tmp_path: Path) -> None:
    found = certificate(tmp_path, "quick", slow=(0,))
    save_document(tmp_path / "certificate.json", found)
    assert read_certificate(tmp_path / "certificate.json") == found
    again = msgspec.json.decode((tmp_path / "certificate.json").read_bytes(), type=Certificate)
    assert again.exit_code == 2


def test_console_ends_in_the_verdict(tmp_path: Path) -> None:
    found = certificate(tmp_path, "quick", slow=(0,))
    console = Console(file=io.StringIO(), width=200)
    print_blocks([check_line(report) for report in found.checks], console)
    print_page(certificate_page(found, tmp_path), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().strip().splitlines()
    assert lines[0].startswith("PASS")
    assert lines[1].startswith("FAIL")
    assert "least: GPU 0 gemm/bf16/8192x8192x8192 1 TFLOP/s" in lines[1]
    assert "What to do: check its clocks" in console.file.getvalue()
    assert lines[-1].startswith("FAIL quick, 4 GPUs")
