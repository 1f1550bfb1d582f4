"""The web pages: the store's, and the shell and shared files of all pages."""

from __future__ import annotations

from pathlib import Path
from string import Template

from starlette.responses import HTMLResponse

_SHELL = Path(__file__).with_name("shell.html")


def page_response(name: str, main: Path, *, source: str, leave: str) -> HTMLResponse:
    """Return the page of "store" or "engine": the shell with the content of the file `main`.

    The script is /page/{name}.js. `source` is the id of the element in the header that names the page's source, and
    `leave` the HTML of the button that logs out.
    """
    shell = Template(_SHELL.read_text(encoding="utf-8"))
    content = main.read_text(encoding="utf-8")
    return HTMLResponse(shell.substitute(name=name, source=source, leave=leave, main=content))
