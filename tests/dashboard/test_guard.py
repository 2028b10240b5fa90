"""Runs are not served without the token, to another site, or under another name; pages cannot run foreign scripts."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from written_runs import TOKEN, falling, write_run

from headway.dashboard.guard import cookie_of
from headway.http_server import is_own_name, own_names
from headway.track import RunFolder
from headway.track.store import read_labels

PATHS = [
    "/",
    "/run/x",
    "/static/app.js",
    "/api/runs",
    "/api/live",
    "/files?run=a&path=b",
    "/sheet?id=a",
    "/nothing",
    "/api/nothing",
]


def test_nothing_is_answered_without_the_token(stranger: TestClient) -> None:
    assert {path: stranger.get(path).status_code for path in PATHS} == dict.fromkeys(PATHS, 401)


def test_wrong_token_opens_nothing(stranger: TestClient) -> None:
    for token in ("", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), cookie_of(TOKEN)[1]):
        answer = stranger.get("/", params={"token": token})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert stranger.post("/login", data={"token": token}).status_code == 401
        assert stranger.get("/api/runs", headers={"Authorization": f"Bearer {token}"}).status_code == 401


def test_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(stranger: TestClient) -> None:
    answer = stranger.get(f"/run/demo?token={TOKEN}")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN.lower() not in cookie
    assert TOKEN not in answer.text
    assert 'content="0;url=/run/demo"' in answer.text
    assert stranger.get("/api/runs").status_code == 200


def test_token_does_not_open_answers_directly(stranger: TestClient) -> None:
    """It would stay in histories and logs; scripts send it as a header."""
    assert stranger.get("/api/runs", params={"token": TOKEN}).status_code == 401
    assert stranger.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_form_takes_the_token(stranger: TestClient) -> None:
    assert stranger.post("/login", data={"token": TOKEN}).status_code == 200
    assert stranger.get("/").status_code == 200


def test_form_of_another_site_is_refused(stranger: TestClient) -> None:
    answer = stranger.post("/login", data={"token": TOKEN}, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_rebound_names_are_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 403
    assert client.get(f"/?token={TOKEN}", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8321", "localhost", "localhost:9000", "[::1]:8321", "127.0.0.1"])
def test_own_names_are_answered(client: TestClient, host: str) -> None:
    """Any port: it may be forwarded."""
    assert client.get("/api/runs", headers={"Host": host, "Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_listening_beyond_loopback_adds_the_given_name() -> None:
    assert is_own_name("gpu-1.example:80", own_names("gpu-1.example"))
    assert not is_own_name("gpu-2.example:80", own_names("gpu-1.example"))


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/api/runs", "/files?run=a&path=b"])
def test_pages_of_other_origins_get_no_answers(client: TestClient, site: str, path: str) -> None:
    """Another port of this machine is the same site, and another user's server."""
    assert client.get(path, headers={"Sec-Fetch-Site": site}).status_code == 403


def test_it_is_read_only(client: TestClient) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        assert client.request(method, "/api/runs").status_code == 405, method


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/static/none", "/api/run?run=none", "/api/run"])
def test_every_answer_restricts_what_a_page_may_do(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_pages_of_the_guard_escape_what_they_repeat(stranger: TestClient) -> None:
    answer = stranger.get('/"><script>alert(1)</script>', params={"token": TOKEN})
    assert answer.status_code == 200
    assert "<script" not in answer.text
    assert 'url=/evil.example/"' in stranger.get("http://127.0.0.1:8321//evil.example/", params={"token": TOKEN}).text


def test_page_has_no_inline_script_or_style(client: TestClient) -> None:
    page = client.get("/run/any").text
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert "<style" not in page
    assert re.findall(r"\s(?:style|on\w+)=", page) == []


def test_hostile_texts_travel_as_json_only(client: TestClient, runs: Path) -> None:
    write_run(runs, "demo", falling(3), recipe={"name": "</script><script>alert(1)</script>"})
    answer = client.get("/api/recipe", params={"run": "demo"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["rows"][0]["value"] == "</script><script>alert(1)</script>"


def test_labels_are_changed_only_by_pages_of_this_server(client: TestClient, runs: Path) -> None:
    run = RunFolder(write_run(runs, "good", [1.0]))
    body = '{"tags": ["mine"], "note": ""}'

    def send(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.post("/api/labels?run=good", content=body, headers=named).status_code

    assert send(content_type="application/json", sec_fetch_site="cross-site") == 403
    assert send(content_type="application/json", sec_fetch_site="same-site") == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert send(content_type=kind) == 415, "what a page of another site can send unasked"
    assert send(content_type="application/json", content_length="99999999") == 413
    cookies = dict(client.cookies)
    client.cookies.clear()
    assert send(content_type="application/json") == 401
    assert read_labels(run).tags == ()
    client.cookies.update(cookies)
    assert send(content_type="application/json", sec_fetch_site="same-origin") == 200
    assert read_labels(run).tags == ("mine",)
