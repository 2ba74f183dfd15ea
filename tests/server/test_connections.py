"""How many connections there may be, and which are closed when there are too many."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from server.connections import Connections, accepted_at_once, within_handles
from server.settings import Settings


@dataclass(eq=False)
class Client:
    """A connection of an address."""

    address: str
    idle: bool = True
    closed: bool = False

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("abc", ""),
        ("aaab", "0"),
        ("abcd", "0"),
        ("abbb", "1"),
        ("Aaab", "1"),
        ("AAAb", "3"),
        ("abbcb", "12"),
    ],
)
def test_an_idle_one_of_who_has_most_goes(addresses: str, expected: str) -> None:
    """By hand, three at once; capitals have a request under way. Of equal addresses the older."""
    connections = Connections(3)
    clients = [Client(name.lower(), idle=name.islower()) for name in addresses]
    for client in clients:
        connections.opened(client)
        assert len(connections) <= 3
    assert "".join(str(i) for i, client in enumerate(clients) if client.closed) == expected
    for client in [*clients, *clients]:
        connections.closed(client)
    assert len(connections) == 0


@pytest.mark.parametrize(
    ("handles", "connections", "bodies", "by_address"),
    [(65_536, 8192, 4096, 1024), (4096, 3072, 1536, 768), (1024, 768, 384, 192), (64, 16, 8, 4)],
)
def test_limits_keep_within_the_file_handles(
    handles: int, connections: int, bodies: int, by_address: int
) -> None:
    """By hand: a quarter of the handles is not for clients; half bodies take at most half of the
    rest, one address a quarter."""
    settings = within_handles(Settings(), handles)
    assert settings.max_connections == connections
    assert (settings.max_bodies, settings.max_bodies_by_address) == (bodies, by_address)
    at_once = accepted_at_once(connections, handles)
    assert at_once == 2048 or 8 <= at_once <= (handles - connections) // 4
