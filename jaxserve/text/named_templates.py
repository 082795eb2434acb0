"""Chat templates from outside the checkpoint: shipped ones by name, files, and literal sources."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from jaxserve.errors import InvalidRequest
from jaxserve.text.template import MAX_NODES, MAX_SOURCE_CHARS, ChatTemplate
from jaxserve.text.template_names import HOW_TO_GIVE, NAMED_TEMPLATES, TEMPLATE_FOLDER

# Characters by which vLLM distinguishes a template from a path.
_JINJA = "{}\n"


def find_template(
    given: str | Path, may_read: bool = True, max_nodes: int = MAX_NODES
) -> ChatTemplate:
    """Return the chat template that a setting or a request names.

    Args:
        given: path of a file, name of a shipped template, or Jinja source.
        may_read: True if files may be read. Requests never read files.
        max_nodes: maximum nodes in the syntax tree.

    Raises:
        InvalidRequest: the value is not one of these, or the template is invalid.
    """
    text = str(given)
    if may_read and not isinstance(given, Path) and any(sign in text for sign in _JINJA):
        may_read = False  # Jinja source, unless it was passed as a Path
    if may_read:
        is_file = False
        with suppress(OSError, ValueError):  # too long for a path, or contains a NUL
            is_file = Path(text).is_file()
        if is_file:
            return compile_template(_read(Path(text)), text)
    if text in NAMED_TEMPLATES:
        return compile_template((TEMPLATE_FOLDER / f"{text}.jinja").read_text(), text)
    if not any(sign in text for sign in _JINJA):
        raise InvalidRequest(
            f"chat_template: {text[:200]!r} is neither a template nor {HOW_TO_GIVE}",
            "chat_template",
        )
    return compile_template(text, max_nodes=max_nodes)


def _read(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InvalidRequest: the file cannot be read, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            return file.read(4 * MAX_SOURCE_CHARS + 1).decode()
    except OSError as error:
        message = f"chat_template: cannot read {path}: {error.strerror}"
        raise InvalidRequest(message, "chat_template") from error
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"chat_template: {path} is no text in UTF-8", "chat_template"
        ) from None


def compile_template(source: str, where: str = "", max_nodes: int = MAX_NODES) -> ChatTemplate:
    """Return a compiled template that does not come from a checkpoint.

    Raises:
        InvalidRequest: the template is invalid or too large.
    """
    try:
        return ChatTemplate(source, max_nodes)
    except Exception as error:  # from Jinja, Python, or a size check
        at_file = f" {where}" if where else ""
        message = " ".join(str(error).split())[:300]
        raise InvalidRequest(f"chat_template{at_file}: {message}", "chat_template") from error
