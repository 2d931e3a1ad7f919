"""Replace options in command lines of train.py."""


def with_options(argv: list[str], options: dict[str, str]) -> list[str]:
    """Return argv with these options replaced."""
    kept = [
        argument for argument in argv if argument.split("=")[0].removeprefix("--") not in options
    ]
    return kept + [f"--{option}={value}" for option, value in options.items()]
