"""From decisions to one HTML document. A kernel's name or a reason may come from anywhere, so Jinja escapes everything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from mla_serve import __version__
from mla_serve.pages.chart import ms
from mla_serve.pages.view import HOWS, STEPS, make_view
from mla_serve.selection.decision import Decision

_HERE = Path(__file__).parent


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=FileSystemLoader(_HERE), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"ms": ms, "figure": lambda value: "" if value is None else f"{value:.1e}"}
    return environment.get_template("attention.html.jinja")


def _policy() -> str:
    """The content security policy: our one style sheet and our one script, by digest, and nothing else at all."""

    def digest(name: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {digest('script.js')}; style-src {digest('style.css')}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def page_headers() -> dict[str, str]:
    """The headers that the page is served with."""
    return {
        "content-security-policy": f"{_policy()}; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }


def render_page(
    in_force: Iterable[Decision], table: Iterable[Decision] = (), *, subject: str, served: bool = False, other_hosts: int = 0
) -> str:
    """The page. `in_force` are the decisions that serve now, `table` others worth showing, `subject` what it is about.

    `served` links the JSON beside it and leaves the content security policy to the headers; a file carries its own.
    `other_hosts` counts decisions that are in the table but hold elsewhere.
    """
    view = make_view(in_force, table)
    return _template().render(
        view=view,
        subject=subject,
        served=served,
        policy=None if served else _policy(),
        other_hosts=other_hosts,
        hows=HOWS,
        steps=STEPS,
        style=Markup(_asset("style.css")),  # noqa: S704 - both are files of this package
        script=Markup(_asset("script.js")),  # noqa: S704
        version=__version__,
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
