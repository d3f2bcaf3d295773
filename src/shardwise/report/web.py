"""A page that needs nothing but a browser: templates, the one script and the policy that lets nothing else run."""

import base64
import hashlib
import importlib.resources
from typing import Any

import jinja2
from markupsafe import Markup

SCRIPT = """
document.querySelectorAll("table.sort th").forEach((head, at) => head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], up = head.getAttribute("aria-sort") !== "ascending";
  head.parentNode.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => { const v = row.cells[at].dataset.v; return v === "" ? NaN : isNaN(v) ? v : Number(v); };
  [...body.rows].map(row => [value(row), row]).sort(([a], [b]) =>
    a !== a ? (b !== b ? 0 : 1) : b !== b ? -1 : (typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b), undefined, {numeric: true})) * (up ? 1 : -1)
  ).forEach(([, row]) => body.append(row));
}));
"""
"""Sorts the table by the column that is clicked; the page is complete without it."""


def render_page(template: str, **values: Any) -> str:
    """The page that a template makes of ``values``. Every text is escaped, and nothing runs but SCRIPT.

    Args:
        template: its path below the package, such as ``report/page.html.jinja``.
    """
    package = importlib.resources.files("shardwise")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: package.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return environment.get_template(template).render(script=Markup(SCRIPT), digest=digest, **values)


def inline(image: bytes) -> str:
    """A PNG file as the address of an image that needs no file."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
