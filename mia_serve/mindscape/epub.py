"""The text of an EPUB book, by the standard library alone: zip, package document, XHTML (EPUB 3.3, W3C)."""

from __future__ import annotations

import lzma
import posixpath
import re
import zipfile
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from mia_serve.core.errors import MiaError

#: Bytes of one part, and of all parts of a book, once unpacked. The longest novels have about 20 MB of markup.
MOST_PART, MOST_BOOK = 64 << 20, 256 << 20

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_XHTML = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
_BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "body", "caption", "dd", "div", "dl", "dt", "fieldset"),
        *("figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main"),
        *("nav", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"),
    )
)
# Annotations over characters would stand in the middle of words.
_UNREAD = frozenset(("head", "math", "rp", "rt", "script", "style", "svg", "template", "title"))
_DECLARED = re.compile(rb"""<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w.-]+)["']""")
_INLINE_SPACE = re.compile(r"[^\S\n\u00a0\u3000]*\n[^\S\n\u00a0\u3000]*|[^\S\n\u00a0\u3000]+")


class EpubText(NamedTuple):
    """What is read of an EPUB: title and author as its metadata gives them (`""` for none), and the whole text."""

    title: str
    author: str
    text: str


def read_epub(path: Path) -> EpubText:
    """Read the text of an EPUB in reading order, paragraphs parted by blank lines.

    The order is the spine's; its navigation document, parts marked ``linear="no"``, scripts, pictures and ruby
    annotations are left out.

    Raises:
        MiaError: The file is no EPUB, is broken or encrypted, holds no text, or unpacks to a senseless size.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise MiaError(f"{path} is no EPUB, or was cut off ({error}); get the file again") from None


def _read(archive: zipfile.ZipFile, path: Path) -> EpubText:
    if sum(item.file_size for item in archive.infolist()) > MOST_BOOK:
        raise MiaError(f"{path} unpacks to over {MOST_BOOK >> 20} MiB, which no book needs; remove it")
    parts = _Parts(archive, path)
    package = parts.package_path()
    opf = parts.xml(package)
    base = posixpath.dirname(package)
    items = {item.get("id", ""): item for item in _all(opf, "manifest", "item")}
    hidden = parts.encrypted()
    texts = []
    for reference in _all(opf, "spine", "itemref"):
        item = items.get(reference.get("idref", ""))
        if item is None:
            raise MiaError(f"{path} is broken: its spine names {reference.get('idref')!r}, which its manifest lacks")
        if reference.get("linear") == "no" or "nav" in item.get("properties", "").split():
            continue
        if item.get("media-type", _XHTML[0]) not in _XHTML:
            continue  # a picture as a page
        name = posixpath.normpath(posixpath.join(base, unquote(urlsplit(item.get("href", "")).path)))
        if name in hidden:
            raise MiaError(f"{path} is encrypted (DRM): its text cannot be read; give a file without")
        texts.append(_text_of(parts.read(name)))
    text = "\n\n".join(text for text in texts if text)
    if not text.strip():
        raise MiaError(f"{path} holds no text (pictures of pages?); give another edition, or remove it")
    return EpubText(_first_title(opf), _authors(opf), text)


class _Parts:
    """The files in an EPUB, read with bounds."""

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self.archive, self.path, self.left = archive, path, MOST_BOOK

    def read(self, name: str) -> bytes:
        try:
            info = self.archive.getinfo(name)
        except KeyError:
            raise MiaError(f"{self.path} is broken: it lacks its part {name!r}; get the file again") from None
        if info.flag_bits & 1:
            raise MiaError(f"{self.path} is encrypted: its text cannot be read; give a file without a password")
        with self.archive.open(info) as part:  # what the directory says of sizes may be a lie
            content = part.read(min(MOST_PART, self.left) + 1)
        self.left -= len(content)
        if len(content) > MOST_PART or self.left < 0:
            raise MiaError(f"{self.path}: its part {name!r} unpacks to a size that no book needs; remove the file")
        return content

    def xml(self, name: str) -> ElementTree.Element:
        try:
            return ElementTree.fromstring(self.read(name))
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            raise MiaError(f"{self.path} is broken: its part {name!r} is not XML ({error})") from None

    def package_path(self) -> str:
        if _CONTAINER not in self.archive.namelist():
            raise MiaError(f"{self.path} is a zip file but no EPUB: it lacks {_CONTAINER}")
        names = [root.get("full-path", "") for root in _all(self.xml(_CONTAINER), "rootfiles", "rootfile")]
        if not names or not names[0]:
            raise MiaError(f"{self.path} is broken: its {_CONTAINER} names no package document")
        return names[0]

    def encrypted(self) -> set[str]:
        """Names of the encrypted parts; fonts often are, in books that can be read."""
        if _ENCRYPTION not in self.archive.namelist():
            return set()
        found = [e.get("URI", "") for e in self.xml(_ENCRYPTION).iter() if _local(e) == "CipherReference"]
        return {posixpath.normpath(unquote(name)) for name in found}


class _Text(HTMLParser):
    """Collects paragraphs. An HTML parser, because many books' XHTML is not well-formed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._pieces: list[str] = []
        self._unread: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        tag = tag.rpartition(":")[2]
        if tag == "body":
            self._unread.clear()  # of a head that was never closed
        if tag in _UNREAD:
            self._unread.append(tag)
        elif tag in _BLOCKS:
            self.end_paragraph()
            self._pre += tag == "pre"
        elif tag == "br":
            self._pieces.append("\x00")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # <title/>, <script src=""/> and the like hold nothing.
        if tag.rpartition(":")[2] not in _UNREAD:
            self.handle_starttag(tag, attrs)
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        tag = tag.rpartition(":")[2]
        if tag in self._unread:
            while self._unread.pop() != tag:
                pass
        elif tag in _BLOCKS:
            self.end_paragraph()
            self._pre -= tag == "pre" and self._pre > 0

    def handle_data(self, data: str) -> None:
        if not self._unread:
            self._pieces.append(data.replace("\x00", "").replace("\n", "\x00") if self._pre else data)

    def end_paragraph(self) -> None:
        """Close the paragraph; line breaks that were asked for survive, those of the markup do not."""
        text = _INLINE_SPACE.sub(" ", "".join(self._pieces))
        self._pieces = []
        lines = [line.strip(" ") for line in text.split("\x00")]
        paragraph = "\n".join(lines).strip()
        if paragraph:
            self.paragraphs.append(paragraph)


def _text_of(content: bytes) -> str:
    parser = _Text()
    parser.feed(_decoded(content))
    parser.close()
    parser.end_paragraph()
    return "\n\n".join(parser.paragraphs)


def _decoded(content: bytes) -> str:
    """Decode by byte order mark or XML declaration, else as UTF-8."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", "replace")
    declared = _DECLARED.match(content)
    try:
        return content.decode(declared[1].decode() if declared else "utf-8-sig", "replace").lstrip("\ufeff")
    except LookupError:
        return content.decode("utf-8", "replace")


def _first_title(opf: ElementTree.Element) -> str:
    return next((" ".join((e.text or "").split()) for e in opf.iter() if _local(e) == "title" and e.text), "")


def _authors(opf: ElementTree.Element) -> str:
    """The creators that are authors: in EPUB 2 by an attribute, in EPUB 3 by a `meta` that refines them."""
    roles = {
        e.get("refines", "").removeprefix("#"): (e.text or "").strip()
        for e in opf.iter()
        if _local(e) == "meta" and e.get("property") == "role"
    }
    names = []
    for e in opf.iter():
        if _local(e) == "creator" and (e.text or "").strip():
            by_attribute = next((value for key, value in e.attrib.items() if key.rpartition("}")[2] == "role"), "aut")
            if roles.get(e.get("id", ""), by_attribute) == "aut":
                names.append(" ".join((e.text or "").split()))
    return " and ".join(names)


def _all(root: ElementTree.Element, parent: str, child: str) -> list[ElementTree.Element]:
    """Children by local name: the namespaces differ between versions of the format."""
    return [e for outer in root.iter() if _local(outer) == parent for e in outer if _local(e) == child]


def _local(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
