"""What becomes of files of every kind, and what is said about those that give no text."""

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable

import docx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf import PdfWriter

from chunkcache.documents import canonical_text
from chunkcache.file_kinds import FileKind, ReadFault, ReadText
from chunkcache_retriever import document_parser, file_readers
from chunkcache_retriever.document_parser import parse, parse_html
from chunkcache_retriever.file_readers import file_kinds, read_text

GREEK = "\u038c\u03bb\u03bf\u03b9 \u03bf\u03b9 \u03ac\u03bd\u03b8\u03c1\u03c9\u03c0\u03bf\u03b9 \u03b3\u03b5\u03bd\u03bd\u03b9\u03bf\u03cd\u03bd\u03c4\u03b1\u03b9 \u03b5\u03bb\u03b5\u03cd\u03b8\u03b5\u03c1\u03bf\u03b9 \u03ba\u03b1\u03b9 \u03af\u03c3\u03bf\u03b9 \u03c3\u03c4\u03b7\u03bd \u03b1\u03be\u03b9\u03bf\u03c0\u03c1\u03ad\u03c0\u03b5\u03b9\u03b1. "
GERMAN = "Der Müller läuft über die Straße und grüßt die Möwen. Später gehen wir nach Hause. "


def read(suffix: str, data: bytes) -> ReadText | ReadFault:
    kind = file_kinds()[suffix]
    assert isinstance(kind, FileKind)
    return kind.read(data)


def text_of(suffix: str, data: bytes) -> str:
    found = read(suffix, data)
    assert isinstance(found, ReadText), found
    return found.text


def code_of(suffix: str, data: bytes) -> str:
    found = read(suffix, data)
    assert isinstance(found, ReadFault), found
    return found.code


def pdf(*pages: str, title: str = "", password: str = "") -> bytes:
    """A PDF with a line of text on each page, written by hand."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode())
    objects.append(b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    for i, text in enumerate(pages):
        objects.append(
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {5 + 2 * i} 0 R"
            "/Resources<</Font<</F1 3 0 R>>>>>>".encode()
        )
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b""
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream))
    body, offsets = b"%PDF-1.4\n", []
    for number, value in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj%s endobj\n" % (number, value)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    body += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(offsets) + 1, table) + (
        b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(offsets) + 1, len(body))
    )
    if not title and not password:
        return body
    writer = PdfWriter(clone_from=io.BytesIO(body))
    if title:
        writer.add_metadata({"/Title": title})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    return written(writer.write)


def word(change: Callable[[docx.document.Document], object]) -> bytes:
    document = docx.Document()
    change(document)
    return written(document.save)


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def rezipped(data: bytes, name: str, content: bytes) -> bytes:
    """A zip file with one member replaced."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.namelist():
            new.writestr(member, content if member == name else old.read(member))
    return file.getvalue()


def test_html_keeps_structure_and_drops_what_is_not_shown() -> None:
    page = b"""<!doctype html><html><head><title> A  title </title><style>a{}</style></head><body>
      <h1>Hello <b>world</b></h1><p>A text\n over <i>lines</i>.</p><!-- secret -->
      <ul><li>one<li>two</ul><pre>x\n  y</pre><script>alert(1)</script>
      <table><tr><td>1<td>2</table><p>&lt;tag&gt; caf\xc3\xa9</body></html>"""
    found = read(".html", page)
    assert isinstance(found, ReadText)
    assert found.metadata == {"title": "A title"}
    text = found.text
    assert text.startswith("# Hello world\n\nA text over lines.\n\n- one\n")
    assert "x\n  y" in text
    assert "1 | 2" in text
    assert text.endswith("<tag> café")
    for hidden in ("alert", "secret", "a{}", "A title"):
        assert hidden not in text


def test_html_may_name_its_encoding() -> None:
    page = '<html><meta charset="windows-1252"><p>Größe</p>'.encode("cp1252")
    found = read(".htm", page)
    assert isinstance(found, ReadText)
    assert found.text == "Größe"
    assert found.metadata["source_encoding"] == "windows-1252"


@pytest.mark.parametrize(
    "name", ["undefined", "unicode_escape", "Raw-Unicode-Escape", "idna", "punycode", "hex", "none"]
)
def test_a_page_that_names_no_encoding_of_pages(name: str) -> None:
    """Python's codecs of other kinds neither end the run nor read the page."""
    page = b"<meta charset=%s><p>caf\xe9 \\u0041 -" % name.encode()
    assert code_of(".html", page) == "invalid_encoding"


def test_deep_html_is_no_recursion() -> None:
    assert parse_html(b"<div>" * 5_000 + b"deep") == ("deep", "")


def test_pdf_pages_and_title() -> None:
    found = read(".pdf", pdf("Hello page one", "and page two", title="Paper"))
    assert found == ReadText("Hello page one\n\nand page two", {"title": "Paper"})


def test_pdfs_without_text_or_behind_a_password() -> None:
    assert code_of(".pdf", pdf("", "")) == "no_text"
    assert code_of(".pdf", pdf("secret", password="sesame")) == "encrypted"


def test_word_documents() -> None:
    def change(document) -> None:
        document.core_properties.title = "Manual"
        document.add_heading("Valves", 2)
        document.add_paragraph("Turn left.")
        table = document.add_table(1, 2)
        table.cell(0, 0).text, table.cell(0, 1).text = "E13", "shut"
        document.add_paragraph("Done", style="List Bullet")

    found = read(".docx", word(change))
    assert found == ReadText("## Valves\n\nTurn left.\n\nE13 | shut\n\n- Done", {"title": "Manual"})


def test_hostile_word_documents() -> None:
    """A bomb is refused by its size, XML with entities by what it declares."""
    plain = word(lambda document: document.add_paragraph("text"))
    bomb = rezipped(plain, "word/document.xml", b"\x20" * (257 << 20))
    assert len(bomb) < 1 << 20
    assert code_of(".docx", bomb) == "too_large"
    laughs = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>'
    assert code_of(".docx", rezipped(plain, "word/document.xml", laughs)) == "hostile"
    assert code_of(".docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)) == "encrypted"


@pytest.mark.parametrize("suffix", [".pdf", ".docx"])
def test_damaged_files_are_reported(suffix: str) -> None:
    whole = pdf("text") if suffix == ".pdf" else word(lambda d: d.add_paragraph("text"))
    for data in (b"", b"abc", whole[:20]):
        assert code_of(suffix, data) == "unreadable"


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["html", "pdf", "docx"]), st.binary(max_size=300), st.integers(0, 500))
def test_no_bytes_end_a_parser(kind: str, noise: bytes, at: int) -> None:
    """A file damaged anywhere gives a text or a reason."""
    whole = pdf("some text") if kind == "pdf" else b"<html><p>some text<table><tr><td>x"
    data = whole[:at] + noise + whole[at + len(noise) :]
    if kind == "html":
        data = data.decode("utf-8", "replace").encode()
    found = parse(kind, data)
    assert found.keys() in ({"text", "title"}, {"code", "message"})


def test_a_parser_that_takes_too_long_or_dies_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    program = tmp_path / "program.py"
    monkeypatch.setattr(document_parser, "__file__", str(program))
    program.write_text("while True: pass")
    monkeypatch.setattr(file_readers, "MAX_PARSE_SECONDS", 0.3)
    assert code_of(".pdf", b"") == "too_slow"
    monkeypatch.setattr(file_readers, "MAX_PARSE_SECONDS", 30.0)
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert code_of(".pdf", b"") == "unreadable"


def test_an_interrupt_of_the_terminal_leaves_the_parser_alone(tmp_path) -> None:
    """It reaches the whole group of the job, which goes on behind the document at hand."""
    parser, job = tmp_path / "parser.py", tmp_path / "job.py"
    parser.write_text(
        "import os, signal, sys\n"
        "if os.getpgrp() == int(os.environ['JOB']): os.killpg(os.getpgrp(), signal.SIGINT)\n"
        'print(\'{"text": "done", "title": ""}\')'
    )
    job.write_text(
        "import os, signal\n"
        "from chunkcache_retriever import document_parser, file_readers\n"
        "signal.signal(signal.SIGINT, lambda number, frame: None)\n"
        f"document_parser.__file__ = {str(parser)!r}\n"
        "os.environ['JOB'] = str(os.getpgrp())\n"
        "print(file_readers.file_kinds()['.pdf'].read(b'').text)"
    )
    done = subprocess.run(
        [sys.executable, job], capture_output=True, text=True, process_group=0, check=False
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_what_a_parser_complains_of_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "is_kept = os.fstat(2).st_rdev != os.stat(os.devnull).st_rdev\n"
        'print(\'{"text": "%s", "title": ""}\' % is_kept)'
    )
    monkeypatch.setattr(document_parser, "__file__", str(program))
    assert text_of(".pdf", b"") == "False"


def test_a_job_with_tighter_limits_reads_all_the_same() -> None:
    """A limit may be lowered, never raised."""
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_CPU: 60, resource.RLIMIT_AS: document_parser.MAX_MEMORY_BYTES // 2}

    def lower() -> None:
        for kind, bound in limits.items():
            resource.setrlimit(kind, (bound, bound))

    done = subprocess.run(
        [sys.executable, "-P", document_parser.__file__, "html"],
        input=b"<p>text",
        capture_output=True,
        preexec_fn=lower,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)["text"]) == (0, "text")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_is_read_as_it_is(encoding: str) -> None:
    assert read_text(GERMAN.encode(encoding)) == ReadText(GERMAN)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", GERMAN * 3),
        ("iso8859_7", GREEK * 3),
        (
            "shift_jis",
            "すべての人間は、生まれながらにして自由であり、尊厳と権利について平等である。" * 3,
        ),
    ],
)
def test_other_encodings_are_detected_and_said(encoding: str, text: str) -> None:
    found = read_text(text.encode(encoding))
    assert isinstance(found, ReadText)
    assert found.text == text
    assert found.metadata["source_encoding"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"caf\xe9", "invalid_encoding"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "binary"),
        (bytes(range(256)) * 40, "binary"),
    ],
)
def test_what_cannot_be_told_is_reported(data: bytes, code: str) -> None:
    found = read_text(data)
    assert isinstance(found, ReadFault)
    assert found.code == code


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1))
def test_no_unicode_text_is_changed(text: str) -> None:
    """Detection never gets hold of a text in UTF-8, whatever it looks like."""
    found = read_text(text.encode("utf-8"))
    if isinstance(found, ReadText):
        assert found.text == text.removeprefix("\ufeff")
    else:
        assert found.code in ("invalid_encoding", "binary")
        assert any(c in text for c in "\x01\x02\x03\x04\x05\x06")


def test_nuls_and_marks_follow_the_text_rules() -> None:
    assert canonical_text(text_of(".txt", b"\xef\xbb\xbfabc\x00def\r\n")) == "abcdef\n"
    assert canonical_text(text_of(".html", b"\xef\xbb\xbf<p>abc\x00def</p>")) == "abcdef"
