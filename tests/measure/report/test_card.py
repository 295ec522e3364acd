"""The report card: one verdict, nothing that is missing passes, and stories come with their evidence."""

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from sample_documents import (
    FASTER,
    SHIPPED,
    benchmark,
    comparison,
    document,
    evaluation,
    precisions,
    profile,
    scripted_certificate,
    tuning,
    whole_node,
)
from sample_results import sample_level
from sample_scores import sample_health

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.card import REQUIRED, Card
from meltcore.measure.documents.schema import CheckResult, EvalScore, Gpu
from meltcore.measure.documents.score import Spread
from meltcore.measure.documents.served_model import command_model
from meltcore.measure.documents.values.documents import Content, DocumentFile
from meltcore.measure.report.comparisons.comparison import changed_arguments, side_names
from meltcore.measure.report.comparisons.tuning import points_table
from meltcore.measure.report.nodes.card import build_card, card_page, conflicting_snapshots, newest_documents
from meltcore.measure.report.nodes.evidence import build_stories
from meltcore.measure.report.page.console import print_page
from meltcore.measure.report.render import render, save_document


def card_of(*contents: Content, **options: Any) -> Card:
    return build_card([document(each, f"run-{place}") for place, each in enumerate(contents)], **options)


def test_node_with_everything_good_passes_and_has_its_story(tmp_path: Path) -> None:
    card = build_card(whole_node(tmp_path))
    assert (card.verdict, card.exit_code, card.missing) == ("PASS", 0, [])
    assert {part.type: part.verdict for part in card.evidence} == {
        **dict.fromkeys(REQUIRED, "PASS"),
        "snapshot": "RECORDED",
    }
    [story] = card.stories
    assert (story.change, story.state) == ("with --max-num-seqs 64", "CONFIRMED")
    assert "+25.0 % over the default settings (1,000)" in story.tuned
    assert "IMPROVEMENT: output tok/s, concurrency 32" in story.compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoilt", "verdict", "reason"),
    [
        (comparison(rate=900.0), "FAIL", "above the least effect"),
        (comparison(rate=900.0, starts=3), "UNKNOWN", "cannot reach p"),
        (evaluation(gates=[CheckResult(name="GSM8K", status="FAIL", detail="80 %")]), "FAIL", "GSM8K: FAIL: 80 %"),
        (evaluation(gates=[CheckResult(name="GSM8K", status="NOT RUN")]), "UNKNOWN", "GSM8K: NOT RUN"),
        (
            evaluation(eval_score=EvalScore(total_tokens_per_s=0, output_tokens_per_s=0, zero_reasons=["wrong"])),
            "FAIL",
            "wrong",
        ),
        (evaluation(status="partial"), "UNKNOWN", "ended early"),
        (evaluation(levels=[sample_level(4, failed=1, failures={"timeout": 1})]), "WARN", "1 x timeout"),
        (benchmark(health=sample_health(verdict="DEGRADED", reasons=["hot"])), "FAIL", "GPU 0: hot"),
        (benchmark(health=sample_health(verdict="UNKNOWN", reasons=["no NVML"])), "UNKNOWN", "no NVML"),
        (benchmark(sustained=None, failure="it died"), "FAIL", "GPU 0: it died"),
        (tuning(knee=None, best=None), "FAIL", "no setting ran"),
        (profile(untrusted=("3 of 9 graph launches have no kernel",)), "UNKNOWN", "3 of 9 graph launches"),
    ],
)
def test_document_that_is_not_a_pass_decides_the_card_and_says_why(
    spoilt: Content, verdict: str, reason: str, tmp_path: Path
) -> None:
    kind = document(spoilt).type
    good = [each for each in whole_node(tmp_path) if each.type != kind]
    card = build_card([*good, document(spoilt, "spoilt")])
    assert card.verdict == verdict
    [part] = [part for part in card.evidence if part.type == kind]
    assert part.verdict == verdict
    assert any(reason in each for each in (part.summary, *part.reasons))
    assert f"{kind} (spoilt)" in card.reason


def test_certificates_findings_are_the_reasons_of_its_part(tmp_path: Path) -> None:
    card = card_of(scripted_certificate(tmp_path, slow=(1,)))
    assert card.verdict == "FAIL"
    assert any(reason.startswith("GPU 1: BELOW_FLOOR") for reason in card.evidence[0].reasons)


def test_card_without_all_required_evidence_is_incomplete() -> None:
    card = card_of(comparison())
    assert (card.verdict, card.exit_code) == ("INCOMPLETE", 4)
    assert card.missing == [kind for kind in REQUIRED if kind != "comparison"]
    assert "1 of 7 required types of evidence" in card.reason
    assert "Missing: snapshot, certificate, benchmark" in card.reason
    html = render(card)
    assert html.count(">MISSING<") == 6
    assert '<p class="badge unsure">INCOMPLETE</p>' in html


def test_required_evidence_is_settable() -> None:
    assert card_of(comparison(), required=["comparison"]).verdict == "PASS"
    card = card_of(comparison(), required=["comparison", "load"])
    assert (card.verdict, card.missing) == ("INCOMPLETE", ["load"])
    assert "meltcore load" in render(card)


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ([comparison(rate=900.0)], "FAIL"),
        ([comparison(rate=900.0, starts=3)], "UNKNOWN"),
        ([evaluation(levels=[sample_level(4, failed=1, failures={"timeout": 1})])], "INCOMPLETE"),
    ],
)
def test_missing_evidence_ranks_between_unknown_and_warn(parts: list[Content], verdict: str) -> None:
    assert card_of(*parts).verdict == verdict


def test_snapshot_alone_is_judged_by_nothing(tmp_path: Path) -> None:
    card = card_of(scripted_certificate(tmp_path).snapshot)
    assert (card.verdict, card.exit_code) == ("UNKNOWN", 3)
    assert "Nothing here is judged" in card.reason


def test_what_drifted_since_the_certificate_is_told_of_the_snapshot(tmp_path: Path) -> None:
    certified = scripted_certificate(tmp_path)
    later = msgspec.structs.replace(certified.snapshot.fingerprint, taken="2026-11-21T15:00:00+00:00")
    now = msgspec.structs.replace(certified.snapshot, driver="590.1", fingerprint=later)
    documents = [document(now), document(certified)]
    assert conflicting_snapshots(documents) == (certified.snapshot, now)
    card = build_card(documents, changed_facts=["driver: 580 -> 590.1"], required=["snapshot", "certificate"])
    assert {part.type: part.verdict for part in card.evidence} == {"snapshot": "WARN", "certificate": "PASS"}
    assert card.verdict == "WARN"


def test_newest_of_each_kind_counts_and_the_others_are_named() -> None:
    failed = evaluation(verdict="FAILED", reasons=["broken"], started="2026-11-20T12:00:00Z")
    other = evaluation(settings={"what": "problems", "model": "other"})
    counted, earlier = newest_documents(
        [document(failed, "old"), document(evaluation(), "new"), document(other, "apart")]
    )
    assert [each.source for each in earlier] == ["old"]
    assert {each.source for each in counted} == {"new", "apart"}
    card = build_card(counted, earlier, required=["evaluation"])
    assert card.verdict == "PASS"
    assert card.superseded == ["evaluation of old"]
    assert "A newer one replaces each of these: evaluation of old." in render(card)


def test_documents_of_several_machines_are_refused_and_forced_never_pass() -> None:
    elsewhere = evaluation()
    elsewhere.fingerprint.gpus = [Gpu(name="NVIDIA H200", uuid="GPU-1", memory_bytes=1)]
    with pytest.raises(ConfigError, match=r"not of one machine: .*GPU-1"):
        card_of(elsewhere, tuning())
    card = card_of(elsewhere, tuning(), force=True)
    assert (card.verdict, len(card.doubts)) == ("UNKNOWN", 2)
    assert "These are not of one machine" in card.reason
    assert card_of(elsewhere, profile()).doubts == [], "a trace does not tell its machine"


def test_failed_expectation_warns_on_the_card_and_the_rate_is_not_called_sustained() -> None:
    run = benchmark(spread=Spread(bucket_s=10.0, rates=[9.0, 8.0], variation=0.098, change=-0.135, drifts=True))
    run.notes = ["Random weights.", "GPU 0: the rate fell by 13.5 %."]
    card = card_of(run, required=["benchmark"])
    [part] = card.evidence
    assert (card.verdict, part.verdict) == ("WARN", "WARN")
    assert "sustained" not in part.summary
    assert "(random weights)" in part.summary
    assert part.reasons == [
        "expectation of throughput failed: expected stable, seen varies by 9.8 %, last third -13.5 %",
        "GPU 0: the rate fell by 13.5 %.",
    ]
    html = render(card)
    assert "output tokens/s, not stable" in html
    assert html.count("expected ") >= 4, "three expectations beside the reason"
    assert "output tok/s sustained" in card_of(benchmark()).evidence[0].summary


def test_second_start_of_the_default_is_no_gain_and_so_is_a_difference_that_two_starts_may_show() -> None:
    repeated = tuning(default_settings={"max_num_seqs": 64})
    assert build_stories([repeated], []) == []
    assert "seqs 64 (the default again)" in str(points_table(repeated).rows)
    assert build_stories([tuning(default_settings={"max_num_seqs": 32})], []) != []
    assert build_stories([tuning(rates=(1000.0, 1038.0))], []) == []


def test_models_and_sides_are_named_where_the_commands_tell_them() -> None:
    command = "python -m meltcore.cli.main serve Qwen/Q --load-format dummy --port {port} --dtype"
    compared = comparison(new_command=f"{command} float16")
    compared.old_command = f"{command} bfloat16"
    assert side_names(compared) == ("A: bfloat16", "B: float16")
    card = card_of(compared, required=["comparison"])
    assert ", Qwen/Q (random weights): " in card.evidence[0].summary
    assert "Comparison: A: bfloat16 against B: float16" in render(card)
    assert command_model("vllm serve /home/me/Qwen3") == "Qwen3"
    assert command_model("python server.py --port {port}") == ""


def test_gain_by_one_start_is_not_confirmed_and_one_that_was_none_is_no_story() -> None:
    [story] = build_stories([tuning()], [])
    assert (story.state, story.comparison) == ("NOT CONFIRMED", None)
    assert "No comparison of fresh starts" in story.compared
    assert build_stories([tuning(rates=(1000.0, 990.0))], []) == []
    assert build_stories([tuning(points=[])], []) == []


def test_comparison_that_found_nothing_or_the_contrary_says_so_in_the_story() -> None:
    [nothing] = build_stories([tuning()], [comparison(rate=1001.0)])
    assert (nothing.state, nothing.tuning, nothing.comparison) == ("NOT CONFIRMED", 0, 0)
    [contrary] = build_stories([tuning()], [comparison(rate=800.0)])
    assert contrary.state == "CONTRADICTED"


def test_evidence_from_another_load_says_so() -> None:
    [story] = build_stories(
        [tuning()], [comparison(load={"workload": "problems:short", "concurrency": [32], "seed": 0})]
    )
    assert "It was tuned on another load: workload random:in=64,out=64, concurrency 32." in story.tuned
    assert story.workload == "workload problems:short, concurrency 32"


def test_comparison_that_changed_more_than_the_tuning_did_is_no_evidence_for_it() -> None:
    told = build_stories([tuning()], [comparison(new_command="serve --port {port} --max-num-seqs 64")])
    assert [(story.tuning, story.comparison, story.state) for story in told] == [
        (None, 0, "CONFIRMED"),
        (0, None, "NOT CONFIRMED"),
    ]
    assert told[0].change == "--max-num-seqs 64 in place of model"


def test_comparison_of_one_command_with_itself_is_no_story() -> None:
    assert build_stories([], [comparison(new_command=SHIPPED)]) == []


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        (SHIPPED, FASTER, ([], ["--max-num-seqs", "64"])),
        ("serve m --tp 1 --port {port}", "serve m --tp 2 --port {port}", (["1"], ["2"])),
        ("serve m --a --port {port}", "serve m --port {port}", (["--a"], [])),
    ],
)
def test_words_that_changed_are_found(old: str, new: str, changed: tuple[list[str], list[str]]) -> None:
    assert changed_arguments(old, new) == changed


def test_page_has_the_verdict_and_every_plot_and_fetches_nothing(tmp_path: Path) -> None:
    card = build_card(whole_node(tmp_path))
    html = render(card)
    assert '<p class="badge good">PASS</p>' in html
    for words in (
        "Every check on every GPU",
        "Time to first token",
        "the ring marks the knee",
        "A dot is one fresh start",
    ):
        assert words in html
    assert html.count("<svg") >= 7
    for forbidden in ("<script", "<link", "<img", "http:", "https:", "<fake>"):
        assert forbidden not in html


def test_precisions_are_drawn_as_bars_with_their_gains_and_what_did_not_run() -> None:
    card = card_of(precisions())
    [story] = card.stories
    assert (story.change, story.state) == ("with --kv-cache-dtype fp8", "NOT CONFIRMED")
    html = render(card)
    assert re.search(r">1,400<tspan[^>]*>\+40\.0 %<", html)
    assert "did not run: fp8<" in html
    assert html.count("<rect") == 2


def test_saved_card_is_read_back_whole_and_drawn_alike(tmp_path: Path) -> None:
    card = build_card(whole_node(tmp_path))
    page = save_document(tmp_path / "card" / "card.json", card)
    again = msgspec.json.decode((tmp_path / "card" / "card.json").read_bytes(), type=Card)
    assert again == card
    assert main(["report", str(tmp_path / "card")]) == 0
    assert page.read_text() == render(card)


def test_console_ends_in_the_verdict(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    print_page(card_page(build_card(whole_node(tmp_path)[:2])), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().strip().splitlines()
    assert any(line.startswith("snapshot     RECORDED") for line in lines)
    assert "benchmark    MISSING   required, and not there: meltcore bench" in [line.strip() for line in lines]
    assert lines[-1].startswith("INCOMPLETE Nothing failed, but only 2 of 7 required types of evidence are there.")


def test_document_tells_its_folder_or_its_own_name() -> None:
    assert document(evaluation(), "20261121T120000Z-eval").source == "20261121T120000Z-eval"
    assert DocumentFile(Path("kept/machine.json"), evaluation()).source == "machine.json"


def test_command_joins_folders_and_exits_as_nagios_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    for name, content in (("eval", evaluation()), ("tune", tuning()), ("compare", comparison(rate=900.0))):
        (runs / name).mkdir(parents=True)
        path = runs / name / document(content).path.name
        path.write_bytes(msgspec.json.encode(content))
    for _ in range(2):  # the second time a card lies among the runs, and is no part of the next
        assert main(["report", str(runs), "--out", str(runs / "card")]) == 2
        assert "Because of comparison (compare); 3 of 7 required types" in " ".join(capsys.readouterr().out.split())
    assert {file.name for file in (runs / "card").iterdir()} == {"card.html", "card.json"}
    assert main(["report", str(runs / "card"), "--card"]) == 2
    assert "nothing here to join" in capsys.readouterr().err
    one = ["report", str(runs / "eval"), "--card", "--json", "--out", str(tmp_path / "one")]
    assert main(one) == 4
    assert json.loads(capsys.readouterr().out)["verdict"] == "INCOMPLETE"
    assert main([*one, "--require", "evaluation"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["evaluation"]
    with pytest.raises(SystemExit, match="2"):
        main([*one, "--require", "evaluation,luck"])
    assert "no type of evidence 'luck'" in capsys.readouterr().err
