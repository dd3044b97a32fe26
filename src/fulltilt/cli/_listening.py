"""Define where a server listens and what protects it there, for the commands that serve."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.errors import UsageError

if TYPE_CHECKING:
    from fulltilt.web.listening import Tls


def add_listening_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default 8000)")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="another name it is reached by"
    )
    parser.add_argument("--tls-certificate", metavar="FILE", help="PEM file; with --tls-key the server speaks HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file of the certificate's key")
    parser.add_argument("--insecure-lan", action="store_true", help="tokens may cross a trusted network unencrypted")


def read_tls(args: argparse.Namespace) -> Tls | None:
    """Return certificate and key. Off loopback there must be one, or the word that the network is trusted."""
    from fulltilt.web.listening import LOOPBACK, Tls

    if bool(args.tls_certificate) != bool(args.tls_key):
        raise UsageError("--tls-certificate and --tls-key belong together; give both")
    if args.tls_certificate:
        for path in (args.tls_certificate, args.tls_key):
            if not Path(path).is_file():
                raise UsageError(f"{path} is no file; name the PEM files of a certificate and its key")
        return Tls(certificate=Path(args.tls_certificate), key=Path(args.tls_key))
    if args.host not in LOOPBACK and not args.insecure_lan:
        raise UsageError(
            f"at {args.host} tokens would cross the network unencrypted; give --tls-certificate and --tls-key, or "
            "--insecure-lan where everybody on it is trusted"
        )
    return None
