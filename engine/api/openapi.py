"""The description of the API: /openapi.json, which is made from the routes and the schema of requests, and /docs."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvpage_server import __version__

from .anthropic.schema import CountBody, MessagesBody
from .auth import AGENT_HEADER
from .hints import HintsBody
from .openai.response_schema import ConversationBody, ItemsBody, MetadataBody, ResponseBody
from .openai.schema import ChatBody, CompletionBody, ForkBody, RequestBody

_BODIES: dict[str, type[RequestBody]] = {  # by endpoint
    "chat": ChatBody,
    "complete": CompletionBody,
    "create_response": ResponseBody,
    "create_message": MessagesBody,
    "count_tokens": CountBody,
    "fork": ForkBody,
    "create_conversation": ConversationBody,
    "update_conversation": MetadataBody,
    "add_items": ItemsBody,
    "kv_hints": HintsBody,
}
_STREAMED = (
    "chat",
    "complete",
    "create_response",
    "create_message",
)  # endpoints that also answer with server-sent events
_PARAMETER = re.compile(r"\{(\w+)(?::(?:path|agent))?\}")
_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "description": "An error of OpenAI's API, or of Anthropic's, which has fewer fields.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "Name of the wrong field."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def openapi(request: Request) -> Response:
    """Reply with this description of the API."""
    return JSONResponse(document(request.app.routes))


async def docs(request: Request) -> Response:
    """Reply with a page that lists the routes and their fields."""
    return HTMLResponse(_page(document(request.app.routes)))


OPENAPI_ROUTES = [Route("/openapi.json", openapi), Route("/docs", docs)]


class _Generator(GenerateJsonSchema):
    """Generator of JSON Schemas without titles, which would repeat the names of fields."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the description of `routes` in OpenAPI's format, version 3.1."""
    template = _SCHEMAS + "{model}"
    bodies: Any = [(body, "validation") for body in _BODIES.values()]
    _, made = models_json_schema(bodies, ref_template=template, schema_generator=_Generator)
    schemas = json.loads(
        json.dumps(made["$defs"])
        .replace("engine__api__", "")
        .replace("__response_schema__", ".responses.")
        .replace("__schema__", ".")
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            for method in (route.methods or set()) - {"HEAD"}:
                paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvpage-engine",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs, and agents. In requests, null is the same as no field, and "
            "unknown fields are ignored. Fields that can only be null or neutral are not supported.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **schemas},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    name = route.endpoint.__name__
    path = [{"name": name, "in": "path", "required": True} for name in _PARAMETER.findall(route.path)]
    header = [{"name": AGENT_HEADER, "in": "header", "description": "Name of the agent."}] if name in _STREAMED else []
    answer: dict[str, Any] = {"application/json": {}} | ({"text/event-stream": {}} if name in _STREAMED else {})
    operation: dict[str, Any] = {
        "summary": (route.endpoint.__doc__ or "").partition(". ")[0].strip(". "),
        "parameters": [{**parameter, "schema": {"type": "string"}} for parameter in (*path, *header)],
        "responses": {
            "2XX": {"description": "The answer.", "content": answer},
            "default": {"description": "An error.", "content": _json("Error")},
        },
    }
    if name in _BODIES:
        operation["requestBody"] = {"required": True, "content": _json(_BODIES[name].__name__)}
    return operation


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _SCHEMAS + schema}}}


# -- /docs: the description as a page, without scripts and without files of other sites --------------------------------

_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>kvpage engine: the API</title>
  <link rel="icon" href="/page/icon.svg">
  <link rel="stylesheet" href="/page/look.css">
</head>
<body>
  <header class="top">
    <h1>kvpage engine: the API</h1>
    <a href="/">The engine</a>
    <a href="/openapi.json">OpenAPI</a>
  </header>
  <main>
    <p class="summary">{description}</p>
{sections}
  </main>
</body>
</html>
"""


def _page(document: dict[str, Any]) -> str:
    sections = [*_routes(document), *_schemas(document["components"]["schemas"])]
    return _PAGE.format(description=html.escape(document["info"]["description"]), sections="\n".join(sections))


def _routes(document: dict[str, Any]) -> Iterator[str]:
    rows = []
    for path, operations in document["paths"].items():
        for method, operation in sorted(operations.items()):
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            rows.append((f"<code>{method.upper()} {html.escape(path)}</code>", operation["summary"], _shown(body)))
    yield _table("Routes", "", ("route", "", "body"), rows)


def _schemas(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        required = schema.get("required", ())
        rows = [
            (
                f"<code>{html.escape(field)}</code>" + (" (required)" if field in required else ""),
                _shown(found),
                html.escape(str(found.get("description", ""))),
            )
            for field, found in schema.get("properties", {}).items()
        ]
        yield _table(name, schema.get("description", ""), ("field", "values", ""), rows)


def _table(name: str, text: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    note = f'<span class="note">{html.escape(text)}</span>'
    return (
        f'<section class="card" id="{name}"><header><h2>{name}</h2>{note}</header>'
        f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>\n{body}</table></div></section>'
    )


_BOUNDS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
    "minLength": "characters from",
    "maxLength": "characters to",
    "minItems": "items from",
    "maxItems": "items to",
    "default": "default",
}


def _shown(schema: dict[str, Any]) -> str:
    """Return the values of a field as HTML."""
    if reference := schema.get("$ref"):
        name = reference.removeprefix(_SCHEMAS)
        return f'<a href="#{name}">{name}</a>'
    if alternatives := schema.get("anyOf"):
        return " or ".join(_shown(one) for one in alternatives if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{html.escape(repr(value))}</code>" for value in values)
    kind = html.escape(str(schema.get("type", "")))
    items = f" of {_shown(schema['items'])}" if schema.get("items") else ""
    bounds = [
        f"{word} {html.escape(str(schema[name]))}" for name, word in _BOUNDS.items() if schema.get(name) is not None
    ]
    return ", ".join([kind + items, *bounds])
