"""Finds the family and the sizes of a Hugging Face config.json. `model.flavor` may name a folder
with one instead of a row of a table; only such a configuration imports torch, with the family."""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import InputError
from models import FORMATS


def described(
    config: dict[str, Any], families: Mapping[str, Any], unnamed: str | None = None
) -> tuple[str, Any]:
    """Return the name of the family, and its Args; what the fields do not say has the default of
    transformers' class.

    families: Formats by name. unnamed: the family of a file that has no model_type, the first one if
    not given. Raises ValueError, with the reason, for a model of none of these families, or with
    parts that ours does not have.
    """
    by_type = {kind: name for name, family in families.items() for kind in family.hf_types}
    kind = config.get("model_type")
    if kind is None:
        name = unnamed or next(iter(families))
    elif isinstance(kind, str) and kind in by_type:
        name = by_type[kind]
    else:
        known = " and ".join(json.dumps(known) for known in by_type)
        raise ValueError(f"model_type is {json.dumps(kind)}, only {known} can be converted")
    family = families[name]
    if kind in family.hf_nested:
        config = _text_fields(config)
    for key, value in family.hf_fixed.items():
        stored = config.get(key)
        if stored is not None and stored != value:
            raise ValueError(
                f"{key} is {json.dumps(stored)}, only {json.dumps(value)} can be converted"
            )
    try:
        return name, family.args_from_hf(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        kinds = " or ".join(family.hf_types)
        raise ValueError(
            f"it is not the configuration of a model of type {kinds}: {what}"
        ) from None


def _text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model in the config.json of a model that sees more than text.
    Raises ValueError."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError("text_config, the fields of the text model, is missing")
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings")}
    return {key: value for key, value in tied.items() if value is not None} | text


# Folders as flavors ----------------------------------------------------------------------------------


def is_folder(flavor: object) -> bool:
    """Return whether a value of `model.flavor` names a folder with a config.json."""
    return isinstance(flavor, str) and "\0" not in flavor and Path(flavor, "config.json").is_file()


@functools.cache
def read(folder: str) -> tuple[str, dict[str, Any]]:
    """Return the family of a folder's model, and the numbers of its Args. Raises InputError."""
    path = Path(folder, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        family, args = described(config, FORMATS)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f'model.flavor = "{folder}": {path}: {error}') from None
    numbers = asdict(args)
    if "mtp_depth" in numbers:
        numbers["mtp_depth"] = 0  # transformers counts these layers and drops them: an option asks
    return family, numbers


def numbers(family: str, folder: str) -> dict[str, Any]:
    """Return the numbers of a folder's model, which must be of this family. Raises InputError."""
    found, its_numbers = read(folder)
    if found != family:
        raise InputError(
            f'model.flavor = "{folder}": its config.json describes a model of the family "{found}", '
            f'and model.family is "{family}": remove model.family, or set it to "{found}"'
        )
    return dict(its_numbers)


def family_of(given: dict[str, tuple[object, str]]) -> dict[str, tuple[object, str]]:
    """Return the family that follows from a folder, where a configuration names a folder and no
    family. given: "table.key" -> (value, where it was set), as in configs/load.py."""
    flavor, where = given.get("model.flavor", (None, ""))
    if "model.family" in given or not is_folder(flavor):
        return {}
    try:
        return {"model.family": (read(str(flavor))[0], where)}
    except InputError:
        return {}  # it is said where the numbers are asked for
