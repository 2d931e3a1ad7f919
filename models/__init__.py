"""The registry of model families. `models/family.py` says what a family is.

`configs/` checks a configuration in a fraction of a second, which is less than the import of torch
takes. So this file, models/options.py and models/flavors/ import no torch, and what does is
imported when it is first asked for.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.family import Family, Formats
    from models.options import Numbers

FAMILIES = (
    "llama",
    "qwen3",
    "deepseek_v3",
    "olmo2",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "gemma2",
    "gemma3",
    "kimi_linear",
)


class Registry(Mapping):
    """Family name -> the value of this name in its module of one package, which is imported at its
    first use."""

    def __init__(self, package: str, value: str, names: tuple[str, ...] = FAMILIES):
        self.package = package
        self.value = value
        self.names = names

    def __getitem__(self, name: str):
        if name not in self.names:
            raise KeyError(name)
        return getattr(import_module(f"{self.package}.{name}"), self.value)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _has_formats(name: str) -> bool:
    return (Path(__file__).parent / "formats" / f"{name}.py").exists()


MODELS: "Mapping[str, Family]" = Registry("models", "FAMILY")
NUMBERS: "Mapping[str, Numbers]" = Registry("models.flavors", "NUMBERS")  # without torch
# of the families whose weights are published
FORMATS: "Mapping[str, Formats]" = Registry(
    "models.formats", "FORMATS", tuple(filter(_has_formats, FAMILIES))
)
