"""The registry of models: family name -> module. A family is one file that imports torch alone; see CONTRIBUTING.md."""

from types import ModuleType

from models import llama

MODELS: dict[str, ModuleType] = {"llama": llama}
