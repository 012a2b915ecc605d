"""Generates `worker_pb2.py` and its type stub from `worker.proto`; both are committed.

    python -m transport.proto.generate            write them
    python -m transport.proto.generate --check    exit 1 when the committed ones differ

Offline and deterministic: the compiler comes with grpcio-tools, the stub with mypy-protobuf.
"""

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("transport/proto")
PROTO = FOLDER / "worker.proto"
DEADLINE_S = 60.0
OUTPUTS = (FOLDER / "worker_pb2.py", FOLDER / "worker_pb2.pyi")


def generate(into: Path) -> None:
    """Write OUTPUTS below `into`.  Raises SystemExit when the compiler refuses the proto.

    The proto is named from the root of the repository, so the generated module imports, and
    registers itself, as `transport.proto.worker_pb2`.
    """
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy"
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc"),
        f"--proto_path={ROOT}",
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--python_out={into}",
        f"--mypy_out=quiet:{into}",
        str(ROOT / PROTO),
    ]
    status = subprocess.run(command, timeout=DEADLINE_S, check=False).returncode
    if status != 0:
        raise SystemExit(f"protoc refused {PROTO} (status {status}); see its messages above")


def stale() -> list[Path]:
    """The committed files that differ from what `worker.proto` says."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return [
            path
            for path in OUTPUTS
            if not (ROOT / path).exists()
            or (ROOT / path).read_bytes() != (Path(folder) / path).read_bytes()
        ]


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: python -m transport.proto.generate [--check]", file=sys.stderr)
        return 2
    if not arguments:
        generate(ROOT)
        return 0
    differ = stale()
    for path in differ:
        print(f"{path} is not what {PROTO} generates; run make proto", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
