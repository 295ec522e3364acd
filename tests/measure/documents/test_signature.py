"""A certificate's age, evidence and signature: whatever was changed is found."""

import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from sample_certificates import certificate

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.files import write_document
from meltcore.measure.documents.node import CERTIFICATE_FILE, Certificate
from meltcore.measure.documents.signature import check_key, hash_evidence, sign, verify


class Signed(NamedTuple):
    folder: Path
    certificate: Certificate
    key: Path

    @property
    def path(self) -> Path:
        return self.folder / CERTIFICATE_FILE

    def verdicts(self, age_days: float = 1.0, signers: Path | None = None) -> dict[str, str]:
        now = datetime.fromisoformat(self.certificate.started) + timedelta(days=age_days)
        found = verify(self.path, self.certificate, now, None if signers is None else str(signers))
        return {text: verdict for verdict, text in found}


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    folder, key = tmp_path / "run", tmp_path / "key"
    (folder / "inference-0").mkdir(parents=True)
    (folder / "telemetry.jsonl").write_text("samples\n")
    (folder / "inference-0" / "server.log").write_text("log\n")
    found = certificate(folder, "quick", gpus=1)
    write_document(folder / CERTIFICATE_FILE, found)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "x", "-f", str(key)], check=True, timeout=60)
    sign(folder / CERTIFICATE_FILE, str(key))
    return Signed(folder, found, key)


def change(folder: Path) -> None:
    (folder / "telemetry.jsonl").write_text("other\n")


def remove(folder: Path) -> None:
    (folder / "inference-0" / "server.log").unlink()


def edit_certificate(folder: Path) -> None:
    text = (folder / CERTIFICATE_FILE).read_text()
    assert '"quick"' in text
    (folder / CERTIFICATE_FILE).write_text(text.replace('"quick"', '"full"'))


@pytest.mark.parametrize(
    ("tamper", "fault"),
    [
        (change, "evidence 'telemetry.jsonl' was changed: its SHA-256 is not the certificate's"),
        (remove, "evidence 'inference-0/server.log' is missing"),
        (edit_certificate, "the signature does not fit the certificate: "),
    ],
)
def test_tampering_is_found(signed: Signed, tamper: Callable[[Path], None], fault: str) -> None:
    assert set(signed.certificate.evidence) == {"telemetry.jsonl", "inference-0/server.log"}
    assert set(signed.verdicts().values()) == {"PASS"}
    tamper(signed.folder)
    assert [text.startswith(fault) for text, verdict in signed.verdicts().items() if verdict == "FAIL"] == [True]


def test_only_an_allowed_signer_is_believed(signed: Signed, tmp_path: Path) -> None:
    allowed, others = tmp_path / "allowed", tmp_path / "others"
    allowed.write_text(f"ops@example.org {signed.key.with_suffix('.pub').read_text()}")
    others.write_text("")
    assert signed.verdicts(signers=allowed)[f"signed by ops@example.org, who is in {allowed}"] == "PASS"
    assert signed.verdicts(signers=others)[f"the key of the signature is not in {others}"] == "FAIL"
    edit_certificate(signed.folder)
    assert "FAIL" in signed.verdicts(signers=allowed).values()
    signed.path.with_name("certificate.json.sig").unlink()
    assert signed.verdicts(signers=allowed)["the certificate is not signed"] == "FAIL"
    assert "RECORDED" in signed.verdicts().values()


def test_old_certificate_and_one_without_evidence_do_not_pass(signed: Signed) -> None:
    assert signed.verdicts(29)["29.0 days old: certify again, as is advised every 28 days"] == "WARN"
    signed.certificate.evidence = {"../key": "0"}
    assert signed.verdicts()["evidence '../key' is not in the folder of the certificate"] == "FAIL"
    signed.certificate.evidence = {}
    assert "UNKNOWN" in signed.verdicts().values()


def test_verdict_of_the_certificate_and_files_that_it_does_not_list_count(signed: Signed) -> None:
    (signed.folder / "added.log").write_text("added\n")
    assert signed.verdicts()["1 files are not of the certificate, the first is 'added.log'"] == "WARN"
    signed.certificate.verdict = "FAIL"
    assert signed.verdicts()[f"is the verdict of the certificate, of {signed.certificate.started!r}"] == "FAIL"


@pytest.mark.parametrize("started", ["yesterday", "2026-11-01T10:00:00", "2126-11-01T10:00:00+00:00", ""])
def test_time_that_is_none_or_to_come_fails(signed: Signed, started: str) -> None:
    signed.certificate.started = started
    found = verify(signed.path, signed.certificate, datetime(2026, 12, 1, tzinfo=UTC))
    assert [verdict for verdict, text in found if text.startswith("started ")] == ["FAIL"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "circle", "a\nPASS      all"])
def test_names_of_evidence_that_cannot_be_read_fail_on_one_line(signed: Signed, name: str) -> None:
    (signed.folder / "circle").symlink_to("circle")
    signed.certificate.evidence[name] = "0"
    failed = [text for text, verdict in signed.verdicts().items() if verdict == "FAIL"]
    assert len(failed) == 1
    assert "\n" not in failed[0]


def test_report_verifies_and_has_an_exit_status(
    signed: Signed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed.certificate.started = datetime.now(UTC).isoformat()
    write_document(signed.path, signed.certificate)
    sign(signed.path, str(signed.key))
    assert main(["report", "--verify", str(signed.folder)]) == 0
    assert 'Good "meltcore-certificate" signature with ED25519 key SHA256:' in capsys.readouterr().out
    change(signed.folder)
    assert main(["report", "--verify", str(signed.folder)]) == 2
    assert "FAIL      evidence 'telemetry.jsonl' was changed" in capsys.readouterr().out
    assert main(["report", "--signers", "x", str(signed.folder)]) == 2
    assert "--signers is of --verify" in capsys.readouterr().err


def test_key_that_cannot_sign_is_refused(signed: Signed, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the key"):
        check_key(str(tmp_path / "none"))
    (tmp_path / "bad").write_text("no key")
    with pytest.raises(ConfigError, match="signs nothing: "):
        check_key(str(tmp_path / "bad"))
    check_key(str(signed.key))
    with pytest.raises(ConfigError, match=r"is written, and signing it with .* failed"):
        sign(signed.path, str(tmp_path / "bad"))
    assert "certificate.json" not in hash_evidence(signed.folder)
