"""The `trireme` command.  Light to import: --help must not wait for Ray or torch."""

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import flags
from core.errors import ConfigError, Stage, TriremeError
from core.spec import ClusterSpec

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
MISUSED = 2
INTERRUPTED = 130
PIPE_WIDTH = 120

EXAMPLES = """\
examples:
  trireme serve                              the built-in model, one prefill and one decode worker
  trireme serve --prefill 2 --decode 2       more workers
  trireme serve --hybrid 1 --port 9000       one worker that does both, on another port
  trireme serve --model hf:org/name          a model of the Hugging Face hub
  trireme serve --config cluster.yaml --kv.block_size 32
                                             settings from a file; flags go before it
  trireme serve --dry-run                    what would be started, and nothing more
  trireme status                             workers and load of the running cluster
  trireme down                               stop it
  trireme doctor                             check that it does what it claims
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status.  Every expected error is one line on stderr."""
    try:
        return _run(_parse(sys.argv[1:] if argv is None else argv))
    except TriremeError as error:
        told = error.message if isinstance(error, ConfigError) else str(error)
        print(f"trireme: {told}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from cluster import commands

    # A pipe has no width of its own, and a table cut at 80 columns is of no use.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if args.command == "status":
        return commands.show_status(_state_folder(), args.name, args.json, console)
    if args.command == "down":
        return commands.down(_state_folder(), args.name, console)
    if args.command == "doctor":
        from cluster import doctor

        return doctor.run(_state_folder(), args.name, args.url, console)
    return _serve(args, console)


def _serve(args: argparse.Namespace, console: "Console") -> int:
    spec = flags.to_spec(args)
    if args.dry_run:
        from cluster import commands
        from cluster.machine import usable_cores

        if not spec.model.ref.startswith("hf:"):  # that would download it
            from engine.model import refs

            refs.resolve(spec.model.ref)
        return commands.show_layout(spec, usable_cores(), console)
    from cluster import serve

    return serve.serve(spec, _state_folder(), console)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ConfigError on an unknown flag, with a suggestion."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        known = [f"--{s.path}" for s in flags.settings()] + [f"--{s}" for s in flags.SHORT]
        near = get_close_matches(flag, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see `trireme {args.command} --help`"
        raise ConfigError(
            f"{flag}: unknown argument; {hint}", stage=Stage.START, field=flag.lstrip("-")
        )
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trireme",
        description="Serve a language model with separate prefill and decode workers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = metadata.version("trireme-serve")
    parser.add_argument("--version", action="version", version=f"trireme {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start a cluster here and serve until Ctrl-C",
        description="Start Ray, the workers and the HTTP edge on this machine, in the foreground.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument("--dry-run", action="store_true", help="print the layout and stop")
    flags.add_to(serve)
    status = commands.add_parser("status", help="workers and load of the running cluster")
    status.add_argument("--json", action="store_true", help="as the server sends it")
    down = commands.add_parser("down", help="stop the running cluster and wait for its end")
    doctor = commands.add_parser("doctor", help="check that the cluster does what it claims")
    doctor.add_argument("--url", default="", help="of a cluster that does not run here")
    for command in (status, down, doctor):
        command.add_argument("--name", default=ClusterSpec().name, help="which cluster")
    return parser


def _state_folder() -> Path:
    """Where running clusters of this user leave their files."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "trireme"


if __name__ == "__main__":
    sys.exit(main())
