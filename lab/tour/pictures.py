"""Draw the pictures of docs/tour.md from what ranks saw."""

from lab.tour import experts, mesh, step
from lab.tour.run import Seen


def pictures(dense: list[Seen], routed: list[Seen]) -> dict[str, str]:
    """Name of the file -> its content."""
    return {
        "mesh.svg": mesh.draw(dense),
        "step.svg": step.draw(dense),
        "experts.svg": experts.draw(routed),
    }
