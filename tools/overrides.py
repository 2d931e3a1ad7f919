"""Command lines of train.py with other options in the place of a person's own."""


def with_options(argv: list[str], options: dict[str, str]) -> list[str]:
    """argv with these options, in the place of its own."""
    kept = [
        argument for argument in argv if argument.split("=")[0].removeprefix("--") not in options
    ]
    return kept + [f"--{option}={value}" for option, value in options.items()]
