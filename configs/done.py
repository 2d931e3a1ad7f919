"""Say that a run is done, and which option lets it go on."""

from configs.schema import InputError, Training
from configs.words import number_of


class NothingToDo(InputError):
    """A start whose run is done. It ends in this sentence, with exit code 0."""


def sentence(folder: object, step: int, training: Training) -> str:
    """Return the line of a start whose run is done. step: of its newest checkpoint."""
    by = "training.stop_after" if training.stop_after else "training.steps"
    if step > training.last_step:
        state = f"has trained {number_of(step, 'step')}, and {by} asks for {training.last_step}"
    else:
        state = f"has already trained {step} of {training.steps} steps"
    advice = "raise training.steps"
    if training.stop_after and step < training.steps:
        advice = "raise or leave out training.stop_after"
    elif training.stop_after:
        advice = "raise training.steps, and raise or leave out training.stop_after,"
    return f"nothing to do: {folder} {state}; {advice} to go on"
