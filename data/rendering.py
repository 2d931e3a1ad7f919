"""Renders chat templates in a child process that may be killed.

A template is a program in Jinja that came with a tokenizer, which has not been reviewed. jinja2's
sandbox keeps it from Python's internals. It does not keep it from loops that never end, from
strings of a terabyte, or from nesting at which Python's compiler gives up or crashes. So templates
run in a child process with a limit of processor time and one of memory, and any failure becomes an
error message. Time is that of the processor, which a busy machine does not use up.

It is the environment that transformers documents for chat templates: blocks are trimmed, `break`
and `continue` work, `tojson` does not escape HTML, `raise_exception` raises. It lacks everything
whose result changes between calls (`strftime_now`, `random`, `lipsum`, the addresses of objects),
since the tokens of a corpus must not change.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs import program
from configs.words import a_kind

ROOT = Path(__file__).parents[1]
SECONDS = 5.0  # of the processor, for one rendering; the published templates need less than 0.01
MEMORY = 1 << 30  # bytes of address space of the child
# An answer begins and ends with these while a template is rendered. Unicode will never assign them.
BEGIN, END = "\ufdd0", "\ufdd1"
PRINTED = (str, int, float, list, tuple, dict, jinja2.Undefined)


class Unrendered(ValueError):
    """A template that cannot be compiled or rendered; the message says why."""


class Renderer:
    """The child process. It starts at the first request, and again after it was killed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None

    def ask(self, source: str, requests: list[dict | None]) -> list[dict]:
        """Send requests, from any thread, and return one `reply` for each."""
        with self.lock:
            child = self._started()
            replies = []
            with suppress(BrokenPipeError):
                child.stdin.write(json.dumps([source, requests, SECONDS]) + "\n")
                child.stdin.flush()
                for _ in requests:
                    line = child.stdout.readline()
                    if not line.endswith("\n"):
                        break
                    replies.append(json.loads(line))
            if len(replies) < len(requests):
                error = {"error": self._why_it_ended()}
                replies += [error] * (len(requests) - len(replies))
            return replies

    def _started(self) -> subprocess.Popen:
        if self.child is None or self.child.poll() is not None:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "data.rendering"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="ascii",
            )
        return self.child

    def _why_it_ended(self) -> str:
        child, self.child = self.child, None
        with suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        code = child.wait()
        if code == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} s of processor time"
        cause = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        return f"it ends the process that renders it ({cause})"


@functools.lru_cache(maxsize=1)
def _renderer(process: int) -> Renderer:
    """Return the renderer of this process: a fork gets another, as pipes cannot be shared."""
    return Renderer()


def variables(source: str) -> set[str]:
    """List the names that a template reads. Raises Unrendered if it is not valid."""
    [reply] = _renderer(os.getpid()).ask(source, [None])
    return set(_content(reply, "reads"))


def render(source: str, requests: list[dict]) -> list[str | Unrendered]:
    """Render a template with each set of variables: its text, or why there is none."""
    texts: list[str | Unrendered] = []
    for reply in _renderer(os.getpid()).ask(source, requests):
        try:
            texts.append(_content(reply, "text"))
        except Unrendered as error:
            texts.append(error)
    return texts


def _content(reply: dict, name: str) -> Any:
    if "error" in reply:
        raise Unrendered(reply["error"])
    return reply[name]


# --------------------------------------------------------------------------------------------------
# in the child


class Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`: renders its content between BEGIN and
    END."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (BEGIN, END)
        )
        return [begin, *body, end]


class Names(jinja2.utils.Namespace):
    """`namespace()` without the names through which a template could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            refuse_internal(name)
        jinja2.utils.Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_internal(name)
        super().__setitem__(name, value)


def refuse_internal(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")


def environment() -> ImmutableSandboxedEnvironment:
    """Build the sandboxed jinja2 environment of the templates, with the settings and functions that
    https://huggingface.co/docs/transformers/chat_templating_writing names."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        finalize=_printed,
    )
    made.filters["tojson"] = _to_json
    del made.filters["random"]
    del made.globals["lipsum"]
    made.globals["raise_exception"] = _raise
    made.globals["namespace"] = Names
    return made


def _printed(value: Any) -> Any:
    if value is None:
        raise jinja2.TemplateError("it prints None, which nothing says")
    if not isinstance(value, PRINTED):
        raise jinja2.TemplateError(f"it prints {a_kind(value)}, which is no text")
    return value


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def reply(source: str, request: dict | None) -> dict:
    """Answer a request. request: the variables of a rendering, answered with `text`; or None,
    answered with `reads`, the names of all variables that the template reads. Failures are answered
    with `error`."""
    try:
        template = _compiled(source)
        if request is None:
            tree = environment().parse(source)
            return {"reads": sorted(jinja2.meta.find_undeclared_variables(tree))}
        return {"text": template.render(request)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY / 1e9:.1f} GB of memory"}
    except RecursionError:
        return {"error": "it is nested, or calls itself, too deeply"}
    except Exception as error:  # a template may do anything that fails
        return {"error": f"{error!s:.200}" or repr(error)}


def main() -> int:
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        source, requests, seconds = json.loads(line)
        for request in requests:
            # its default is to end the process, also inside a long computation
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                answer = json.dumps(reply(source, request))
            except MemoryError:
                answer = json.dumps({"error": "its text does not fit into memory"})
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(answer, flush=True)
    return 0


if __name__ == "__main__":
    program.run(main)
