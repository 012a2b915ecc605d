"""What is refused before any process starts."""

import socket
from contextlib import closing

import pytest

from cluster import launcher
from core.errors import ConfigError


def listening() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.listen()
    return server


def test_a_taken_port_is_refused_and_named():
    with closing(listening()) as server, pytest.raises(ConfigError) as caught:
        launcher.check_address(*server.getsockname())

    assert caught.value.field == "http.port"
    assert "--port" in caught.value.message


def test_a_port_just_given_back_is_free():
    with closing(listening()) as server:
        address = server.getsockname()
        with closing(socket.create_connection(address)) as client:
            server.accept()[0].close()  # leaves TIME_WAIT on the server's port
            client.recv(1)

    launcher.check_address(*address)


def test_a_host_that_is_no_address_is_refused():
    with pytest.raises(ConfigError) as caught:
        launcher.check_address("no such host", 8000)

    assert caught.value.field == "http.host"
    assert "no such host" in caught.value.message
