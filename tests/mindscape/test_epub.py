"""EPUB books, written here by hand as the format says."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import epub
from mia_serve.mindscape.epub import read_epub

CONTAINER = """<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
OPF = """<?xml version="1.0" encoding="utf-8"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:opf="http://www.idpf.org/2007/opf">
<dc:title>The  Lamp
 House</dc:title><dc:creator id="a">Ada Reave</dc:creator><dc:creator id="b">Ian Ink</dc:creator>
<dc:creator opf:role="trl">Tom Pell</dc:creator><meta refines="#b" property="role">ill</meta></metadata>
<manifest><item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="two" href="text/two.xhtml" media-type="application/xhtml+xml"/>
<item id="one" href="text/one%20a.xhtml#top" media-type="application/xhtml+xml"/>
<item id="map" href="map.svg" media-type="image/svg+xml"/>
<item id="aside" href="aside.xhtml" media-type="application/xhtml+xml"/></manifest>
<spine><itemref idref="nav"/><itemref idref="one"/><itemref idref="map"/><itemref idref="aside" linear="no"/>
<itemref idref="two"/></spine></package>"""
ONE = """<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml"><head>
<title/><style>p { color: red }</style><script src="x.js"/></head><body><h1>Chapter&#160;I</h1>
<p>The lamp was <i>out</i>.
   Nobody   asked &mdash; why?</p><p>A song:<br/>one line<br/>another</p>
<div>Loose text<p>inside</p></div><pre>kept
as it is</pre><p><ruby>灯<rt>dēng</rt></ruby>塔</p><p> </p></body></html>"""


def write(path: Path, parts: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def parts() -> dict[str, str | bytes]:
    two = "<html><body><p>第二章。</p></body></html>".encode("utf-16")
    return {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/book.opf": OPF,
        "OEBPS/nav.xhtml": "<html><body><nav><ol><li>Contents</li></ol></nav></body></html>",
        "OEBPS/text/one a.xhtml": ONE,
        "OEBPS/text/two.xhtml": two,
        "OEBPS/aside.xhtml": "<html><body><p>Aside.</p></body></html>",
    }


def test_the_spines_order_paragraphs_and_metadata(parts, tmp_path):
    title, author, text = read_epub(write(tmp_path / "x.epub", parts))
    assert (title, author) == ("The Lamp House", "Ada Reave")
    assert text.split("\n\n") == [
        "Chapter\u00a0I",
        "The lamp was out. Nobody asked — why?",
        "A song:\none line\nanother",
        "Loose text",
        "inside",
        "kept\nas it is",
        "灯塔",
        "第二章。",
    ]


def test_markup_that_is_not_well_formed_is_read(parts, tmp_path):
    parts["OEBPS/text/one a.xhtml"] = "<html><head><title>T<body><p>One & <b>two</p><p>three<br>four"
    text = read_epub(write(tmp_path / "x.epub", parts)).text
    assert text.startswith("One & two\n\nthree\nfour\n\n第二章")


def test_obfuscated_fonts_are_no_drm(parts, tmp_path):
    reference = (
        '<encryption><EncryptedData><CipherData><CipherReference URI="{}"/></CipherData></EncryptedData></encryption>'
    )
    parts["META-INF/encryption.xml"] = reference.format("OEBPS/font.otf")
    assert "灯塔" in read_epub(write(tmp_path / "x.epub", parts)).text
    parts["META-INF/encryption.xml"] = reference.format("OEBPS/text/one%20a.xhtml")
    with pytest.raises(MiaError, match=r"is encrypted \(DRM\)"):
        read_epub(write(tmp_path / "x.epub", parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"META-INF/container.xml": None}, "zip file but no EPUB"),
        ({"META-INF/container.xml": "<container/>"}, "names no package document"),
        ({"OEBPS/book.opf": None}, r"lacks its part 'OEBPS/book\.opf'"),
        ({"OEBPS/book.opf": "<package"}, r"part 'OEBPS/book\.opf' is not XML"),
        ({"OEBPS/book.opf": OPF.replace('id="two"', 'id="2"')}, "spine names 'two', which its manifest lacks"),
        ({"OEBPS/text/two.xhtml": None}, r"lacks its part 'OEBPS/text/two\.xhtml'"),
        ({"OEBPS/text/two.xhtml": "<p/>", "OEBPS/text/one a.xhtml": "<img/>"}, "holds no text"),
    ],
)
def test_broken_books_say_what_is_wrong(parts, tmp_path, change, message):
    content = {name: text for name, text in (parts | change).items() if text is not None}
    with pytest.raises(MiaError, match=message) as caught:
        read_epub(write(tmp_path / "x.epub", content))
    assert "x.epub" in str(caught.value)


def test_other_files_cut_files_and_bombs_are_refused(parts, tmp_path, monkeypatch):
    (tmp_path / "x.epub").write_bytes(b"no zip")
    with pytest.raises(MiaError, match="is no EPUB, or was cut off"):
        read_epub(tmp_path / "x.epub")
    whole = write(tmp_path / "x.epub", parts).read_bytes()
    (tmp_path / "x.epub").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MiaError, match="is no EPUB, or was cut off"):
        read_epub(tmp_path / "x.epub")
    for name in ("MOST_PART", "MOST_BOOK"):
        monkeypatch.setattr(epub, name, 100)
        with pytest.raises(MiaError, match=r"(which|that) no book needs"):
            read_epub(write(tmp_path / "x.epub", parts))
        monkeypatch.undo()


def test_entities_that_grow_without_end_are_refused(parts, tmp_path):
    lol = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 20}">' for i in range(1, 12))
    parts["OEBPS/book.opf"] = f'<?xml version="1.0"?><!DOCTYPE p [<!ENTITY l0 "lol">{lol}]><package>&l11;</package>'
    with pytest.raises(MiaError, match="is not XML"):
        read_epub(write(tmp_path / "x.epub", parts))


def test_whatever_is_broken_inside_is_said_of_the_file(parts, tmp_path):
    path = tmp_path / "x.epub"
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
            start = archive.getinfo("OEBPS/book.opf").header_offset
        content = bytearray(path.read_bytes())
        for i in range(start + 60, start + 90):
            content[i] ^= 0x5A
        path.write_bytes(content)
        with pytest.raises(MiaError, match="is no EPUB, or was cut off"):
            read_epub(path)
