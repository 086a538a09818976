"""The page at ``/``: its files, their headers, and what the API tells it."""

from __future__ import annotations

import re

import pytest

from cli_support import toy
from outpace.serving.offered import Defaults
from outpace.serving.tenants import Terms
from outpace.serving.web_page import FOLDER, POLICY
from serving_support import KEYS, client, service

FILES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8"}
TYPES |= {"css": "text/css; charset=utf-8", "svg": "image/svg+xml"}


def test_the_page_and_all_its_files_are_served_with_their_types_and_the_policy() -> None:
    with client() as to:
        assert to.get("/").content == (FOLDER / "index.html").read_bytes()
        for name in FILES:
            answer = to.get(f"/web/{name}")
            assert answer.status_code == 200
            assert answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"] == TYPES[name.rpartition(".")[2]]
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = to.get(f"/web/{name}", headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")


def test_the_policy_allows_this_origin_only_and_nothing_inline() -> None:
    assert "default-src 'none'" in POLICY
    assert "require-trusted-types-for 'script'" in POLICY
    assert "unsafe" not in POLICY
    assert set(re.findall(r"-src (.*?)(?:;|$)", POLICY)) == {"'none'", "'self'"}
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", html)
    everything = "".join((FOLDER / name).read_text() for name in FILES)
    assert set(re.findall(r"https?://[^\s\"']+", everything)) == {"http://www.w3.org/2000/svg"}


def test_every_file_that_the_page_names_is_there() -> None:
    html = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="web/([^"]+)"', html))
    modules = [name for name in FILES if name.endswith(".js")]
    imported = {one for name in modules for one in re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text())}
    assert named | imported | {"index.html"} == set(FILES)


@pytest.mark.parametrize("path", ["/web/none.js", "/web/..%2fapp.py", "/web/%2e%2e/app.py", "/web/"])
def test_other_paths_are_not_found(path: str) -> None:
    with client() as to:
        answer = to.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_the_page_needs_no_key_but_the_models_do() -> None:
    keys = {name: Terms(key=key) for name, key in KEYS.items()}
    with client(service(keys=keys)) as to:
        assert to.get("/").status_code == 200
        assert to.get("/web/main.js").status_code == 200
        assert to.get("/v1/models").status_code == 401


def test_models_tell_the_methods_that_have_what_they_need() -> None:
    with client() as to:
        [model] = to.get("/v1/models").json()["data"]
    found = model["speculation"]
    assert found["method"] == "pld"
    assert {"none", "pld", "sam", "auto"} <= set(found["methods"])
    assert not {"draft-model", "eagle3", "rest", "llma"} & set(found["methods"])
    assert found["lossy_methods"] == []
    with client(service(defaults=Defaults("pld", named={"draft_model": toy("draft")}))) as to:
        [model] = to.get("/v1/models").json()["data"]
    assert "bild" in model["speculation"]["methods"]
    assert "bild" in model["speculation"]["lossy_methods"]
