"""Suggest the option or value that a misspelt one was meant to be, for the error message."""

import math
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from configs import elsewhere

# a value's name in other programs -> the one here
ALIASES = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "bf16": "bfloat16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
    "off": "none",
    "no": "none",
}
DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"  # editors and chats turn -- into one of these
QUOTES = "\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u00ab\u00bb"
FILE_OPTIONS = ("config", "config-file", "config_file", "configfile", "cfg", "conf", "c")


def value(text: str, values: Collection[str]) -> str:
    """Find the one of `values` that is meant by `text`; "" where none is."""
    text = text.lower()
    alias = ALIASES.get(text, "")
    if alias in values:
        return alias
    return next(iter(get_close_matches(text, values, n=1)), "")


def flavor(text: str, flavors: Iterable[str]) -> str:
    """Find the flavor that is meant by `text`: the same letters, else the nearest size (8B for 7B),
    else similar letters; "" where none is."""
    by_letters = {name.lower(): name for name in flavors}
    if text.lower() in by_letters:
        return by_letters[text.lower()]
    billions = _billions(text)
    far = {}
    for name in by_letters.values():
        size = _billions(name)
        if billions and size:
            far[name] = abs(math.log(size / billions))
    nearest = min(far, key=far.__getitem__, default="")
    if nearest and far[nearest] < math.log(1.5):
        return nearest
    near = get_close_matches(text.lower(), by_letters, n=1)
    return by_letters[near[0]] if near else ""


def _billions(name: str) -> float:
    """Read a size: 7 of "7B", 0.6 of "600M", 30 of "30B-A3B"; 0 where it is no size."""
    found = re.match(r"(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower())
    if not found:
        return 0.0
    return float(found[1]) / (1000 if found[2] == "m" else 1)


def option(argument: str, names: Collection[str]) -> str:
    """Find the option of `names` that an argument sets which has no dashes, or others than two; ""
    where it sets none."""
    name = argument.lstrip(DASHES).partition("=")[0]
    two_dashes = argument.startswith("--") and argument[2:3] not in DASHES
    return name if name in names and not two_dashes else ""


def elsewhere_named(name: str) -> str:
    """Find the option that other programs give this name, with or without a table; "" where none
    is."""
    name = name.lstrip(DASHES).lower().replace("-", "_")
    known = elsewhere.OPTIONS
    return known.get(name) or known.get(name.rpartition(".")[2], "")


def of_table(table: str, keys: Iterable[str]) -> str:
    """Say which options are meant by the keys of a table that other programs have; "" where none
    is known."""
    pairs = [(key, elsewhere_named(f"{table}.{key}")) for key in keys]
    return ", ".join(f"write {option} for {key}" for key, option in pairs if option)


def written(kind: str, value: object) -> str:
    """Say how a value of another type is written for an option of this kind, a type of JSON's
    schema; "" where that is not known."""
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return f"; write {value:.0f}"
    if kind == "boolean" and str(value).lower() in ("true", "false"):
        return f"; write {str(value).lower()}"
    return ""


def quoted(name: str, text: str) -> str:
    """Say what helps where the value of an option is in typographic quotes; "" where it is not."""
    if text[:1] not in tuple(QUOTES):
        return ""
    return f"these are typographic quotes: write --{name}={text.strip(QUOTES)}"


def file_option(argument: str) -> bool:
    """Say whether an argument is the option by which other programs are given a configuration."""
    name = argument.partition("=")[0]
    return name.startswith("-") and name.lstrip(DASHES).lower() in FILE_OPTIONS


def toml(message: str, line: str) -> str:
    """Say what helps against a mistake of syntax. message: the parser's; line: the one it means."""
    if set(QUOTES) & set(line):
        return '; these are typographic quotes: write " instead'
    if "Cannot declare" in message:
        return "; a table stands once: put its options together"
    word = re.fullmatch(r"\s*([\w.-]+)\s*=\s*([A-Za-z][\w./-]*)\s*", line)
    if word and "Invalid value" in message:
        hint = f'"{word[2]}"'
        if word[2].lower() in ("true", "false"):
            hint = word[2].lower()
        return f"; write {word[1]} = {hint}"
    return ""
