"""The parser of the graph language: it converts a text to the syntax tree of `graph.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from lark import Lark, Token, Transformer, Tree, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken, VisitError

from . import graph as nodes
from .errors import DeclarationError, GraphError, ParseError, Place, Source, UnknownNameError
from .graph import WORDS

MAX_DIGITS = 20  # of an integer; 2^64 has 20 digits
MAX_DEPTH = 100  # nesting depth, for example of sums: far below Python's recursion limit
ATTRIBUTES = ("init", "table", "fixed", "auto_dim", "pattern", "ref")


def parse(text: str, name: str = "<graph>") -> nodes.Graph:
    """Parse the text of a graph. `name` is the name of the text in error messages.

    Raises ParseError, DeclarationError or UnknownNameError. The message has line, column, and a caret under the
    position.
    """
    return _parse(text, name, "start")  # type: ignore[no-any-return]


def parse_file(path: Path) -> nodes.Graph:
    """Parse the graph in a file. Raises as `parse`, and OSError, or UnicodeDecodeError if the file is not UTF-8."""
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse_expression(text: str) -> nodes.Expression:
    """Parse an expression, such as ``3*D + t``. Raises ParseError."""
    return _parse(text, "<expression>", "expression")  # type: ignore[no-any-return]


@cache
def _grammar() -> Lark:
    path = Path(__file__).with_name("grammar.lark")
    return Lark(
        path.read_text(encoding="utf-8"),
        parser="lalr",
        start=["start", "expression"],
        propagate_positions=True,
        maybe_placeholders=True,
    )


def _parse(text: str, name: str, start: str) -> Any:
    source = Source(name, text)
    try:
        tree = _grammar().parse(text, start=start)
        _check_depth(tree, source)
        return _ToGraph(source).transform(tree)
    except UnexpectedInput as error:
        _refuse(error, source)
    except VisitError as error:
        if isinstance(error.orig_exc, GraphError):
            raise error.orig_exc from None
        raise


def _check_depth(tree: Tree[Token], source: Source) -> None:
    """Raise ParseError for a nesting deeper than MAX_DEPTH."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in node.children if isinstance(child, Tree)]
        if not level:
            return
    at = Place(source, level[0].meta.line, level[0].meta.column)
    raise ParseError(f"nested too deeply, at most {MAX_DEPTH} deep is allowed", at)


def _refuse(error: UnexpectedInput, source: Source) -> NoReturn:
    """Raise the ParseError for an error of lark, with the position and the expected symbols."""
    if isinstance(error, UnexpectedToken) and error.token.type != "$END":
        found, expected = f'"{error.token}"', error.accepts or error.expected
        at = Place(source, error.line, error.column)
    elif isinstance(error, UnexpectedCharacters):
        found, expected = f'"{error.char}"', error.allowed or set()
        at = Place(source, error.line, error.column)
    else:
        found, expected = "the end of the text", getattr(error, "accepts", None) or set()
        lines = source.text.rstrip().splitlines() or [""]
        at = Place(source, len(lines), len(lines[-1]) + 1)
    raise ParseError(f"unexpected {found}, expected {_as_list(expected)}", at) from None


def _as_list(terminals: Sequence[str] | set[str]) -> str:
    """Return the expected terminals of an error as text: "a, b or c"."""
    words = {
        "NAME": "a name",
        "INT": "an integer",
        "FLOAT": "a float",
        "STRING": "a string",
        "SECTION": "a section (dynamic, volatile, constant, persistent)",
        "PATTERN": '"pattern"',
        "PLUS_MINUS": '"+"',
        "TIMES": '"*"',
        "$END": "the end of the text",
    }
    patterns = {terminal.name: f'"{terminal.pattern.value}"' for terminal in _grammar().terminals}
    found = sorted({words.get(terminal) or patterns.get(terminal, terminal) for terminal in terminals})
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


@v_args(meta=True)
class _ToGraph(Transformer[Token, Any]):
    """Transformer of lark's syntax tree to a Graph. It has a method for each rule of the grammar."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def _at(self, where: Any) -> Place:
        return Place(self._source, where.line, where.column)

    def start(self, meta: Any, items: list[Any]) -> nodes.Graph:
        declarations = [found for item in items if isinstance(item, list) for found in item]
        return nodes.Graph(tuple(declarations), tuple(item for item in items if isinstance(item, nodes.Block)))

    def section(self, meta: Any, children: list[Any]) -> list[nodes.Declaration]:
        section, *makers = children
        return [make(str(section)) for make in makers]

    def declaration(self, meta: Any, children: list[Any]) -> Any:
        name, *rest = children
        indices: tuple[str, ...] = rest.pop(0) if isinstance(rest[0], tuple) and rest[0][0] == "(" else ()
        (dtype, dims), *attributes = rest
        found: dict[str, Any] = {}
        for attribute, values, at in attributes:
            key, value = _attribute(attribute, values, at)
            if key in found:
                raise DeclarationError(f"{name} has @{attribute} twice", at)
            found[key] = value
        place = self._at(name)
        return lambda section: nodes.Declaration(section, str(name), dtype, dims, indices[1:], **found, at=place)

    def indices(self, meta: Any, names: list[Token]) -> tuple[str, ...]:
        return ("(", *map(str, names))

    def type(self, meta: Any, children: list[Any]) -> tuple[str, tuple[nodes.Expression, ...]]:
        return str(children[0]), children[1] or ()

    def dims(self, meta: Any, children: list[Any]) -> tuple[Any, ...]:
        return tuple(child for child in children if child is not None)

    values = brackets = dims

    def attribute(self, meta: Any, children: list[Any]) -> tuple[str, list[Any] | None, Place]:
        return str(children[0]), children[1], self._at(meta)

    def arguments(self, meta: Any, children: list[Any]) -> list[Any]:
        return [child for child in children if child is not None]

    def argument(self, meta: Any, children: list[Any]) -> tuple[str | None, Any]:
        return (None if children[0] is None else str(children[0])), children[1]

    def integer(self, meta: Any, children: list[Token]) -> int:
        return self._int(children[0])

    def _int(self, token: Token) -> int:
        if len(token) > MAX_DIGITS:
            raise ParseError(f"an integer has at most {MAX_DIGITS} digits", self._at(token))
        return int(token)

    def real(self, meta: Any, children: list[Token]) -> float:
        return float(children[0])

    def string(self, meta: Any, children: list[Token]) -> str:
        return str(children[0])[1:-1]

    def word(self, meta: Any, children: list[Token]) -> Any:
        word = str(children[0])
        return WORDS.get(word, nodes.Name(word, at=self._at(children[0])))

    def negative(self, meta: Any, children: list[Token]) -> Any:
        text = str(children[0])
        if text in ("inf", "nan"):
            return -WORDS[text]
        if not text[0].isdigit():
            raise ParseError(f"a number belongs after -, got {text}", self._at(children[0]))
        return -self._int(children[0]) if text.isdigit() else -float(text)

    def name(self, meta: Any, children: list[Token]) -> nodes.Name:
        return nodes.Name(str(children[0]), at=self._at(children[0]))

    def minus(self, meta: Any, children: list[nodes.Expression]) -> nodes.Expression:
        (child,) = children
        return -child if isinstance(child, int) else nodes.Arithmetic("-", 0, child, at=self._at(meta))

    def arithmetic(self, meta: Any, children: list[Any]) -> nodes.Arithmetic:
        left, operator, right = children
        return nodes.Arithmetic(str(operator), left, right, at=self._at(meta))

    def slice(self, meta: Any, children: list[nodes.Expression | None]) -> nodes.Slice:
        start, stop = children
        return nodes.Slice(start, stop, at=self._at(meta))

    def access(self, meta: Any, children: list[Any]) -> nodes.Access:
        return nodes.Access(str(children[0]), children[1], at=self._at(meta))

    def parameter(self, meta: Any, children: list[Any]) -> tuple[str, Any]:
        return str(children[0]), children[1]

    def block(self, meta: Any, children: list[Any]) -> nodes.Block:
        name, *body = children
        return nodes.Block(str(name), tuple(body), at=self._at(name))

    def assign(self, meta: Any, children: list[Any]) -> nodes.Assign:
        name, (dtype, dims) = children
        return nodes.Assign(nodes.Declaration("volatile", str(name), dtype, dims, at=self._at(name)), at=self._at(meta))

    def operation(self, meta: Any, children: list[Any]) -> nodes.Operation:
        name, *operands, to = children
        arguments = tuple(operand for operand in operands if isinstance(operand, nodes.Access))
        parameters = tuple(operand for operand in operands if isinstance(operand, tuple))
        return nodes.Operation(str(name), arguments, parameters, str(to), at=self._at(meta))

    def transfer(self, meta: Any, children: list[Any]) -> nodes.Transfer:
        return nodes.Transfer(children[0], str(children[1]), at=self._at(meta))

    def loop(self, meta: Any, children: list[Any]) -> nodes.Loop:
        name, variable, start, stop, *body = children
        return nodes.Loop(str(name), str(variable), start, stop, tuple(body), at=self._at(meta))

    def branch(self, meta: Any, children: list[Token | None]) -> nodes.Branch:
        first, then, otherwise = (None if child is None else str(child) for child in children)
        if then is None:
            return nodes.Branch(None, str(first), None, at=self._at(meta))
        return nodes.Branch(first, then, otherwise, at=self._at(meta))

    def ending(self, meta: Any, children: list[Any]) -> nodes.Return:
        return nodes.Return(at=self._at(meta))

    def read(self, meta: Any, children: list[Any]) -> nodes.Read:
        return nodes.Read(children[0], str(children[1]), at=self._at(meta))

    def write(self, meta: Any, children: list[Any]) -> nodes.Write:
        return nodes.Write(children[0], children[1], at=self._at(meta))

    def increment(self, meta: Any, children: list[Any]) -> nodes.Increment:
        return nodes.Increment(str(children[1]), self._int(children[0]) if children[0] else 1, at=self._at(meta))

    def decrement(self, meta: Any, children: list[Any]) -> nodes.Increment:
        return nodes.Increment(str(children[1]), -self._int(children[0]) if children[0] else -1, at=self._at(meta))

    def reset(self, meta: Any, children: list[Any]) -> nodes.Reset:
        return nodes.Reset(children[0], at=self._at(meta))


def _attribute(name: str, values: list[tuple[str | None, Any]] | None, at: Place) -> tuple[str, Any]:
    """Return the field of `Declaration` that an attribute sets, and its value.

    Raises UnknownNameError for an unknown attribute, DeclarationError for wrong arguments.
    """
    if name not in ATTRIBUTES:
        raise UnknownNameError(f"there is no attribute @{name}, only {', '.join(f'@{a}' for a in ATTRIBUTES)}", at)
    if name == "table":
        if values is not None:
            raise DeclarationError("@table takes nothing in parentheses", at)
        return name, True
    given = values or []
    keys, literals = [key for key, _ in given], [value for _, value in given]
    if name == "fixed":
        if not given or None in keys or not all(type(value) is int for value in literals):
            raise DeclarationError("@fixed takes the sizes of indices: @fixed(i=1024, j=256)", at)
        if len(set(keys)) < len(keys):
            raise DeclarationError("@fixed names an index twice", at)
        return name, tuple(given)
    if any(key is not None for key in keys):
        raise DeclarationError(f"@{name} takes no names with =", at)
    if name == "auto_dim":
        if not given or not all(isinstance(value, nodes.Name) for value in literals):
            raise DeclarationError("@auto_dim takes the names of indices: @auto_dim(i, j)", at)
        return name, tuple(value.text for value in literals)
    kind, example = ((bool, int, float), "@init(0)") if name == "init" else ((str,), f'@{name}("W.0")')
    if len(given) != 1 or not isinstance(literals[0], kind):
        raise DeclarationError(f"@{name} takes one literal: {example}", at)
    return ("init" if name == "init" else "reference"), literals[0]
