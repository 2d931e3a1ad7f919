"""Turns `[CONFIG.toml] [--table.key=value ...]` into a checked Config. The TOML overrides the
defaults, and the command line overrides both.

All mistakes are reported at once. Each is one line that names the option, where it was set, what
was found and what is allowed. Nothing is written and torch is not imported, so a mistake costs a
fraction of a second:

    python -m configs.load configs/llama_8b.toml --training.seq_len=4096 --world-size=64 --local-world-size=8

prints the resolved configuration, or the mistakes (exit code 2); `--quiet` prints the mistakes
only, `--mirror` the URL and the folder of a run that is mirrored. `run_train.sh` runs it before it
launches anything. `--help` lists the options that people set, `--help=all` every one, and
`--write-schema` writes `schema.json` for editors.
"""

import argparse
import contextlib
import json
import re
import signal
import sys
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tomli
from pydantic import ValidationError

from configs import dropped, hints, program, published, stages
from configs.check import broken_rules, derive
from configs.common import COMMON
from configs.schema import Config, Derived, InputError, redact
from configs.words import plural

HERE = Path(__file__).resolve().parent
MAX_BYTES = 1_000_000  # a configuration has a few kB; a larger file is something else
MAX_SHOWN = 50  # mistakes printed
COMMAND_LINE = "command line"
KEPT: dict[Path, bytes] = {}  # files that are not read again: see `keep_file`


def _plain(schema: Any, definitions: dict[str, dict]) -> Any:
    """Inline the definitions of a JSON schema at their references, and remove titles."""
    if isinstance(schema, list):
        return [_plain(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {
        keyword: _plain(part, definitions) for keyword, part in schema.items() if keyword != "title"
    }


# Everything below is derived from the schema. table -> its model; "table.key" -> its JSON schema:
# type, bounds, default and description.
TABLES = {table: field.annotation for table, field in Config.model_fields.items()}
OPTIONS: dict[str, dict] = {}
for _table, _model in TABLES.items():
    _schema = _model.model_json_schema()
    _options = _plain(_schema["properties"], _schema.get("$defs", {}))
    OPTIONS |= {f"{_table}.{key}": option for key, option in _options.items()}


class ConfigError(InputError):
    """Mistakes in a configuration; `problems` has one line for each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        count = f"{len(problems)} {plural(len(problems), 'mistake')}"
        lines = [
            f"{count} in the configuration:",
            *(f"  - {problem}" for problem in problems[:MAX_SHOWN]),
        ]
        if len(problems) > MAX_SHOWN:
            lines.append(f"  and {len(problems) - MAX_SHOWN} more")
        super().__init__("\n".join(lines))


def load_config(
    argv: list[str],
    world_size: int | None = None,
    local_world_size: int | None = None,
    typed: bool = False,
) -> Config:
    """Load the configuration of the run that `argv` describes. If it names no file,
    configs/llama_debug.toml is taken.

    With the number of processes (of the run, of this host) the rules of the mesh are checked too.
    An option that was not set and follows from others, such as training.local_batch_size, gets its
    number. Raises ConfigError.

    typed: whether a user typed these arguments, so that an option given twice is a mistake; a
    program may override earlier ones by later ones.
    """
    given, problems, doubtful = _given(argv)
    if typed:
        problems += _given_twice(argv)
    problems += _refused(given)
    given = {name: set_by for name, set_by in given.items() if name not in dropped.DROPPED}

    given |= published.family_of(given)
    sound = {}  # table -> its options that were given and are right
    for table in TABLES:
        sound[table], wrong, meant = _sound(table, given)
        problems += wrong
        doubtful |= meant

    cfg = Config.model_validate(sound)
    problems += broken_rules(_certain(cfg, doubtful), world_size, local_world_size)
    if not problems:
        problems = stages.sentences(cfg, broken_rules, world_size, local_world_size)
    if problems:
        raise ConfigError(problems)
    return derive(cfg, world_size)


def _given(argv: list[str]) -> tuple[dict[str, tuple[object, str]], list[str], set[str]]:
    """Collect what a file and the command line set: returns "table.key" -> (value, where it was
    set), the problems, and the options left in doubt."""
    path, overrides, problems, doubtful = _arguments(argv)
    given: dict[str, tuple[object, str]] = {}
    try:
        tables = read_toml(path)
    except ConfigError as error:
        # the content of the file is unknown, so no rule can be checked
        tables = {}
        doubtful = set(OPTIONS)
        problems += error.problems
    file_label = _printable(str(path))
    for table, options in tables.items():
        if table in TABLES and isinstance(options, dict):
            given |= {f"{table}.{key}": (value, file_label) for key, value in options.items()}
        else:
            problem, meant = _not_a_table(table, options)
            problems.append(f"{file_label}: {problem}")
            doubtful |= meant
    given |= {name: (value, COMMAND_LINE) for name, value in overrides.items()}
    return given, problems, doubtful


def _refused(given: dict[str, tuple[object, str]]) -> list[str]:
    """Return sentences about old options (configs/dropped.py) whose values would compute other
    numbers."""
    return [
        f"{where}: {name} = {_shown(value)}: no longer an option: {dropped.DROPPED[name].sentence}. "
        "Remove it"
        for name, (value, where) in _set_otherwise(given)
        if dropped.DROPPED[name].changes_numbers
    ]


def ignored(argv: list[str]) -> list[str]:
    """Return sentences about old options that a run goes on without, for its log."""
    return [
        f"{where}: {name} = {_shown(value)} is ignored, as it is no longer an option: "
        f"{dropped.DROPPED[name].sentence}"
        for name, (value, where) in _set_otherwise(_given(argv)[0])
        if not dropped.DROPPED[name].changes_numbers
    ]


def _set_otherwise(given: dict[str, tuple[object, str]]) -> list[tuple[str, tuple[object, str]]]:
    """Select old options that are set to other values than those that hold now."""
    return [
        (name, set_by)
        for name, set_by in given.items()
        if name in dropped.DROPPED and not dropped.holds(name, set_by[0])
    ]


def _sound(
    table: str, given: dict[str, tuple[object, str]]
) -> tuple[dict[str, object], list[str], set[str]]:
    """Validate a table: returns its options that are right, the problems of the others, and the
    options left in doubt. given: "table.key" -> (value, where it was set), of all tables."""
    values = {}
    for name, (value, _) in given.items():
        if name.startswith(table + "."):
            values[name.removeprefix(table + ".")] = value
    problems: list[str] = []
    doubtful: set[str] = set()
    wrong = _errors(TABLES[table], values)
    for key, error in wrong.items():
        name = f"{table}.{key}"
        if name in OPTIONS:
            expected = _expected(OPTIONS[name], values[key], error)
            problem = f"{name} = {_shown(values[key])}: {expected}"
            meant = {name}
        else:
            problem, meant = _no_such_option(name)
        problems.append(f"{given[name][1]}: {problem}")
        doubtful |= meant
    sound = {key: value for key, value in values.items() if key not in wrong}
    return sound, problems, doubtful


def table_of(table: str, values: dict[str, object]) -> Any:
    """Return a table of the configuration with the options of a tool's command line. Raises
    ConfigError with all that are wrong."""
    given = {f"{table}.{key}": (value, "command line") for key, value in values.items()}
    sound, problems, _ = _sound(table, given)
    if problems:
        raise ConfigError(problems)
    return TABLES[table](**sound)


def _certain(cfg: Config, doubtful: set[str]) -> SimpleNamespace:
    """Drop the options left in doubt from the configuration, since no rule can be checked on
    them."""
    certain = SimpleNamespace()
    for table, options in vars(cfg).items():
        known = {
            key: value for key, value in vars(options).items() if f"{table}.{key}" not in doubtful
        }
        setattr(certain, table, SimpleNamespace(**known))
    return certain


def as_given(argv: list[str]) -> tuple[Path, dict[str, object]]:
    """Split `argv` into the configuration file, or the default file, and the overrides by
    option."""
    return _arguments(argv)[:2]


class Once(argparse.Action):
    """Stores the value of a tool's option, and refuses a second one, which would replace it: the
    default action of a parser that has `register("action", None, Once)`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: Any
    ) -> None:
        if hasattr(self, "given"):
            option = self.option_strings[0]
            raise InputError(f"{option} is given twice: {self.given} and {values}; keep one")
        self.given = values
        setattr(namespace, self.dest, values)


def _given_twice(argv: list[str]) -> list[str]:
    """Return sentences about options that a command line sets more than once."""
    names = [word.removeprefix("--").partition("=")[0] for word in argv if word.startswith("--")]
    problems = []
    for name in dict.fromkeys(names):
        if name in OPTIONS and names.count(name) > 1:
            given = [word for word in argv if word.startswith(f"--{name}=")]
            values = [_shown(_arguments([word])[1][name]) for word in given]
            shown = f": {' and '.join(values)}" if len(values) > 1 else ""
            problems.append(
                f"{COMMAND_LINE}: --{name} is given {names.count(name)} times{shown}; keep one"
            )
    return problems


def _arguments(argv: list[str]) -> tuple[Path, dict[str, object], list[str], set[str]]:
    """Parse `argv`: returns the file, the overrides by option, the problems of the arguments, and
    the options left in doubt."""
    files: list[str] = []
    overrides: dict[str, object] = {}
    problems: list[str] = []
    doubtful: set[str] = set()
    remaining = list(argv)
    by_option = False  # whether a file was named as in other programs, which is a mistake already
    while remaining:
        argument = remaining.pop(0)
        if meant := hints.option(argument, OPTIONS):
            value = "".join(argument.partition("=")[1:])
            written = _printable(argument)
            problems.append(
                f"{COMMAND_LINE}: {written}: did you mean --{meant}{_printable(value)}?"
            )
            doubtful.add(meant)
            continue
        if hints.file_option(argument):
            file = argument.partition("=")[2]
            if not file and remaining:
                file = remaining.pop(0)
            problems.append(
                f"{COMMAND_LINE}: {_printable(argument)}: the configuration file is named without an "
                f"option: ./run_train.sh {_printable(file) or 'CONFIG.toml'}"
            )
            files += [file] if file else []
            by_option = True
            continue
        if not argument.startswith("-"):
            files.append(argument)
            continue
        name, equals, text = argument.removeprefix("--").partition("=")
        option = OPTIONS.get(name, {})
        if not equals:
            follows = bool(remaining) and not remaining[0].startswith("--")
            if option.get("type") == "boolean" and not (
                follows and remaining[0] in ("true", "false")
            ):
                text = "true"
            elif follows and (option or not remaining[0].endswith(".toml")):
                text = remaining.pop(0)
            elif option:
                problems.append(f"{COMMAND_LINE}: --{name} needs a value: {allowed(option)}")
                continue
        if hint := hints.quoted(name, text):
            problems.append(f"{COMMAND_LINE}: {_printable(argument)}: {_printable(hint)}")
            doubtful.add(name)
        elif name in dropped.DROPPED:
            overrides[name] = _toml_or_text(text or "true")
        elif option:
            overrides[name] = text if option.get("type") == "string" else _toml_or_text(text)
        else:
            problem, meant = _no_such_option(name) if "." in name else _not_a_table(name, text)
            problems.append(f"{COMMAND_LINE}: {problem}")
            doubtful |= meant
    if len(files) > 1 and not by_option:
        problems.append(
            f"{COMMAND_LINE}: one configuration file is allowed, found "
            f"{', '.join(map(_printable, files))}"
        )
    return Path(files[0]) if files else HERE / "llama_debug.toml", overrides, problems, doubtful


def _toml_or_text(text: str) -> object:
    try:
        parsed = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text  # not a TOML value: validation will say what is expected
    return parsed["value"] if len(parsed) == 1 else text


def keep_file(argv: list[str]) -> None:
    """Read the configuration's file for the last time in this process: a run that goes on without a
    restart (configs/rounds.py) takes no edits of it."""
    path, _ = as_given(argv)
    with contextlib.suppress(OSError, ValueError):  # `read_toml` says what is wrong
        KEPT[path] = content_of(path)


def content_of(path: Path) -> bytes:
    """Return the content of a configuration's file, as it was when it was kept, if it was: at most
    a byte more than is allowed. Raises OSError, ValueError."""
    if path in KEPT:
        return KEPT[path]
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def read_toml(path: Path) -> dict[str, object]:
    """Read the tables of a TOML file. A byte order mark, which some editors write, is skipped.
    Raises ConfigError."""
    label = _printable(str(path))
    try:
        if path not in KEPT and path.exists() and not path.is_file():
            raise ConfigError(
                [f"{label}: a {'folder' if path.is_dir() else 'special file'}; give a TOML file"]
            )
        content = content_of(path)
    except FileNotFoundError:
        if path.parts[0].endswith(":"):
            raise ConfigError([f"{label}: a URL; give a TOML file of this machine"]) from None
        known = [
            str(other)
            for folder in (path.parent, HERE)
            for other in sorted(folder.glob("*.toml"))
            if other.name != "pyproject.toml"
        ]
        near = get_close_matches(path.name, [Path(other).name for other in known], n=1)
        hints = [
            f"; did you mean {_printable(other)}?" for other in known if Path(other).name in near
        ]
        raise ConfigError([f"{label}: no such file{''.join(hints[:1])}"]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(
            [f"{label}: cannot be read: {getattr(error, 'strerror', None) or error}"]
        ) from None
    if len(content) > MAX_BYTES:
        raise ConfigError([f"{label}: larger than {MAX_BYTES:,} bytes, so not a configuration"])
    try:
        text = content.decode("utf-8-sig")
        tables = tomli.loads(text)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        byte = content[error.start]
        raise ConfigError(
            [f"{label}: line {line} is not UTF-8 (byte 0x{byte:02x}): save it as UTF-8"]
        ) from None
    except RecursionError:
        raise ConfigError(
            [f"{label}: nested too deeply; options are [table] and key = value"]
        ) from None
    except ValueError as error:
        raise ConfigError([f"{label}: not valid TOML: {_syntax_error(text, str(error))}"]) from None
    if not tables:
        raise ConfigError(
            [f"{label}: sets nothing; leave the argument out to run configs/llama_debug.toml"]
        )
    return tables


def _syntax_error(text: str, message: str) -> str:
    """Format the parser's message with the line that it means, and with plainer words for the
    commonest mistake."""
    lines = text.rstrip().split("\n")
    number = re.search(r"at line (\d+)", message)
    lines = lines[: int(number[1])] if number else lines
    message = message.replace("Cannot overwrite a value", "a key is given twice")
    message = message.replace("at end of document", f"at the end, line {len(lines)}")
    return f"{message}: {_shown(lines[-1].strip())}{hints.toml(message, lines[-1])}"


def _errors(model: type, values: dict[str, object]) -> dict[str, dict]:
    """Map keys to pydantic's error about them (the last one, if an option that allows several types
    has several errors)."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        return {details["loc"][0]: details for details in error.errors()}
    return {}


KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def _expected(option: dict, value: object, error: dict) -> str:
    """Describe the values that an option allows instead of `value`."""
    if len(error["loc"]) > 2 and "properties" in option.get("items", {}):
        return _expected_in_row(option["items"]["properties"], error)
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "string_unicode":
        return "must be UTF-8 text"
    values = [literal for literal in _literals(option) if isinstance(literal, str)]
    near = hints.value(value, values) if isinstance(value, str) else ""
    hint = f"; did you mean {_toml(near)}?" if near else ""
    if error["type"].endswith("_type") and len(error["loc"]) == 1:
        written = hints.written(option.get("type", ""), value)
        hint = f", not {KINDS.get(type(value), 'a date or time')}{written}"
    return f"must be {allowed(option)}{hint}"


def _expected_in_row(fields: dict[str, dict], error: dict) -> str:
    """Describe the values that one key allows in a table, in an option that is a list of tables."""
    row = error["loc"][1] + 1
    key = str(error["loc"][2])
    if error["type"] == "missing":
        return f"table {row} needs {key}, {allowed(fields[key])}"
    if key not in fields:
        near = get_close_matches(key.lower(), fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(fields)}"
        return f"table {row} has {_printable(key)}; {hint}"
    if error["type"] == "value_error":
        return f"{key} of table {row} {error['ctx']['error']}"
    return f"{key} of table {row} must be {allowed(fields[key])}"


def _no_such_option(name: str) -> tuple[str, set[str]]:
    """Describe the problem with "table.key", and suggest the options that may have been meant."""
    elsewhere = hints.elsewhere_named(name)
    table, _, key = name.lower().replace("-", "_").rpartition(".")
    siblings = [option.split(".")[1] for option in OPTIONS if option.startswith(table + ".")]
    parts = [sibling for sibling in siblings if len(key) > 2 and (key in sibling or sibling in key)]
    near = parts or get_close_matches(key, siblings, n=1, cutoff=0.75)
    meant = [f"{table}.{sibling}" for sibling in near]
    meant = meant or ([elsewhere] if elsewhere else [])
    meant = meant or ([] if siblings else get_close_matches(name, OPTIONS, n=1, cutoff=0.75))
    meant = meant or [option for option in OPTIONS if option.split(".")[1] == key]
    if meant:
        hint = f"did you mean {_either(meant)}?"
    elif siblings:
        hint = f"[{table}] has {', '.join(siblings)}"
    else:
        hint = f"the tables are {', '.join(TABLES)}"
    return f"{_printable(name)}: no such option; {hint}", set(meant)


def _not_a_table(name: str, value: object) -> tuple[str, set[str]]:
    """Describe the problem with another value in the place of a table, and suggest the options that
    may have been meant."""
    meant = [option for option in OPTIONS if option.split(".")[0] == name]
    if meant:
        return (
            f"{name} = {_shown(value)}: a table is needed, as in {meant[0]} = {_default(meant[0])}",
            set(meant),
        )
    meant = [option for option in OPTIONS if option.split(".")[1] == name.replace("-", "_")]
    if isinstance(value, dict):
        meant = []
    elif hints.elsewhere_named(name):
        return _no_such_option(name)
    if meant:
        return f"{name}: is outside of any table; did you mean {_either(meant)}?", set(meant)
    near = get_close_matches(name.lower().replace("-", "_"), TABLES, n=1)
    hint = f"did you mean [{near[0]}]?" if near else f"the tables are {', '.join(TABLES)}"
    kind = "table" if isinstance(value, dict) else "table or option"
    if isinstance(value, dict) and not near:
        hint = hints.of_table(name, value) or hint
    meant = {option for option in OPTIONS if option.split(".")[0] in near}
    return f"{_printable(name)}: no such {kind}; {hint}", meant


def _either(names: Iterable[str]) -> str:
    *others, last = names
    between = " or " if len(others) < 6 else ", "  # more would be wider than a line of --help
    return f"{between.join(others)} or {last}" if others else last


def _printable(text: str) -> str:
    """Escape and shorten a text so that it fits on one line."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 300 else text[:297] + "..."


def _shown(value: object) -> str:
    """Format a value as TOML would write it, on one line and not too long."""
    text = redact(_toml(value))
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 80 else text[:77] + "..."


def _literals(option: dict) -> list[object]:
    """Return the values that an option's JSON schema spells out."""
    if "anyOf" in option:
        return [value for alternative in option["anyOf"] for value in _literals(alternative)]
    return option.get("enum", [option["const"]] if "const" in option else [])


def allowed(option: dict) -> str:
    """Describe the values that an option's JSON schema allows: "an integer >= 1", '"adamw" or
    "sgd"'."""
    if "anyOf" in option:
        return _either(
            allowed(alternative)
            for alternative in option["anyOf"]
            if alternative.get("type") != "null"
        )
    if literals := _literals(option):
        if len(literals) > 8:  # on one line of --help
            return f"one of {', '.join(map(str, literals))}"
        return _either(map(_toml, literals))
    if option["type"] == "array":
        if "items" in option:
            return f"a list, each {allowed(option['items'])}"
        each = list(dict.fromkeys(map(allowed, option["prefixItems"])))
        if len(each) == 1:
            return f"a list of {option['minItems']}, each {each[0]}"
        return f"[{', '.join(each)}]"
    if option["type"] == "object":
        names = list(option["properties"])
        return f"a table of {', '.join(names[:6])}{', ...' * (len(names) > 6)}"
    if option["type"] == "boolean":
        return "true or false"
    if option["type"] == "string":
        low = option.get("minLength", 0)
        high = option.get("maxLength")
        if high:
            return f"text of {low} to {high} characters"
        return "text, not empty" if low else "text"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {_toml(option[word])}" for word, sign in signs.items() if word in option]
    kind = "an integer" if option["type"] == "integer" else "a finite number"
    return f"{kind} {' and '.join(bounds)}".strip()


def _toml(value: object) -> str:
    """Format a value in TOML. JSON strings are TOML strings, but for DEL, which TOML wants
    escaped."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
    return str(value)  # numbers: Python's text of a float is TOML, and reads back to the same float


def _default(name: str) -> str:
    default = OPTIONS[name]["default"]
    if default is None:
        return "(the flavor's)" if name.startswith("model.") else "(not set)"
    return _toml(default)


def dump(cfg: Config) -> str:
    """Write the configuration as TOML, which `load_config` reads back to an equal one. Options that
    are None are left out, and `Derived` numbers are comments: read for a different mesh, the file
    gives that mesh's numbers."""
    lines = []
    for table, options in vars(stages.whole(cfg)).items():
        lines.append(f"[{table}]")
        for key, value in options.model_dump(exclude_none=True).items():
            if isinstance(getattr(options, key), Derived):
                lines.append(f"# {key} = {value}  (not set: it follows from other options)")
            else:
                lines.append(f"{key} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def help_asked_for(argv: list[str]) -> str:
    """Return the list of options that a command line asks for: all of them after `--help=all`,
    those that people set after `--help`; "" where it does not."""
    if "--help=all" in argv:
        return help_text(OPTIONS)
    if "--help" in argv or "-h" in argv:
        rest = len(OPTIONS) - len(COMMON)
        return f"{help_text(COMMON)}\n\n--help=all lists {rest} further options."
    return ""


def help_text(names: Collection[str]) -> str:
    """List these options with their defaults, their allowed values and their lines of explanation,
    by table."""
    lines = [
        "./run_train.sh [CONFIG.toml] [--table.key=value ...]",
        "",
        "The options of a run, as the tables of a TOML file; on the command line as "
        "--table.key=value.",
        "Without a CONFIG.toml: configs/llama_debug.toml.",
    ]
    for table in TABLES:
        shown = [name for name in OPTIONS if name.startswith(f"{table}.") and name in names]
        lines += ["", f"[{table}]"] if shown else []
        for name in shown:
            default = f"  {name.split('.')[1]} = {_default(name)}"
            values = f"  {allowed(OPTIONS[name])}"
            lines.append(default.ljust(min(38, 120 - len(values))) + values)
            lines.append(f"      {OPTIONS[name]['description']}")
    return "\n".join(lines)


def json_schema() -> str:
    """Return the JSON schema of the TOML file, for editors (`#:schema schema.json` as a preset's
    first line).

    It has no references, and its dialect is draft 7, because the TOML editors know no later one. Each
    option is a line.
    """
    tables = []
    for table in TABLES:
        rows = []
        for name, option in OPTIONS.items():
            of, key = name.split(".")
            if of == table:
                rows.append(f'   "{key}": {json.dumps(option)}')
        properties = ",\n".join(rows)
        tables.append(
            f'  "{table}": {{\n   "type": "object", "additionalProperties": false, "properties": {{\n'
            f"{properties}\n  }}}}"
        )
    head = (
        '{\n "$schema": "http://json-schema.org/draft-07/schema#", "title": "A run of Plumbline",\n'
    )
    head += ' "type": "object", "additionalProperties": false, "properties": {\n'
    return head + ",\n".join(tables) + "\n }\n}\n"


def check_call(argv: list[str]) -> None:
    """Answer `train.py --help`, and mistakes in its call, before torch is imported, which takes
    seconds: end this process where there is an answer."""
    code = main([*argv, "--quiet", "--world-size=1", "--local-world-size=1"])
    if code or help_asked_for(argv):
        program.leave(code)


def main(argv: list[str]) -> int:
    """Run the command line that this file's first lines show. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m configs.load", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--write-schema", action="store_true")
    parser.add_argument("--mirror", action="store_true")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--local-world-size", type=int)
    flags, run_arguments = parser.parse_known_args(argv)
    if text := help_asked_for(argv):
        print(text)
        return 0
    if any(size is not None and size < 1 for size in (flags.world_size, flags.local_world_size)):
        parser.error("--world-size and --local-world-size are numbers of processes, at least 1")
    if flags.world_size and flags.local_world_size and flags.world_size % flags.local_world_size:
        parser.error(
            "--world-size is no multiple of --local-world-size, the number of processes on each host"
        )
    if flags.write_schema:
        (HERE / "schema.json").write_text(json_schema(), encoding="utf-8")
        return 0
    try:
        cfg = load_config(
            run_arguments, flags.world_size, flags.local_world_size, argv == sys.argv[1:]
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if flags.mirror:
        print(f"{cfg.run.mirror}\n{cfg.run.folder}" if cfg.run.mirror else "", end="")
    elif not flags.quiet:
        print(dump(cfg), end="")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
    program.run(main, sys.argv[1:])
