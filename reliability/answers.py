"""Says what an answer of an object store means, which store was asked, and which does not answer."""

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

from configs.schema import redact

SILENT = 2.5  # seconds that the first answer of a bucket may take before it is said what is awaited
# Where the machines of a cloud find their credentials: of AWS, of its containers, of Google.
CREDENTIALS = re.compile(
    r"https?://(169\.254\.169\.254|169\.254\.170\.2|\[fd00:ec2::254\]|metadata(\.google\.internal)?)[:/]"
)
# the variables that name an endpoint, as obstore reads them; and where there is none
ENDPOINTS = {
    "s3": (
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "Amazon's, as AWS_ENDPOINT_URL is not set",
    ),
    "gs": ((), "Google's"),
    "az": (("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"), "Azure's"),
}
# S3's code of an error -> what it means for the one who starts a run
CODES = {
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "SignatureDoesNotMatch": "the secret key in the environment is another's",
    "InvalidAccessKeyId": "the access key in the environment is not known there",
    "ExpiredToken": "the credentials in the environment have expired",
    "PermanentRedirect": "the bucket is in another region than AWS_REGION says",
    "AuthorizationHeaderMalformed": "the bucket is in another region than AWS_REGION says",
}
NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
FINAL = (301, 401, 403)  # statuses: the same request gets the same answer
HEARD: set[str] = set()  # buckets that have answered this process
logger = logging.getLogger("plumbline")


def endpoint(scheme: str) -> str:
    """Name the server of a store, and where its address comes from. Without a password."""
    names, default = ENDPOINTS[scheme]
    for name in names:
        if value := os.environ.get(name):
            address = urlsplit(value)
            host = address.netloc.rpartition("@")[2]
            return f"{address.scheme}://{redact(host)} ({name})"
    return default


def cause(error: Exception) -> str:
    """Summarise an error of obstore in a few words. Its text quotes requests, and so might hold a
    signature."""
    text = str(error).partition("\n\nDebug source")[0]
    if CREDENTIALS.search(text):
        return "there are no credentials in the environment"
    if "ETag" in text and "missing" in text:
        return "the store gives no ETag, without which a lease cannot be kept"
    if "builder error" in text:
        return "an endpoint of http:// needs AWS_ALLOW_HTTP=true in the environment"
    if "redirect without LOCATION" in text:
        return f"HTTP 301: {CODES['PermanentRedirect']} ({os.environ.get('AWS_REGION', 'not set')})"
    if status := status_of(text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        meaning = f": {CODES[code[1]]}" if code and code[1] in CODES else ""
        return f"HTTP {status} {code[1]}{meaning}" if code else f"HTTP {status}"
    if "error sending request" in text or "timed out" in text or "error decoding" in text:
        return "no connection, or no answer"
    line = re.sub(r"\?[^\s\"']*", "", " ".join(text.split()))
    return redact(line)[:300]


def status_of(text: str) -> int:
    """Find the HTTP status in the text of an error of obstore or urllib; 0 if there is none."""
    status = re.search(r"(?:status code:|HTTP Error) (\d+)", text)
    return int(status[1]) if status else 0


def is_final(error: Exception) -> bool:
    """Return whether to ask again would get the same answer."""
    text = str(error)
    return status_of(text) in FINAL or "redirect without LOCATION" in text or no_bucket(error)


def no_bucket(error: Exception) -> bool:
    """Return whether an error says that there is no such bucket."""
    return bool(NO_BUCKET.search(str(error)))


@contextlib.contextmanager
def awaited(bucket: str) -> Iterator[None]:
    """Say for what this process waits, once, if a bucket's first answer takes long. bucket: its
    URL."""
    if bucket in HEARD:
        yield
        return
    timer = threading.Timer(SILENT, _say_awaited, [bucket])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _say_awaited(bucket: str) -> None:
    where = endpoint(bucket.partition(":")[0])
    logger.warning(f"{bucket} has not answered yet; the endpoint is {where}")
