"""Lists S3 objects without those whose names obstore cannot read.

obstore (the Rust object_store) reads no name with an empty segment (`a//b`), with `.` or `..` as a
segment, or with a control character, and one of them makes every listing of its prefix fail. Such
names come from other programs, or from a slip in a shell. So where that happens the pages are
requested here: obstore signs the URL with its credentials, and the standard library fetches it
(ListObjectsV2 of the Amazon S3 API reference). Objects that are left out are logged.

A URL is signed for an object below an endpoint. Here the endpoint ends in the query up to
`prefix=`, and the object's name, after its slash, is empty.
"""

import datetime
import functools
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree

SECONDS = 60.0  # that one page may take
logger = logging.getLogger("plumbline")


def is_readable(name: str) -> bool:
    """Return whether obstore reads a name: its rules for a path."""
    if re.search(r"[\x00-\x1f\x7f]", name):
        return False
    return not any(part in ("", ".", "..") for part in name.strip("/").split("/"))


def rows(store: Any, path: str) -> list[dict]:
    """List the objects below a prefix, as `obstore.list` does. Raises OSError, and obstore's error
    where the store is not S3."""
    found = []
    for page in _pages(store, path, ""):
        for element in page.iterfind("{*}Contents"):
            name = _text(element, "Key")
            if not is_readable(name):
                _say_left_out(name)
                continue
            when = _text(element, "LastModified").replace("Z", "+00:00")
            found.append(
                {
                    "path": name.rstrip("/"),
                    "size": int(_text(element, "Size")),
                    "e_tag": _text(element, "ETag") or None,
                    "last_modified": datetime.datetime.fromisoformat(when),
                }
            )
    return found


def folders(store: Any, path: str) -> list[str]:
    """List the prefixes that names below have in common up to their next slash. Raises as `rows`
    does."""
    found = []
    for page in _pages(store, path, "/"):
        for element in page.iterfind("{*}CommonPrefixes"):
            name = _text(element, "Prefix")
            if is_readable(name) and name.strip("/") != path:
                found.append(name)
            else:
                _say_left_out(name)
    return found


def _text(element: ElementTree.Element, tag: str) -> str:
    """Decode a value of an answer. Names come as in an address, because XML has no control
    characters."""
    value = element.findtext(f"{{*}}{tag}", "")
    return unquote_plus(value) if tag in ("Key", "Prefix") else value


@functools.cache
def _say_left_out(name: str) -> None:
    """Warn of an object that is ignored, once in a process."""
    logger.warning(
        f"the object {name!r} is left alone: a name with an empty segment, with `.`, `..` or a control "
        "character cannot be read here"
    )


def _pages(store: Any, path: str, delimiter: str) -> Iterator[ElementTree.Element]:
    query = f"list-type=2&encoding-type=url&delimiter={quote(delimiter, '')}"
    token = ""
    while True:
        from_here = f"&continuation-token={quote(token, '')}" if token else ""
        url = _signed(store, query + from_here, path)
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                page = ElementTree.fromstring(answer.read())
        except urllib.error.URLError as error:  # the address holds a signature
            raise OSError(f"a listing failed: {error.reason}") from None
        except ElementTree.ParseError as error:
            raise OSError(f"a listing is damaged: {error}") from None
        yield page
        before, token = token, page.findtext("{*}NextContinuationToken", "")
        if token in ("", before):
            return


def _signed(store: Any, query: str, path: str) -> str:
    """Sign the address of a page, which may be fetched in the next minute."""
    import obstore
    from obstore.store import S3Store

    a_minute = datetime.timedelta(seconds=SECONDS)
    if not isinstance(store, S3Store):
        obstore.list_with_delimiter(store, path)  # raises what brought us here
    bucket = obstore.sign(store, "GET", "x", a_minute).partition("?")[0].removesuffix("/x")
    # a parameter without a meaning takes the slash where there is no prefix
    last = f"prefix={quote(path, '/')}" if path else "x-id="
    pages = S3Store(
        store.config.get("bucket", ""),
        endpoint=f"{bucket}?{query}&{last}",
        virtual_hosted_style_request=True,
        client_options={"allow_http": bucket.startswith("http://")},
    )
    return obstore.sign(pages, "GET", "", a_minute)
