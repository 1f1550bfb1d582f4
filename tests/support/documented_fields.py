"""Tables of a document's section "Fields", compared with the fields of requests."""

from __future__ import annotations

from typing import Any, get_type_hints

from engine.api.openai.schema import ChatBody, RequestBody


def undocumented(document: str, theirs: Any, ours: type[RequestBody], *, whole: bool) -> list[str]:
    """Return the fields of an SDK's type that `ours` does not handle, and that the row "ignored" does not name.

    With `whole`, add the fields of `ours` that the table does not name. It need not name refused fields of chats,
    because it has a link to them.
    """
    handled = {*ours.model_fields, *ours.unsupported}
    named = {*ours.model_fields, *(ours.unsupported.keys() - ChatBody.unsupported.keys())}
    table = document.split("## Fields")[1]
    _, _, ignored = table.partition("| ignored |")
    found = [name for name in get_type_hints(theirs) if name not in handled and f"`{name}`" not in ignored]
    return found + [name for name in sorted(named) if whole and f"`{name}" not in table]
