"""Checks of the built site: every link, anchor and image exists, and no page loads anything from another host.

mkdocs checks the links of Markdown. This reads the HTML, so it covers generated tables, raw HTML and the theme.
It runs at the end of every build, and a problem fails the build.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_NOT_LOADED = {"canonical", "prev", "next", "alternate", "edit"}
"""Relations of <link> that a browser does not fetch."""
_ABSOLUTE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:)?//", re.I)


class Page(HTMLParser):
    """What one page links to, loads, and offers as anchors."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif (place := values.get(_LOADED.get(tag, ""))) is not None and values.get("rel") not in _NOT_LOADED:
            self.loaded.append(place)


def problems(site: Path) -> list[str]:
    """What is wrong with the site, a line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site)
        found += [f"{where} loads {place}" for place in page.loaded if _ABSOLUTE.match(place)]
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            base = site if parts.path.startswith("/") else path.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{where} links to {link}, which is not there")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where} links to {link}, and that page has no such anchor")
    for style in sorted(site.rglob("*.css")):
        places = re.findall(r"url\(\s*['\"]?((?:https?:)?//[^'\")]+)", style.read_text(encoding="utf-8"))
        found += [f"{style.relative_to(site)} loads {place}" for place in places]
    return found


def on_post_build(config: Any, **_: Any) -> None:
    """mkdocs calls this when the site is written. Raises PluginError, which fails the build, if it has problems."""
    from mkdocs.exceptions import PluginError

    if found := problems(Path(config["site_dir"]).resolve()):
        raise PluginError("\n".join(["the built site has problems:", *found]))
