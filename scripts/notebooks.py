#!/usr/bin/env python3
"""notebooks.py [NOTEBOOK…]: runs the notebooks of examples/notebooks from top to bottom in a fresh kernel each, prints their last lines and
seconds, and ends with 1 where a cell fails or a notebook takes longer than --most seconds. --save writes the outputs into the files."""
import argparse
import pathlib
import sys
import time

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "examples" / "notebooks"


def printed(notebook):
    """What the cells have printed, line by line."""
    return [text for cell in notebook.cells for out in cell.get("outputs", ()) if out.get("name") == "stdout" for text in out["text"].splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", nargs="*", type=pathlib.Path)
    parser.add_argument("--most", type=float, default=600)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print all that the cells print")
    options = parser.parse_args()
    failed = False
    for path in options.notebook or sorted(FOLDER.glob("*.ipynb")):
        notebook, start = nbformat.read(path, as_version=4), time.time()
        try:
            nbclient.NotebookClient(notebook, timeout=options.most, kernel_name="python3").execute()
        except nbclient.exceptions.CellExecutionError as e:
            print("\n".join(printed(notebook)), f"{path.name}: {e}", sep="\n", file=sys.stderr)
            failed = True
            continue
        seconds = time.time() - start
        failed |= seconds > options.most
        print(f"{path.name}: {seconds:.0f} s{'' if seconds <= options.most else f', more than {options.most:.0f}'}")
        print("\n".join("  " + text for text in (printed(notebook) if options.verbose else printed(notebook)[-4:])), flush=True)
        if options.save:
            nbformat.write(notebook, path)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
