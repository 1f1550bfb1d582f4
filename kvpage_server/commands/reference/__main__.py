"""``python -m kvpage_server.commands.reference`` prints docs/commands.md."""

import kvpage_server.commands.families  # noqa: F401  # fills the table
from kvpage_server.commands.reference.document import reference

print(reference(), end="")
