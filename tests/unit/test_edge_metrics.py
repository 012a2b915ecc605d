"""What /metrics says after requests of known outcome."""

from typing import Any

from core.errors import Unavailable
from core.ids import WorkerId
from router.metrics import EdgeMetrics
from tests.unit.edge_kit import (
    CHAT,
    COMPLETION,
    chat,
    completion,
    get,
    make_edge,
    post,
    run,
    say,
)


def scrape(edge: Any) -> dict[str, float]:
    lines = get(edge, "/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_metrics_count_requests_tokens_and_time_once() -> None:
    edge, _ = make_edge()
    run(post(edge, CHAT, chat()))
    run(post(edge, COMPLETION, completion(["a", "b"], stream=True)))
    run(post(edge, CHAT, b"{"))
    seen = scrape(edge)
    counts = {name: v for name, v in seen.items() if name.startswith("trireme_requests_total")}
    assert counts == {
        f'trireme_requests_total{{outcome="finished",route="{CHAT}",status="200"}}': 1,
        f'trireme_requests_total{{outcome="finished",route="{COMPLETION}",status="200"}}': 1,
        f'trireme_requests_total{{outcome="client_error",route="{CHAT}",status="400"}}': 1,
    }
    assert seen['trireme_tokens_total{kind="completion"}'] == 15
    assert seen['trireme_tokens_total{kind="cached"}'] == 4
    assert seen["trireme_ttft_seconds_count"] == 3
    assert seen["trireme_tpot_seconds_count"] == 3
    assert seen["trireme_e2e_seconds_count"] == 2
    assert seen["trireme_requests_in_flight"] == 0


def test_stage_times_of_a_request_sum_to_its_time_to_first_token() -> None:
    edge, _ = make_edge(lambda request: say("x"))
    run(post(edge, CHAT, chat()))
    seen = scrape(edge)
    parts = sum(v for name, v in seen.items() if name.startswith("trireme_stage_seconds_sum"))
    assert parts == seen["trireme_ttft_seconds_sum"] == 0.75


def test_a_failed_stream_is_counted_as_failed_with_the_status_that_was_sent() -> None:
    edge, _ = make_edge(lambda request: [(104,), Unavailable("all workers are gone")])
    run(post(edge, CHAT, chat(stream=True)))
    name = f'trireme_requests_total{{outcome="failed",route="{CHAT}",status="200"}}'
    assert scrape(edge)[name] == 1


def test_the_hosts_gauges_are_exported_and_vanish_with_it() -> None:
    workers = [WorkerId("d-0"), WorkerId("d-1")]
    metrics = EdgeMetrics(
        lambda: [("trireme_free_blocks", {"worker": w}, float(i)) for i, w in enumerate(workers)]
    )
    edge, _ = make_edge(metrics=metrics)
    assert scrape(edge)['trireme_free_blocks{worker="d-1"}'] == 1
    workers.pop()
    assert 'trireme_free_blocks{worker="d-1"}' not in scrape(edge)
