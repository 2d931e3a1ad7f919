"""Say in words where an exception came from."""

from pathlib import Path

ROOT = f"{Path(__file__).resolve().parents[2]}/"


def raised(error: BaseException) -> str:
    """Return the last place in models/ that an exception came through, otherwise the last one in this
    repository, and its first line."""
    places = []  # file and line of each frame in this repository
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(ROOT) and "/.venv/" not in name:
            places.append(f"{name.removeprefix(ROOT)}:{trace.tb_lineno} ")
        trace = trace.tb_next
    of_models = [place for place in places if place.startswith("models/")]
    place = (of_models or places or [""])[-1]
    lines = str(error).strip().splitlines() or [""]
    return f"{place}raised {type(error).__name__}: {lines[0]}"
