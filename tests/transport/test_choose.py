"""Which backends join two processes."""

import os

import pytest

from core.errors import ConfigError
from core.messages import DataEndpoint, HostFacts
from transport.choose import choose
from transport.host import host_facts

HERE = HostFacts("boot-a", 1000, 1)
SAME = HostFacts("boot-a", 1000, 2)
OTHER_USER = HostFacts("boot-a", 0, 2)
OTHER_HOST = HostFacts("boot-b", 1000, 2)
UNKNOWN = HostFacts("", 1000, 2)
SHM, TCP = DataEndpoint("shm", "@x"), DataEndpoint("tcp", "127.0.0.1:1")
BOTH = (SHM, TCP)


@pytest.mark.parametrize(
    ("theirs", "endpoints", "preference", "expected"),
    [
        pytest.param(SAME, BOTH, "auto", ("shm", "tcp"), id="same-host"),
        pytest.param(SAME, BOTH[::-1], "auto", ("shm", "tcp"), id="order-of-endpoints"),
        pytest.param(OTHER_HOST, BOTH, "auto", ("tcp",), id="other-host"),
        pytest.param(OTHER_USER, BOTH, "auto", ("tcp",), id="other-user"),
        pytest.param(UNKNOWN, BOTH, "auto", ("tcp",), id="unknown-host"),
        pytest.param(SAME, (TCP,), "auto", ("tcp",), id="peer-without-shm"),
        pytest.param(SAME, (SHM,), "auto", ("shm",), id="peer-without-tcp"),
        pytest.param(SAME, BOTH, "shm", ("shm",), id="forced-shm"),
        pytest.param(SAME, BOTH, "tcp", ("tcp",), id="forced-tcp"),
        pytest.param(OTHER_HOST, BOTH, "tcp", ("tcp",), id="forced-tcp-far"),
    ],
)
def test_backends_come_best_first(theirs, endpoints, preference, expected) -> None:
    assert choose(HERE, theirs, endpoints, preference) == expected


@pytest.mark.parametrize(
    ("theirs", "endpoints", "preference", "why"),
    [
        pytest.param(OTHER_HOST, BOTH, "shm", "not the same host", id="shm-far"),
        pytest.param(OTHER_USER, BOTH, "shm", "not the same user", id="shm-other-user"),
        pytest.param(UNKNOWN, BOTH, "shm", "not the same host", id="shm-unknown"),
        pytest.param(SAME, (TCP,), "shm", "does not listen on shm", id="shm-not-offered"),
        pytest.param(SAME, (SHM,), "tcp", "does not listen on tcp", id="tcp-not-offered"),
        pytest.param(OTHER_HOST, (SHM,), "auto", "does not listen on tcp", id="nothing"),
        pytest.param(SAME, (), "auto", "does not listen on shm", id="no-endpoints"),
        pytest.param(SAME, BOTH, "nixl", "no such backend", id="unknown-backend"),
    ],
)
def test_what_cannot_work_is_an_error_that_says_why(theirs, endpoints, preference, why) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        choose(HERE, theirs, endpoints, preference)
    assert caught.value.field == "transport.mover"


def test_two_unknown_hosts_are_not_the_same_host() -> None:
    assert choose(UNKNOWN, UNKNOWN, BOTH, "auto") == ("tcp",)


def test_the_facts_of_this_host_are_those_of_this_process() -> None:
    facts = host_facts()
    assert (facts.uid, facts.pid) == (os.getuid(), os.getpid())
    assert facts.boot_id == host_facts().boot_id
    assert len(facts.boot_id) == 36
