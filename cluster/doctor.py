"""`trireme doctor`: does the running cluster really do what it claims?

Sends prompts through the path that users take and through a plain loop in this process, and
says where the tokens differ, what moved, whether the prefix cache hit as it must, and everything
that did not go the normal way.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster import probe, statefile
from cluster.commands import NOTHING_RUNS, nothing
from cluster.equality import TIE, TIE_BFLOAT16, Verdict, compare
from core.errors import Unavailable

OUTPUT = 8
COLUMNS = ("prompt", "tokens", "equal", "excused", "moved", "over", "cached: cold", "warm", "path")


@dataclass(frozen=True, slots=True)
class Served:
    """One answer of the cluster, with its trace."""

    token_ids: tuple[int, ...]
    trace: Mapping[str, Any]


@dataclass(slots=True)
class Findings:
    """problems make the exit status 1; remarks do not."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Patient:
    """The running cluster over its public HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status: Mapping[str, Any] = probe.get_json(f"{url}/status")
        self.settings: Mapping[str, Any] = self.status["settings"]

    @property
    def lossy(self) -> list[str]:
        """The workers whose answers are not quite the model's, and why."""
        workers = self.status["workers"]
        return [f"{w['worker_id']} is lossy: {w['lossy']}" for w in workers if w["lossy"]]

    def complete(self, prompt: Sequence[int], count: int, salt: str) -> Served:
        """Greedy, end-of-sequence ignored.  Raises Unavailable."""
        body = {
            "model": self.status["model"],
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_trace": True,
            "cache_salt": salt,
        }
        choice = probe.post_json(f"{self.url}/v1/completions", body)["choices"][0]
        return Served(tuple(choice["token_ids"]), choice["trireme"])


def run(folder: Path, name: str, url: str, console: Console) -> int:
    """0: all well.  1: something is wrong.  3: nothing runs.  Raises Unavailable."""
    running = statefile.find(folder, name)
    if not url and running is None:
        console.print(nothing(folder, name))
        return NOTHING_RUNS
    console.print("asking the cluster and a plain loop the same things; about half a minute")
    patient = Patient(url or (running.url if running else ""))
    findings = Findings()
    for worker in patient.lossy:
        findings.remarks.append(f"{worker}; its answers may differ from the plain loop's")
    _check_ready(patient, findings)
    _check_tokens(patient, findings, console)
    _check_degradations(Patient(patient.url).status, findings)
    for remark in findings.remarks:
        console.print(f"note: {remark}", markup=False, soft_wrap=True)
    for problem in findings.problems:
        console.print(f"PROBLEM: {problem}", markup=False, style="bold red", soft_wrap=True)
    console.print("all well" if not findings.problems else "not well")
    return 1 if findings.problems else 0


def prompts(
    block_size: int, vocab_size: int, longest: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and ids: every length where an off-by-one would show."""
    for label, length in (
        ("one token", 1),
        ("block - 1", block_size - 1),
        ("one block", block_size),
        ("block + 1", block_size + 1),
        ("3 blocks", 3 * block_size),
        ("10 blocks + 5", 10 * block_size + 5),
        ("30 blocks", 30 * block_size),
    ):
        if 0 < length <= longest - OUTPUT:
            yield label, tuple((7919 * (i + length) + 13) % vocab_size for i in range(length))


def _check_ready(patient: Patient, findings: Findings) -> None:
    try:
        probe.get_json(f"{patient.url}/readyz")
    except Unavailable as e:
        findings.problems.append(f"not ready: {e.message}")


def _check_tokens(patient: Patient, findings: Findings, console: Console) -> None:
    """The same prompts cold and warm, beside the plain loop."""
    from cluster.reference import Reference

    model, kv = patient.settings["model"], patient.settings["kv"]
    with console.status("loading the reference model"):
        reference = Reference(model["ref"], model["dtype"], model["device"])
    tie = TIE if reference.dtype == "float32" else TIE_BFLOAT16
    salt = f"doctor-{secrets.token_hex(8)}"
    table = Table(*COLUMNS)
    for label, prompt in prompts(
        kv["block_size"], reference.vocab_size, patient.status["max_model_len"]
    ):
        with console.status(f"checking: {label}"):
            expected = reference.greedy(prompt, OUTPUT)
            cold = patient.complete(prompt, OUTPUT, salt)
            warm = patient.complete(prompt, OUTPUT, salt)

        def ask(more: tuple[int, ...], count: int) -> tuple[int, ...]:
            return patient.complete(more, count, salt).token_ids

        verdicts = [compare(prompt, expected, s.token_ids, ask, tie) for s in (cold, warm)]
        table.add_row(label, *_row(len(prompt), verdicts, cold, warm))
        _judge_tokens(label, verdicts, findings, bool(patient.lossy))
        _judge_path(
            label, (len(prompt) - 1) // kv["block_size"] * kv["block_size"], cold, warm, findings
        )
    console.print(table)


def _row(length: int, verdicts: Sequence[Verdict], cold: Served, warm: Served) -> tuple[str, ...]:
    equal = all(v.mismatch is None for v in verdicts)
    path = f"{cold.trace['prefill_worker']} → {cold.trace['decode_worker']}"
    return (
        str(length),
        "yes" if equal else "NO",
        str(sum(v.excused for v in verdicts)),
        f"{cold.trace['moved_bytes'] / 1e6:.1f} MB",
        cold.trace["mover"] or "-",
        str(cold.trace["cached_tokens"]),
        str(warm.trace["cached_tokens"]),
        path,
    )


def _judge_tokens(label: str, verdicts: Sequence[Verdict], findings: Findings, lossy: bool) -> None:
    """Lossy workers may differ; others must not."""
    for when, verdict in zip(("cold", "warm"), verdicts, strict=True):
        if (wrong := verdict.mismatch) is None:
            continue
        differs = (
            f"{label}, {when}: output token {wrong.position} is {wrong.got}, the plain loop "
            f"has {wrong.expected} (ahead by {wrong.gap:.4f})"
        )
        if lossy:
            findings.remarks.append(f"{differs}; lossy workers may")
        else:
            findings.problems.append(f"{differs}; do not trust this cluster")


def _judge_path(
    label: str, warm_tokens: int, cold: Served, warm: Served, findings: Findings
) -> None:
    """warm_tokens: what a repeat must find in the prefix cache."""
    if cold.trace["cached_tokens"]:
        findings.problems.append(
            f"{label}: {cold.trace['cached_tokens']} cached tokens for a prompt never seen before"
        )
    same = cold.trace["prefill_worker"] == warm.trace["prefill_worker"]
    if same and warm.trace["cached_tokens"] != warm_tokens:
        findings.problems.append(
            f"{label}: a repeat has {warm.trace['cached_tokens']} cached tokens, "
            f"{warm_tokens} were expected"
        )
    if not same:
        findings.remarks.append(
            f"{label}: the repeat went to another prefill worker, so no hit was expected"
        )
    for served in (cold, warm):
        for kind in served.trace["degraded"]:
            findings.problems.append(f"{label}: degraded: {kind}")


def _check_degradations(status: Mapping[str, Any], findings: Findings) -> None:
    for worker in status["workers"]:
        if not worker["connected"]:
            findings.problems.append(f"{worker['worker_id']}: the router has no session with it")
        for counter in (worker["report"] or {}).get("counters", ()):
            if counter["name"] in _LOUD and counter["value"]:
                findings.remarks.append(
                    f"{worker['worker_id']}: {counter['name']} {counter['value']} since its start"
                )
    for name in ("retries", "degraded"):
        for kind, count in status["router"]["counters"][name].items():
            findings.remarks.append(f"router: {name} {kind} {count} since its start")
    listed = sum(p["replicas"] for p in status["settings"]["pools"])
    if len(status["workers"]) < listed:
        findings.problems.append(f"{len(status['workers'])} of {listed} workers are there")


_LOUD = (
    "mover_fallbacks",
    "handoffs_failed",
    "expired",
    "leases_expired",
    "failed",
    "data_frames_failed",
)
