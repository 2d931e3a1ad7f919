"""The registry of models: family name -> module. A family is one file that imports torch and its neighbours alone; see CONTRIBUTING.md."""

from types import ModuleType

from models import llama

MODELS: dict[str, ModuleType] = {"llama": llama}
