"""Notes to a server about a search: each hint once, and whatever it has missed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hedgerow_sglang.plugin_protocol import NAME, parse_note
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Replica
from search.engine import Hint


def server(name: str = "s", schedulers: int = 1, plugged: bool = True) -> Replica:
    """A replica that is never contacted."""
    replica = Replica(f"http://{name}", ServerTimes(connect=1, answer=1, probe=1, stall=30))
    replica.plugged, replica.schedulers = plugged, schedulers
    return replica


def note_fields(notes: PluginNotes, to: Replica, node: int = 9) -> dict[str, Any]:
    """The fields of a request's note, without tree, prompt and parent."""
    fields = json.loads(notes.on(to, 3, (node, 0))["custom_params"][NAME])
    return {name: fields[name] for name in fields if name not in ("tree", "prompt", "parent")}


def test_a_round_is_told_once_a_server() -> None:
    """A round's hint goes with the first request to a server; later ones name only their step."""
    notes, policy, reward = PluginNotes("t"), server(), server("r")
    assert note_fields(notes, policy) == {"node": 9}
    notes.take(Hint(values={1: 0.5}, active=(1,)))
    assert note_fields(notes, policy) == {"node": 9, "turn": 1, "values": {"1": 0.5}, "active": [1]}
    assert note_fields(notes, policy, 10) == {"node": 10, "turn": 1}
    assert note_fields(notes, reward) == {"node": 9, "turn": 1, "values": {"1": 0.5}, "active": [1]}
    assert notes.on(server(plugged=False), 3, None) == {}


def test_what_a_server_has_missed_comes_along() -> None:
    """Values and deaths of missed rounds are sent along; a restarted server gets everything."""
    notes, policy = PluginNotes("t"), server()
    notes.take(Hint(values={1: 0.5}, active=(0,)))
    note_fields(notes, policy)
    notes.take(Hint(values={2: 0.25}, active=(1,), dead=(3,)))
    notes.take(Hint(active=(2,), dead=(4,), outlook=(7,)))
    fields = note_fields(notes, policy)
    assert (fields["values"], fields["active"], fields["dead"]) == ({"2": 0.25}, [2], [3, 4])
    assert fields["outlook"] == [7]
    policy.failures += 1
    assert note_fields(notes, policy)["values"] == {"1": 0.5, "2": 0.25}


def test_every_scheduler_of_a_server_hears_it() -> None:
    """With several schedulers every request carries the hint, as any of them may get it."""
    notes, policy = PluginNotes("t"), server(schedulers=2)
    notes.take(Hint(values={1: 0.5}, active=(1,)))
    assert note_fields(notes, policy) == note_fields(notes, policy)


@settings(max_examples=20)
@given(st.integers(1, 1024))
@example(1024)
def test_a_rounds_notes_grow_with_its_width(width: int) -> None:
    """A round's notes grow linearly with its width, by less than 150 bytes a step."""
    notes, policy = PluginNotes("key/0123456789abcdef"), server()
    notes.take(Hint(active=(0,)))
    notes.on(policy, 57, None)
    ids = range(1000, 1000 + width)
    notes.take(Hint(dict.fromkeys(ids, 0.1234), tuple(ids), tuple(ids)))
    params = [notes.on(policy, 57, (2000 + n, 1000 + n))["custom_params"] for n in range(width)]
    assert sum(map(len, map(json.dumps, params))) < 300 + 150 * width
    assert all(parse_note(param[NAME]).node == 2000 + n for n, param in enumerate(params))
