"""A program of its own: a document's bytes on stdin, its text as one JSON object on stdout.

Parsers meet files that others made, so they run here, in a process with bounded memory and time
(:mod:`chunkcache_retriever.file_readers` starts it and bounds how long it may take): whatever a
file makes a parser do, the job that asked goes on. Knows formats; imports nothing of the project,
so that it starts quickly. Its argument is the format: ``html``, ``pdf`` or ``docx``.
"""

import io
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

MAX_MEMORY_BYTES = 2 << 30
MAX_CPU_SECONDS = 120
MAX_TEXT_CHARS = 32 << 20
MAX_UNPACKED_BYTES = 256 << 20
MAX_ZIP_MEMBERS = 10_000
MAX_PAGES = 20_000

_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_DROPPED_TAGS = [
    "script",
    "style",
    "template",
    "noscript",
    "svg",
    "math",
    "iframe",
    "object",
    "head",
]
_BLOCK_TAGS = frozenset(
    [
        *(
            "address",
            "article",
            "aside",
            "blockquote",
            "body",
            "caption",
            "dd",
            "details",
            "dialog",
        ),
        *("div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hr"),
        *("html", "legend", "main", "nav", "ol", "p", "section", "summary", "table", "ul"),
    ]
)
_SPACES = re.compile(r"[ \t\n\r\f]+")


class ParseFault(Exception):
    """A file that gives no text.

    Args:
        code: Stable reason.
        message: What is wrong.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def parse_html(data: bytes) -> tuple[str, str]:
    """Text and title of decoded HTML, given in UTF-8.

    Headings keep their rank as Markdown's, lists and table cells their marks; scripts, styles and
    what else is not shown are left out.
    """
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(data.decode("utf-8"))
    title_node = tree.css_first("head > title")
    title = _SPACES.sub(" ", title_node.text()).strip() if title_node else ""
    tree.strip_tags(_DROPPED_TAGS)
    pieces: list[str] = []
    if tree.body is not None:
        _write_html(tree.body, pieces)
    lines = [line.rstrip() for line in "".join(pieces).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n"), title


def _write_html(body: Any, pieces: list[str]) -> None:
    """Append the text of a tree. By a stack of its own: a page may be nested any depth."""
    stack: list[tuple[Any, str | None]] = [(body, None)]
    num_open_pre = 0
    while stack:
        node, closing = stack.pop()
        if closing is not None:
            num_open_pre -= closing == "\n\n\x00"
            pieces.append(closing.removesuffix("\x00"))
            continue
        tag = node.tag
        if tag == "-text":
            text = node.text_content or ""
            pieces.append(text if num_open_pre else _SPACES.sub(" ", text))
            continue
        if tag.startswith(("-", "_", "!")):
            continue
        opening, closing = _marks(tag)
        num_open_pre += tag == "pre"
        if opening and pieces and not pieces[-1].strip(" "):
            pieces[-1] = ""
        pieces.append(opening)
        stack.append((node, closing))
        child = node.last_child
        while child is not None:
            stack.append((child, None))
            child = child.prev


def _marks(tag: str) -> tuple[str, str]:
    """What stands before and behind an element's text."""
    if re.fullmatch(r"h[1-6]", tag):
        return f"\n\n{'#' * int(tag[1])} ", "\n\n"
    if tag == "pre":
        return "\n\n", "\n\n\x00"
    if tag == "br":
        return "\n", ""
    if tag == "li":
        return "\n- ", "\n"
    if tag == "tr":
        return "\n", "\n"
    if tag in ("td", "th"):
        return "", " | "
    return ("\n\n", "\n\n") if tag in _BLOCK_TAGS else ("", "")


def parse_pdf(data: bytes) -> tuple[str, str]:
    """Text and title of a PDF, its pages apart."""
    from pypdf import PasswordType, PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
            raise ParseFault("encrypted", "is protected by a password")
        if len(reader.pages) > MAX_PAGES:
            raise ParseFault("too_large", f"has over {MAX_PAGES:,} pages")
        num_chars = 0
        pages: list[str] = []
        for page in reader.pages:
            pages.append(page.extract_text())
            num_chars += len(pages[-1])
            if num_chars > MAX_TEXT_CHARS:
                raise ParseFault("too_large", f"has over {MAX_TEXT_CHARS:,} characters of text")
        title = str(reader.metadata.title or "") if reader.metadata else ""
    except (DependencyError, FileNotDecryptedError) as error:
        raise ParseFault("encrypted", "is encrypted") from error
    if not any(page.strip() for page in pages):
        raise ParseFault(
            "no_text", f"holds no text on its {len(pages)} pages (scanned?): it needs OCR first"
        )
    return "\n\n".join(pages), title


def parse_docx(data: bytes) -> tuple[str, str]:
    """Text and title of a Word document: paragraphs, headings as Markdown's, table rows."""
    if data.startswith(_OLE_MAGIC):
        raise ParseFault("encrypted", "is protected by a password, or in Word's former format")
    _check_zip(data)
    from docx import Document
    from docx.table import Table

    document = Document(io.BytesIO(data))
    pieces: list[str] = []
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            pieces.append("\n".join(_table_lines(block)))
            continue
        style = block.style.name if block.style is not None else ""
        heading = re.fullmatch(r"Heading ([1-6])", style or "")
        mark = f"{'#' * int(heading[1])} " if heading else "# " if style == "Title" else ""
        if style and style.startswith("List "):
            mark = "- "
        pieces.append(mark + block.text)
    return "\n\n".join(piece for piece in pieces if piece.strip()), document.core_properties.title


def _table_lines(table: Any) -> Iterator[str]:
    for row in table.rows:
        # A merged cell is given once for each place that it takes.
        cells = dict.fromkeys(row.cells)
        texts = [_SPACES.sub(" ", cell.text).strip() for cell in cells]
        if any(texts):
            yield " | ".join(texts)


def _check_zip(data: bytes) -> None:
    """Refuse archives that grow beyond all bounds, and XML that declares entities."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if len(members) > MAX_ZIP_MEMBERS:
            raise ParseFault("too_large", f"holds over {MAX_ZIP_MEMBERS:,} parts")
        if sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
            raise ParseFault("too_large", f"unpacks to over {MAX_UNPACKED_BYTES:,} bytes")
        for member in members:
            if member.filename.endswith((".xml", ".rels")) and re.search(
                rb"<!\s*(DOCTYPE|ENTITY)", archive.read(member)
            ):
                raise ParseFault("hostile", "declares XML entities, which no Word document does")


_PARSERS: dict[str, Callable[[bytes], tuple[str, str]]] = {
    "html": parse_html,
    "pdf": parse_pdf,
    "docx": parse_docx,
}


def parse(kind: str, data: bytes) -> dict[str, str]:
    """A document's text and title, or a code and a message."""
    try:
        text, title = _PARSERS[kind](data)
        if len(text) > MAX_TEXT_CHARS:
            raise ParseFault("too_large", f"has over {MAX_TEXT_CHARS:,} characters of text")
    except ParseFault as fault:
        return {"code": fault.code, "message": fault.message}
    except ImportError as error:
        return {
            "code": "missing_parser",
            "message": f"needs {error.name}: pip install 'chunkcache[files]'",
        }
    except MemoryError:
        return {"code": "too_large", "message": f"takes over {MAX_MEMORY_BYTES:,} bytes to parse"}
    except Exception as error:
        # Parsers raise anything at all on files that are damaged.
        return {"code": "unreadable", "message": f"is damaged: {type(error).__name__}"}
    return {"text": text.encode("utf-8", "replace").decode("utf-8"), "title": title}


def main() -> None:
    """Parse stdin."""
    _bound_this_process()
    result = parse(sys.argv[1], sys.stdin.buffer.read())
    sys.stdout.buffer.write(json.dumps(result).encode("ascii"))


def _bound_this_process() -> None:
    if sys.platform == "win32":
        return
    import resource

    for kind, bound in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, MAX_CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        # Whoever started the job may have set less, and no process may ask for more than that.
        inherited = resource.getrlimit(kind)[1]
        if inherited == resource.RLIM_INFINITY or inherited > bound:
            resource.setrlimit(kind, (bound, bound))


if __name__ == "__main__":
    main()
