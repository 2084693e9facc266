"""A certificate for a server of a test."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certified(tmp_path: Path, host: str = "DNS:unix") -> tuple[Path, Path]:
    """The files of a key, and of a certificate for a host, as openssl writes it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=unix"]
    subprocess.run(
        [*make, "-addext", f"subjectAltName={host}", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return key, certificate
