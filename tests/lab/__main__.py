"""python -m tests.lab: the lab from a terminal. See `--help`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import FrameType

from .execute import LabError
from .lab import Lab


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0, 1 when the lab cannot do it, 2 when the arguments are wrong, else the shell's own."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description="A box and a small internet.")
    parser.add_argument("--name", help="which lab (default: CORRAL_LAB_NAME or main)")
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", dest="late_name", help=argparse.SUPPRESS)
    up = commands.add_parser("up", parents=[common], help="bring the lab up and leave it up")
    up.add_argument("--engine", help="which box (default: CORRAL_LAB_ENGINE or trixie)")
    up.add_argument("--keep", action="store_true", help="(what `up` always does)")
    commands.add_parser("down", parents=[common], help="take the lab down, leave nothing")
    commands.add_parser("status", parents=[common], help="what there is of it; exit code 1 when it is not up")
    shell = commands.add_parser("shell", parents=[common], help="a login in the box")
    shell.add_argument("--root", action="store_true", help="as root (default: dev)")
    shell.add_argument("argv", nargs=argparse.REMAINDER, help="run this instead of a login shell")
    commands.add_parser("install-corral", parents=[common], help="install the work tree's corral in the box")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        return _do(options, options.late_name or options.name)
    except LabError as problem:
        print(f"lab: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr)
        return 130


def _do(options: argparse.Namespace, name: str | None) -> int:
    match options.command:
        case "up":
            Lab.up(name, keep=True, engine=options.engine)
        case "down":
            Lab.named(name).down()
        case "status":
            lab = Lab.named(name)
            for key, value in lab.status().items():
                print(f"{key}: {value}")
            return 0 if lab.ready() else 1
        case "install-corral":
            print(Lab.attach(name).install_corral())
        case "shell":
            return _shell(Lab.attach(name), options)
    return 0


def _shell(lab: Lab, options: argparse.Namespace) -> int:
    argv = [part for part in options.argv if part != "--"] or ["bash", "--login"]
    term = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    user = "root" if options.root else lab.box.user
    command, environment = lab.box.command(argv, user, term)
    return subprocess.call(command, env=environment)


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
