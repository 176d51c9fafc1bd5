"""`sglang serve MODEL [flags]`: one worker."""

from __future__ import annotations

from sglang.srt.server_args import from_cli


def main(argv: list[str], prog: str = "sglang serve") -> int:
    """Serve until a signal. Raises ConfigError for wrong flags or checkpoint."""
    args = from_cli(argv, prog)
    # Imported after the flags were checked: a typing mistake is answered at once.
    from sglang.srt.entrypoints.http_server import run_server

    return run_server(args)
