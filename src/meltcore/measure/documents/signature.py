"""Hashes the evidence of a certificate, signs a certificate with an SSH key, and verifies both."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.process import CompletedRun, ProcessError, run
from meltcore.measure.documents.node import CERTIFICATE_FILE, CERTIFICATE_PAGE, Certificate
from meltcore.measure.documents.verdicts import CheckVerdict

# NVIDIA's NVCRE advises a burn-in every three to four weeks.
MAX_AGE_DAYS = 28
SIGNATURE_SUFFIX = ".sig"
_NAMESPACE = "meltcore-certificate"  # a signature for another purpose does not verify
_LIMIT_S = 30.0

Verification = tuple[CheckVerdict, str]  # a verdict with its sentence


def hash_evidence(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a run folder by its relative path, without certificate and page."""
    own = {CERTIFICATE_FILE, CERTIFICATE_PAGE, CERTIFICATE_FILE + SIGNATURE_SUFFIX}
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {name: _sha256(path) for path in paths if (name := path.relative_to(folder).as_posix()) not in own}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_key(key: str) -> None:
    """Raise ConfigError if `sign` could not work with this key, before hours of measuring."""
    if shutil.which("ssh-keygen") is None:
        raise ConfigError("--sign needs ssh-keygen, which is not installed (package openssh-client)")
    if not os.access(key, os.R_OK):
        raise ConfigError(f"--sign: cannot read the key {key}; make one with `ssh-keygen -t ed25519 -f {key}`")
    with tempfile.TemporaryDirectory(prefix="meltcore-sign-") as folder:
        probe = Path(folder) / "probe"
        probe.write_text("probe")
        completed = _ssh_keygen("sign", "-f", key, str(probe))
    if completed.returncode != 0:
        raise ConfigError(f"--sign: {key} signs nothing: {_message(completed)}")


def sign(path: Path, key: str) -> Path:
    """Sign a file with an SSH key, and return the path of the signature beside it.

    A private key has no passphrase, or is in the agent, and `key` is its public half. Raises ConfigError if signing
    fails.
    """
    signature = path.with_name(path.name + SIGNATURE_SUFFIX)
    signature.unlink(missing_ok=True)
    completed = _ssh_keygen("sign", "-f", key, str(path))
    if completed.returncode != 0 or not signature.exists():
        raise ConfigError(f"{path} is written, and signing it with {key} failed: {_message(completed)}")
    return signature


def verify(path: Path, certificate: Certificate, now: datetime, signers: str | None = None) -> list[Verification]:
    """Return what is found about the verdict, age, evidence and signature of a certificate in a file.

    `signers` is a file of allowed signers (ssh-keygen(1)). Without it the signature's key is named and not judged.
    """
    own: Verification = (certificate.verdict, f"is the verdict of the certificate, of {certificate.started!r}")
    age = _verify_age(certificate.started, now)
    return [own, age, *_verify_evidence(path.parent, certificate.evidence), _verify_signature(path, signers)]


def _verify_age(started: str, now: datetime) -> Verification:
    try:
        age_days = (now - datetime.fromisoformat(started)).total_seconds() / 86_400
    except (ValueError, TypeError):  # no time, or one without a zone
        return "FAIL", f"started is {started!r}, which is no time of ISO 8601 with a zone"
    if age_days < 0:
        return "FAIL", f"started {-age_days:.1f} days from now: this clock or the certificate's is wrong"
    advice = f": certify again, as is advised every {MAX_AGE_DAYS} days" if age_days > MAX_AGE_DAYS else ""
    return "WARN" if advice else "PASS", f"{age_days:.1f} days old{advice}"


def _verify_evidence(folder: Path, evidence: Mapping[str, str]) -> Sequence[Verification]:
    if not evidence:
        return [("UNKNOWN", "the certificate lists no evidence: it is of an older version, or none was written")]
    problems: list[Verification] = []
    for name, digest in evidence.items():
        path = folder / name
        try:
            if not path.resolve().is_relative_to(folder.resolve()):
                problems.append(("FAIL", f"evidence {name!r} is not in the folder of the certificate"))
            elif not path.is_file():
                problems.append(("FAIL", f"evidence {name!r} is missing"))
            elif _sha256(path) != digest:
                problems.append(("FAIL", f"evidence {name!r} was changed: its SHA-256 is not the certificate's"))
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, links in a circle, no rights
            problems.append(("FAIL", f"evidence {name[:80]!r} cannot be read: {type(error).__name__}"))
    more = [name for name in hash_evidence(folder) if name not in evidence]
    if more:
        problems.append(("WARN", f"{len(more)} files are not of the certificate, the first is {more[0]!r}"))
    return problems or [("PASS", f"{len(evidence)} files of evidence have the SHA-256 of the certificate")]


def _verify_signature(path: Path, signers: str | None) -> Verification:
    signature = path.with_name(path.name + SIGNATURE_SUFFIX)
    if not signature.exists():
        if signers is not None:
            return "FAIL", "the certificate is not signed"
        return "RECORDED", "the certificate is not signed: a program that can write it can change it and its hashes"
    content = path.read_bytes()
    if signers is None:
        completed = _ssh_keygen("check-novalidate", "-s", str(signature), stdin=content)
        if completed.returncode != 0:
            return "FAIL", f"the signature does not fit the certificate: {_message(completed)}"
        return "PASS", f"{_message(completed)}; compare its fingerprint, or give --signers"
    found = _ssh_keygen("find-principals", "-s", str(signature), "-f", signers)
    principal = found.stdout.decode(errors="replace").strip().partition("\n")[0]
    if found.returncode != 0 or not principal:
        return "FAIL", f"the key of the signature is not in {signers}"
    completed = _ssh_keygen("verify", "-f", signers, "-I", principal, "-s", str(signature), stdin=content)
    if completed.returncode != 0:
        return "FAIL", f"the signature of {principal} does not fit the certificate: {_message(completed)}"
    return "PASS", f"signed by {principal}, who is in {signers}"


def _ssh_keygen(operation: str, *arguments: str, stdin: bytes = b"") -> CompletedRun:
    command = ["ssh-keygen", "-Y", operation, "-n", _NAMESPACE, *arguments]
    if operation == "find-principals":  # it takes no namespace
        command[3:5] = []
    try:
        return run(command, limit_s=_LIMIT_S, stdin=stdin)
    except ProcessError as error:
        raise ConfigError(f"signatures need ssh-keygen (package openssh-client): {error}") from error


def _message(completed: CompletedRun) -> str:
    text = (completed.stdout + completed.stderr).decode(errors="replace").strip()
    return " ".join(text.splitlines()) or "no message"
