"""``protoseam VERB …``. Verbs are imported when they are used, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings

VERBS = {
    "demo": "train Baseline, Unlifted and ProtoSeam on the digits, on a CPU",
    "train": "train a run, or go on with one",
    "predict": "classify images with a run's network or an exported file",
    "report": "write the page of a run, or of several side by side",
    "eval": "evaluate a run's deployed network",
    "audit": "check the theory's bounds on a run, term by term",
    "export": "write a run's network as pt2, ONNX, safetensors or a hub folder",
    "data": "list, download and verify data sets",
    "sweep": "search for settings by validation accuracy, with any number of workers",
    "reproduce": "make the paper's runs, tables and figures",
    "bundle": "take a study from one machine to another, unfinished runs included",
    "toy": "compare the paper's one-dimensional model with its closed forms",
}

# What the extra `lab` brings, by import name.
LAB_PACKAGES = {"sklearn", "scipy", "safetensors", "rich", "yaml", "PIL"}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # ρ on a terminal that has none is no reason to end
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        print("usage: protoseam VERB [options]\n\nTrain classifiers lifted at one seam.\n\nverbs:")
        print(*(f"  {name:<11}{what}" for name, what in VERBS.items()), sep="\n")
        print("\nprotoseam VERB --help describes each.")
        return 0 if argv else 2
    if verb == "--version":
        from protoseam import __version__

        print(__version__)
        return 0
    if verb not in VERBS:
        import difflib

        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        print(f"protoseam: there is no verb {verb!r}{hint}", file=sys.stderr)
        return 2
    return _run(verb, argv[1:])


def _run(verb: str, rest: list[str]) -> int:
    from protoseam.errors import ProtoSeamError
    from protoseam.lab.cli.parser import spelled
    from protoseam.lab.data.names import for_terminal

    def failed(why: object, status: int = 1) -> int:
        print(f"protoseam {verb}: {for_terminal(str(why))}", file=sys.stderr)
        return status

    plain = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: (
        f"protoseam {verb}: warning: {for_terminal(str(message))}\n"
    )
    try:
        module = importlib.import_module(f"protoseam.lab.cli.{verb}")
        if hasattr(module, "main"):
            status = int(module.main(rest))
        else:
            parser = argparse.ArgumentParser(prog=f"protoseam {verb}", description=VERBS[verb])
            module.add_arguments(parser)
            # options may stand between positional words; argparse cannot do that for verbs of verbs
            parse = parser.parse_args if parser._subparsers else parser.parse_intermixed_args
            status = int(module.run(parse(spelled(rest, parser))))
        sys.stdout.flush()  # here, where a pipe that is closed is understood
        return status
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LAB_PACKAGES:
            raise
        extra = "Install the extra for the command: pip install 'protoseam[lab]'"
        return failed(f"this command needs {package}, which is not installed. {extra}")
    except ProtoSeamError as error:
        return failed(error, 130 if getattr(error, "by_user", False) else 1)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        return failed(f"{error.filename}: {error.strerror}. Choose another place, or correct this one")
    except KeyboardInterrupt:
        return failed("interrupted", 130)
    finally:
        warnings.formatwarning = plain
