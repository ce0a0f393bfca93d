"""The commands of `dflash`, one module each.

A module offers `add(commands)`, which adds its parser, and `run(arguments, parser)`, which checks the usage and returns
the exit code. What is slow to import is imported in `run`, after the usage is checked.
"""
