"""What is wrong with a checkpoint, collected so that all of it is named at once."""

import warnings


class Findings:
    """Problems of one checkpoint: an error that names them all, or a warning for each.

    Args:
        source (`str`): the checkpoint's folder or repository, for the message.
        strict (`bool`): whether a problem is an error.
    """

    def __init__(self, source: str, strict: bool = True):
        self.source, self.strict = source, strict
        self.problems: list[str] = []

    def add(self, problem: str) -> None:
        """A problem that makes the drafter another model than the checkpoint says, or may."""
        self.problems.append(problem)

    def warn(self, remark: str) -> None:
        """Something that is readable one way only, but looks like a mistake."""
        warnings.warn(f"{self.source}: {remark}", stacklevel=2)

    def settle(self) -> None:
        """Raises `ValueError` with all problems so far if strict, else warns of each; either way they are done with."""
        problems, self.problems = self.problems, []
        if problems and self.strict:
            raise ValueError(f"{self.source}: {'; '.join(problems)} (strict=False makes this a warning)")
        for problem in problems:
            self.warn(problem)
