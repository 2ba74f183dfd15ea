"""API keys: who gets in, what each may ask for, and whose searches are whose."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.admission import Admission
from server.api_errors import ApiError
from server.api_keys import ApiKeys
from server.settings import Settings, SettingsError, load_settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import question

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "sprig", "messages": question()}
TWO = {"api_keys": "ann:first, bob:second"}


def bearing(key: str) -> dict[str, str]:
    """Return the header that carries a key."""
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("settings", [TWO], indirect=True)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([(b"authorization", b"Bearer third")], 401),
        ([(b"authorization", b"Bearer ")], 401),
        ([(b"authorization", b"")], 401),
        ([(b"authorization", b"first")], 401),
        ([(b"authorization", b"Basic first")], 401),
        ([(b"authorization", b"Basic: first")], 401),  # as long as "Bearer "
        ([(b"authorization", "Bearer é".encode())], 401),
        ([(b"authorization", b"Bearer \xff\xfe")], 401),
        ([(b"authorization", b"Bearer first"), (b"authorization", b"Bearer first")], 401),
        ([(b"authorization", b"Bearer first")], 200),
        ([(b"authorization", b"bearer  second")], 200),
    ],
)
async def test_only_a_known_key_opens(
    http: httpx2.AsyncClient, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """A missing, wrong, doubled or undecodable key is a 401 in OpenAI's shape, not a 5xx."""
    answer = await http.post(CHAT, json=BODY, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "api key" in answer.json()["error"]["message"]
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("settings", [TWO], indirect=True)
async def test_what_is_open_without_a_key(http: httpx2.AsyncClient) -> None:
    """Health, readiness and metrics are open; models, unknown routes and the admin's are not."""
    statuses = {
        path: (await http.get(path)).status_code
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/nope", "/admin/usage")
    }
    assert statuses == {
        "/health": 200,
        "/ready": 200,
        "/metrics": 200,
        "/v1/models": 401,
        "/nope": 401,
        "/admin/usage": 404,
    }


@pytest.mark.parametrize(
    "settings", [TWO | {"metrics_key": "scrape", "admin_key": "root"}], indirect=True
)
async def test_metrics_and_admin_have_keys_of_their_own(http: httpx2.AsyncClient) -> None:
    """A client's key opens neither, and their keys open nothing else."""
    for path, key in (("/metrics", "scrape"), ("/admin/usage", "root")):
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers=bearing("first"))).status_code == 401
        assert (await http.get(path, headers=bearing(key))).status_code == 200
        assert (await http.get("/v1/models", headers=bearing(key))).status_code == 401


@pytest.mark.parametrize("settings", [TWO], indirect=True)
async def test_a_search_is_its_own_keys_alone(http: httpx2.AsyncClient) -> None:
    """Another key can neither read nor delete it: for that key it does not exist."""
    body = {"question": "?", "search": {"width": 2}}
    response = await http.post("/v1/search", json=body, headers=bearing("first"))
    path = f"/v1/search/{response.json()['id']}"
    assert (await http.get(path, headers=bearing("second"))).status_code == 404
    assert (await http.delete(path, headers=bearing("second"))).status_code == 404
    assert (await http.get(path, headers=bearing("first"))).json() == response.json()


@pytest.mark.parametrize("settings", [TWO | {"admin_key": "root"}], indirect=True)
async def test_each_key_sees_what_it_has_used(http: httpx2.AsyncClient) -> None:
    """The sums are those of the responses' ``usage``; the admin sees all keys."""
    usage = (await http.post(CHAT, json=BODY, headers=bearing("first"))).json()["usage"]
    ann_usage = (await http.get("/v1/usage", headers=bearing("first"))).json()
    assert ann_usage == {
        "key": "ann",
        "requests": 1,
        "searches": 0,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "tokens_today": usage["total_tokens"],
    }
    bob_usage = (await http.get("/v1/usage", headers=bearing("second"))).json()
    assert (bob_usage["key"], bob_usage["requests"]) == ("bob", 0)
    all_usage = (await http.get("/admin/usage", headers=bearing("root"))).json()
    assert all_usage == {"data": [ann_usage, bob_usage]}


@pytest.mark.parametrize(
    ("settings", "spaces"),
    [(TWO, ["ann", "bob"]), (TWO | {"share_cache": True}, ["", ""])],
    indirect=["settings"],
)
async def test_trees_are_named_in_their_keys_cache_namespace(
    http: httpx2.AsyncClient, engine: ScriptedEngine, spaces: list[str]
) -> None:
    """The part of the tree's name before the slash separates the engine's caches."""
    for key in ("first", "second"):
        assert (await http.post(CHAT, json=BODY, headers=bearing(key))).status_code == 200
    assert [tree.rpartition("/")[0] for tree in engine.released] == spaces


def test_a_file_gives_keys_limits_of_their_own(tmp_path: Path) -> None:
    """The file holds digests only; a limit that it does not set is the server's."""
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(f'[ann]\nsha256 = "{digest}"\nwidth = 8\nweight = 2.5\n')
    keys = ApiKeys.load(Settings(api_keys_file=file, max_depth=7))
    ann = keys.find([b"Bearer secret"])
    assert (ann.name, ann.width, ann.weight, ann.depth) == ("ann", 8, 2.5, 7)
    assert "secret" not in repr(vars(keys))


def test_keys_come_from_the_environment_and_from_a_file(tmp_path: Path) -> None:
    """All keys are known, in that order; an empty place between commas is no key, and a secret may
    hold a colon."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[ann]\nsha256 = "{hashlib.sha256(b"a").hexdigest()}"\n')
    keys = ApiKeys.load(Settings(api_keys="bob:b,, cat:c:d,", api_keys_file=file))
    assert keys.names == ["bob", "cat", "ann"]
    names = [keys.find([b"Bearer " + secret]).name for secret in (b"b", b"c:d", b"a")]
    assert names == keys.names


def test_without_keys_none_is_required_and_none_is_known() -> None:
    """No request gets a key's limits by sending some key."""
    keys = ApiKeys.load(Settings())
    assert not keys.required
    assert keys.names == ["anybody"]
    with pytest.raises(ApiError, match="not known"):
        keys.find([b"Bearer a"])


async def test_one_key_cannot_take_the_whole_queue() -> None:
    """By hand: of one place to run and six to wait, Ann gets one and three, then Bob comes in.
    Without keys all callers share all places; a limit that is set holds."""

    def places_by_key(settings: Settings) -> list[int]:
        api_keys = ApiKeys.load(settings)
        admission = Admission(settings.max_running, settings.max_queued, retry_after=1)
        counts = []
        for secret in ([b"Bearer a"], [b"Bearer b"]):
            before = admission.open
            with suppress(ApiError):
                key = api_keys.find(secret) if api_keys.required else api_keys.anybody
                while True:
                    admission.take(key)
            counts.append(admission.open - before)
        return counts

    places: dict[str, Any] = {"max_running": 1, "max_queued": 6}
    keyed = places | {"api_keys": "ann:a,bob:b"}
    assert places_by_key(Settings(**keyed)) == [4, 3]
    assert places_by_key(Settings(**places)) == [7, 0]
    assert places_by_key(Settings(**keyed, key_queued=1)) == [2, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[ann]\n", "[ann]: sha256 must be there"),
        ('[ann]\nsha256 = "12"\n', "64 hexadecimal digits"),
        (f'[ann]\nsha256 = "{"0" * 64}"\nwidht = 3\n', "[ann]: widht = 3"),
        (f'[ann]\nsha256 = "{"0" * 64}"\nrunning = 0\n', "[ann]: running = 0"),
        (f'["a/b"]\nsha256 = "{"0" * 64}"\n', "letters, digits"),
        ("ann = 3\n", "must be a table"),
        ("[", "HEDGEROW_API_KEYS_FILE"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, text: str, words: str) -> None:
    """The server does not start with keys that it understands only in part."""
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        ApiKeys.load(Settings(api_keys_file=file))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HEDGEROW_API_KEYS": "topsecret"}, "name:key"),
        ({"HEDGEROW_API_KEYS": "a:topsecret,a:b"}, "'a' is there twice"),
        ({"HEDGEROW_API_KEYS": "a:topsecret,b:x,c:topsecret"}, "'a' and 'c' have the same secret"),
        (
            {
                "HEDGEROW_API_KEYS": "a:topsecret,"
                f"b:sha256={hashlib.sha256(b'topsecret').hexdigest()}"
            },
            "'a' and 'b' have the same secret",
        ),
        ({"HEDGEROW_API_KEYS": "a:sha256=topsecret"}, "HEDGEROW_API_KEYS, a: sha256 must be 64"),
        ({"HEDGEROW_API_KEYS_FILE": "/nowhere"}, "No such file"),
    ],
)
def test_wrong_keys_in_the_environment_are_not_repeated(
    environ: dict[str, str], words: str
) -> None:
    """The message says what is wrong, without the secret."""
    with pytest.raises(SettingsError) as error:
        ApiKeys.load(load_settings(environ))
    assert words in str(error.value)
    assert "topsecret" not in str(error.value)
    assert "topsecret" not in repr(load_settings(environ))


LIMITED = {
    "max_width": 8,
    "max_depth": 5,
    "max_prompt_tokens": 40,
    "max_tree_tokens": 500,
}


@pytest.mark.parametrize("settings", [LIMITED], indirect=True)
@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"search": {"width": 9}}, "search.width", "at most 8"),
        ({"search": {"max_depth": 6}}, "search.max_depth", "at most 5"),
        ({"search": {"max_tokens": 501}}, "search.max_tokens", "at most 500"),
        ({"messages": question("x" * 60)}, "messages", "at most 40 tokens"),
        ({"max_tokens": 501}, "max_tokens", "at most 500 tokens"),
        ({"max_tokens": 200, "n": 3}, "max_tokens", "3 replies of at most 166"),
    ],
)
async def test_a_limit_names_the_field_and_what_is_allowed(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str, words: str
) -> None:
    """Width, depth, prompt and tokens are limited."""
    answer = await http.post(CHAT, json=BODY | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("settings", [LIMITED], indirect=True)
async def test_what_is_not_given_is_lowered_to_the_limit(http: httpx2.AsyncClient) -> None:
    """The response's spec says so; a small search is left as it is."""
    wide = (await http.post(CHAT, json=BODY | {"search": {"width": 8}})).json()["search"]["spec"]
    assert (wide["max_tokens"], wide["max_depth"]) == (500, 5)
    small = {"search": {"width": 2, "max_depth": 3, "trajectory_tokens": 50}}
    spec = (await http.post(CHAT, json=BODY | small)).json()["search"]["spec"]
    assert (spec["max_tokens"], spec["max_depth"]) == (None, 3)


@pytest.mark.parametrize(
    ("settings", "allowed_origin"),
    [({}, None), ({"cors_origins": "https://a.example"}, "https://a.example")],
    indirect=["settings"],
)
async def test_other_origins_are_let_in_by_name_alone(
    http: httpx2.AsyncClient, allowed_origin: str | None
) -> None:
    """CORS is off unless origins are named, and then allows only those."""
    for origin, expected in (("https://a.example", allowed_origin), ("https://b.example", None)):
        answer = await http.get("/health", headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == expected
