"""Answer `train.py --help`, and mistakes in its call, before train.py imports torch: that takes
seconds. configs/__init__.py calls it."""

from configs import load, program


def check_call(argv: list[str]) -> None:
    """End this process where there is an answer."""
    code = load.main([*argv, "--quiet", "--world-size=1", "--local-world-size=1"])
    if code or "-h" in argv or any(word.startswith("--help") for word in argv):
        program.leave(code)
